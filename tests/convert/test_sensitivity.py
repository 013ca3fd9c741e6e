"""The effect of quantizing one weight, against changing the model and running it."""

import copy

import pytest
import torch
from tiny import VOCAB, tiny_model
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from qat.convert.bits_budget import (
    JUDGED_TOKENS,
    Sensitivities,
    measure_sensitivities,
    split_calibration,
)
from qat.convert.calibrate import TokenBatch
from qat.convert.quantize import quantize_model
from qat.logs import progress
from qat.models.language_model import LanguageModel
from qat.nn.swap import linear_names, table_names
from qat.quant.spec import LutSpec, PlanRule, QuantPlan

TWO, THREE = LutSpec(bits=2, group_size=8), LutSpec(bits=3, group_size=16)


def tokens(sequences: int = 6, length: int = 12, batch: int = 4) -> list[TokenBatch]:
    ids = torch.randint(VOCAB, (sequences, length), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(length).expand_as(ids)
    return [
        TokenBatch(*pair) for pair in zip(ids.split(batch), positions.split(batch), strict=True)
    ]


def measured(model: PreTrainedModel, formats: dict[str, list[LutSpec]]) -> Sensitivities:
    with progress("measuring", None) as ticker:
        return measure_sensitivities(LanguageModel(model), tokens(6), formats, ticker)


@torch.no_grad()
def textbook_kl(model: PreTrainedModel, changed: PreTrainedModel, batch: TokenBatch) -> float:
    p, q = (m(batch.input_ids).logits.double().log_softmax(-1) for m in (model, changed))
    return (F.kl_div(q, p, log_target=True, reduction="sum") / batch.input_ids.numel()).item()


@pytest.mark.parametrize(
    ("architecture", "tied"), [("qwen3", False), ("llama", False), ("gemma3", True)]
)
def test_one_weight_alone_costs_what_its_conversion_costs(architecture: str, tied: bool) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied, initializer_range=0.2)
    judged, rest = split_calibration(tokens(6))
    names = [
        name
        for name in linear_names(model)
        if name.endswith(("1.mlp.up_proj", "0.self_attn.v_proj"))
    ]
    names += table_names(model)
    found = measured(model, {name: [TWO, THREE] for name in names})
    assert list(found) == names and len(names) == (3 if tied else 4)
    for name in names:
        for spec in (TWO, THREE):
            changed = copy.deepcopy(model)
            plan = QuantPlan(name="p", rules=(PlanRule(pattern=name, spec=spec),))
            quantize_model(LanguageModel(changed), plan, calibration=rest)
            expected = textbook_kl(model, changed, judged)
            assert found[name][spec] == pytest.approx(expected, rel=1e-3, abs=1e-6)
            assert expected > 1e-4
        assert found[name][THREE] < found[name][TWO]


def test_the_model_is_as_before() -> None:
    model = tiny_model(initializer_range=0.2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    storage = model.get_input_embeddings().weight.data_ptr()
    names = [*linear_names(model), *table_names(model)]
    measured(model, {name: [TWO] for name in names})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.get_input_embeddings().weight.data_ptr() == storage
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_quantized_linear_can_be_judged() -> None:
    model = tiny_model(initializer_range=0.2)
    four = QuantPlan(name="p", rules=(PlanRule(pattern="*", spec=LutSpec(bits=4, group_size=8)),))
    quantize_model(LanguageModel(model), four)
    name = linear_names(model)[-1]
    found = measured(model, {name: [TWO, THREE]})[name]
    assert 0 < found[THREE] < found[TWO]


@pytest.mark.parametrize(
    ("sequences", "length", "judged", "fitted"),
    [(1, 8, 1, 1), (2, 8, 1, 1), (7, 8, 3, 4), (40, JUDGED_TOKENS // 4 - 1, 5, 35)],
)
def test_some_sequences_judge_and_others_fit(
    sequences: int, length: int, judged: int, fitted: int
) -> None:
    batches = tokens(sequences, length)
    first, rest = split_calibration(batches)
    ids: Tensor = torch.cat([batch.input_ids for batch in batches])
    assert torch.equal(first.input_ids, ids[:judged])
    assert torch.equal(torch.cat([batch.input_ids for batch in rest]), ids[-fitted:])
    assert first.position_ids.shape == first.input_ids.shape
    assert all(len(batch.input_ids) <= 4 for batch in rest)
