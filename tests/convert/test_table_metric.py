"""Tables are fitted to what they are multiplied by."""

import pytest
import torch
from tiny import IDS, tiny_model
from torch import Tensor

from qat.convert.calibrate import TokenBatch, head_second_moment
from qat.convert.config import ConvertConfig
from qat.convert.quantize import quantize_model
from qat.convert.tables import (
    LOOKED_UP,
    UNSEEN,
    fit_table,
    plan_tables,
    table_inputs,
)
from qat.models.language_model import LanguageModel
from qat.nn.swap import is_tied, table_names, table_spec, with_tables
from qat.quant.spec import PRESETS
from qat.quant.weight import dequantize

POSITIONS = torch.arange(IDS.shape[1]).expand_as(IDS)
BATCHES = [TokenBatch(IDS[:1], POSITIONS[:1]), TokenBatch(IDS[1:], POSITIONS[1:])]


def uneven(**values: object) -> LanguageModel:
    """Return a model some of whose hidden states have larger features than others."""
    model = tiny_model(initializer_range=0.2, **values)
    torch.nn.init.uniform_(model.model.norm.weight, 0.1, 4.0)
    return LanguageModel(model)


def moment(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        hidden = model.model.model(input_ids=IDS).last_hidden_state.flatten(0, 1).double()
    return hidden.T @ hidden / len(hidden)


def test_the_second_moment_is_that_of_what_the_head_reads() -> None:
    model = uneven()
    found = head_second_moment(model, BATCHES)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, moment(model), rtol=1e-5, atol=1e-6)
    assert head_second_moment(model, []) is None


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_heads_count_by_their_tokens_and_have_a_metric(tied: bool) -> None:
    model = uneven(tie_word_embeddings=tied)
    names = table_names(model.model)
    twos = dict.fromkeys(names, [table_spec(2, 32)])
    found = table_inputs(model, twos, BATCHES)
    assert [*found] == names[-1:] and is_tied(model.model) == tied
    counts = torch.bincount(IDS.flatten(), minlength=model.config.vocab_size)
    mass, metric = found[names[-1]]
    assert mass.mean() == pytest.approx(1)
    times = mass / mass[counts == 0][0] - 1
    torch.testing.assert_close(times, counts / counts.float().mean() / UNSEEN)
    expected = moment(model)
    if tied:
        expected += LOOKED_UP * expected.diagonal().mean() * torch.eye(32)
    torch.testing.assert_close(metric, expected, rtol=1e-5, atol=1e-6)
    assert not table_inputs(model, dict.fromkeys(names, [table_spec(8, 32)]), BATCHES)
    assert not table_inputs(model, {}, BATCHES) and not table_inputs(model, twos, [])


@pytest.mark.parametrize("bits", [2, 4])
def test_a_head_errs_less_on_its_inputs(bits: int) -> None:
    model, spec = uneven(tie_word_embeddings=False), table_spec(bits, 32)
    (name,) = table_names(model.model)[1:]
    weight = model.model.get_submodule(name).weight.detach()
    read = table_inputs(model, {name: [spec]}, BATCHES)[name]

    def error(fitted: Tensor) -> float:
        gap = (weight - fitted).double()
        return ((gap @ read.metric) * gap).sum().item()

    plain, aimed = (dequantize(fit_table(weight, spec, each)) for each in (None, read))
    assert error(aimed) < 0.7 * error(plain)
    plan = with_tables(PRESETS["q2a4"], model.model, bits)
    quantize_model(model, plan, calibration=BATCHES, workers=1)
    fitted = model.model.get_submodule(name).quantized_weight()
    # some processors give other last bits to the moments, from which another fit as good follows
    assert error(fitted) == pytest.approx(error(aimed), rel=0.02)


def test_rows_of_zeros_stay_zeros() -> None:
    model = tiny_model(pad_token_id=3, tie_word_embeddings=True)
    (name,) = table_names(model)
    config, nothing = ConvertConfig(to="q2a4"), {"stored": {}, "shipping": None}
    spec = plan_tables(PRESETS["q2a4"], model, config, **nothing).spec_for(name, is_table=True)
    assert (spec.bits, spec.group_size, spec.scale_bits) == (4, 32, 16)
    weight = model.get_submodule(name).weight
    assert not dequantize(fit_table(weight.detach(), spec))[3].any()
    torch.nn.init.ones_(weight)
    spec = plan_tables(PRESETS["q2a4"], model, config, **nothing).spec_for(name, is_table=True)
    assert spec == table_spec(4, 32)
