"""The health figures of sparse attention, against loops over its definition."""

import math

import pytest
import torch
from covering import covering
from nsa_case import documents, nsa_inputs, small, softmax
from nsa_model_case import SMALL, sparse_model
from tiny import tiny_model
from torch import Tensor

from qat.convert.calibrate import TokenBatch
from qat.extensions.nsa import fit as nsa_health
from qat.extensions.nsa.fit import attention_health, gate_health, health_numbers, selection_health
from qat.extensions.nsa.hook import measure
from qat.extensions.nsa.kernels.select import Inputs, select
from qat.extensions.nsa.swap import nsa_modules
from qat.models.language_model import LanguageModel


def by_loops(inputs: Inputs, selection: Tensor, size: int, tile: int) -> tuple[float, float]:
    """Share of queries that miss a block, and the mean mass that those keep."""
    kept, missing, queries = [], 0, 0
    for row in range(inputs.query.shape[0]):
        for t in range(inputs.length):
            past = range(int(inputs.document_starts().expand(2, -1)[row, t]), t + 1)
            for of in range(inputs.key.shape[1]):
                queries += 1
                chosen = selection[row, of, t // tile]
                if all(chosen[i // size] for i in past):
                    continue
                missing += 1
                for head in range(of * inputs.group, (of + 1) * inputs.group):
                    query = inputs.query[row, head, t]
                    scores = inputs.key[row, of, past.start : t + 1] @ query * inputs.scale
                    pairs = zip(past, softmax(scores.tolist()), strict=True)
                    kept.append(sum(share for i, share in pairs if chosen[i // size]))
    return missing / queries, sum(kept) / len(kept)


@pytest.mark.parametrize(("tile", "is_packed"), covering([1, 16, 32], [True, False]))
def test_recall_is_the_dense_mass_inside_the_selected_blocks(tile: int, is_packed: bool) -> None:
    config = small(select_tile=tile)
    inputs = nsa_inputs(config, 150, first=documents(150) if is_packed else None)
    selection = select(inputs, config)
    found = selection_health(inputs, selection, config)
    limit, recall = by_loops(inputs, selection, config.select_block, tile)
    assert found.limit_frac == pytest.approx(limit)
    assert found.recall_frac == pytest.approx(recall, abs=1e-5)
    read = selection.sum(-1).float()
    assert found.blocks_read == pytest.approx(read.mean().item())
    assert found.blocks_predicted == pytest.approx(found.blocks_read)
    assert found.full_frac == pytest.approx((read == config.num_selected).float().mean().item())
    selection[0, 0, -1] = False  # a tile that reads less than it may
    fewer = selection_health(inputs, selection, config)
    assert fewer.blocks_read < fewer.blocks_predicted == found.blocks_predicted


def test_recall_does_not_depend_on_how_many_queries_are_looked_at_together(monkeypatch) -> None:
    config = small()
    inputs = nsa_inputs(config, 130)
    selection = select(inputs, config)
    whole = selection_health(inputs, selection, config)
    monkeypatch.setattr(nsa_health, "MOST_SCORES", 2 * 4 * 130 * 7)
    assert selection_health(inputs, selection, config) == pytest.approx(whole)


def test_autocast_rounds_nothing() -> None:
    config = small()
    inputs = nsa_inputs(config, 130, dtype=torch.float32)
    selection = select(inputs, config)
    whole = selection_health(inputs, selection, config)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(select(inputs, config), selection)
        assert selection_health(inputs, selection, config) == whole


def test_a_choice_of_everything_misses_nothing() -> None:
    config = small()
    inputs = nsa_inputs(config, 64)
    found = selection_health(inputs, select(inputs, config), config)
    assert found[:2] == (0.0, 1.0) and found.blocks_read == found.blocks_predicted


def test_gates_count_by_their_size_whatever_their_sign() -> None:
    gates = torch.tensor([[-1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])[None, None]
    found = gate_health(gates)
    entropy = (0.5 * math.log(4) + 0.5 * math.log(2)) / math.log(3)
    expected = (entropy / 2, 0.25, 0.125, 0.125, 0.25, 0.0)
    assert found == pytest.approx(expected, abs=1e-6)


def batch(length: int) -> TokenBatch:
    ids = torch.randint(320, (2, length), generator=torch.Generator().manual_seed(0))
    return TokenBatch(ids, torch.arange(length).expand(2, -1))


def test_a_model_is_looked_at_layer_by_layer_and_stays_as_it_is() -> None:
    model = LanguageModel(sparse_model())
    tokens = batch(2 * SMALL.reach)
    before = model.hidden(*tokens)
    layers = attention_health(model, tokens)
    assert torch.equal(model.hidden(*tokens), before)
    assert [layer.layer for layer in layers] == [0, 1]
    for layer in layers:
        assert layer.route.backend == "reference" and not layer.is_fallback
        assert layer.gates.selected_frac == 1.0
        assert layer.selection.limit_frac == 0.5
        assert 0.4 < layer.selection.recall_frac < 0.9
    numbers = health_numbers(layers)
    assert numbers["nsa_collapse_frac"] == 1.0 and numbers["nsa_fallbacks"] == 0
    recalls = [layer["recall_frac"] for layer in numbers["nsa_layers"]]
    assert numbers["nsa_recall_least_frac"] == min(recalls)
    assert numbers["nsa_recall_frac"] == pytest.approx(sum(recalls) / 2)
    assert numbers["nsa_blocks_read"] == numbers["nsa_blocks_predicted"] > 1


def test_a_check_that_fails_is_warned_of_once_but_not_where_it_began(caplog) -> None:
    model = LanguageModel(sparse_model())
    for module in nsa_modules(model.model).values():
        module.nsa.gates.requires_grad_(True)

    def warned() -> int:
        caplog.clear()
        measure(model, batch(2 * SMALL.reach))
        return sum("nsa: gate entropy" in record.message for record in caplog.records)

    assert [warned() for _ in range(3)] == [0, 1, 0]
    for module in nsa_modules(model.model).values():
        module.nsa.gates.requires_grad_(False)
    assert warned() == 0


def test_merged_layers_have_no_gates_and_dense_models_no_layers() -> None:
    merged = LanguageModel(sparse_model(config=SMALL.model_copy(update={"mode": "merged"})))
    numbers = health_numbers(attention_health(merged, batch(100)))
    assert not any("gate" in name for name in numbers)
    assert attention_health(LanguageModel(tiny_model(use_cache=False)), batch(20)) == []


def test_dense_in_the_place_of_sparse_attention_is_told() -> None:
    config = SMALL.model_copy(update={"min_len": 1000})
    model = LanguageModel(sparse_model(config=config))
    (_, last) = attention_health(model, batch(100))
    assert last.route.backend == "dense" and last.is_fallback
    assert len(nsa_modules(model.model)) == 2
