"""Noise that is put on a model: it reaches what rounding of inputs swallows."""

import pytest
import torch
from quantized import tiny_quantized, with_rounded_inputs
from tiny import tiny_model

from qat.export.dense import dense_state_dict
from qat.export.parts import float_model, logits_of, probe_ids, quantize_inputs
from qat.models.noise import disturbed
from qat.quant.spec import LutSpec

EPS = 2.0**-17


def test_the_head_is_put_off_by_as_much_as_its_layers() -> None:
    model = tiny_model()
    ids = probe_ids(model)
    plain = logits_of(model, ids)
    model.get_decoder().layers = torch.nn.ModuleList()  # whose noise would hide that of the head
    model.config.num_hidden_layers = 0
    bare = logits_of(model, ids)
    with disturbed(model, EPS):
        off = logits_of(model, ids) - bare
    assert not torch.equal(bare, plain)
    torch.testing.assert_close(off.abs(), EPS * bare.abs(), rtol=0.1, atol=0)
    assert {True, False} == set((off > 0).flatten().tolist())


@pytest.mark.parametrize("seed", [0, 1])
def test_every_product_is_put_off_and_all_is_as_before_afterwards(seed: int) -> None:
    student = tiny_quantized("qwen3", LutSpec(bits=4, group_size=16), num_hidden_layers=1)
    student = with_rounded_inputs(student, "int8-static")
    model = float_model(student, dense_state_dict(student, torch.float32), torch.float32)
    quantize_inputs(model, student)
    ids = probe_ids(model)
    plain = logits_of(model, ids)
    with disturbed(model, EPS, every_product=True, seed=seed):
        found = logits_of(model, ids)
    assert not torch.equal(found, plain)
    assert torch.equal(logits_of(model, ids), plain)
    with disturbed(model, EPS, every_product=True, seed=seed):
        assert torch.equal(logits_of(model, ids), found)
    with disturbed(model, EPS, every_product=True, seed=seed + 2):
        assert not torch.equal(logits_of(model, ids), found)
