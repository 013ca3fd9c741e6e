"""The contents of a packed checkpoint, from the raw state at the time of saving."""

import pytest
import torch
from quantized import KINDS, SPECS, tiny_quantized
from torch import nn

from qat.models.stored_state import narrowed, packed_state_dict, raw_state, stored_state
from qat.nn.latent import to_latent
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import ascending
from qat.quant.weight import from_stored, pack


def shuffled(spec_name: str, *, is_latent: bool) -> nn.Module:
    """A model whose levels lie in any order, as training may leave them."""
    model = tiny_quantized("qwen3", SPECS[spec_name], num_hidden_layers=1)
    if is_latent:
        to_latent(model, list(quant_linears(model)))
    with torch.no_grad():
        for linear in quant_linears(model).values():
            linear.codebook.copy_(linear.codebook[torch.randperm(len(linear.codebook))])
    return model


@pytest.mark.parametrize(
    ("spec_name", "is_latent"),
    [*((name, True) for name in KINDS), ("lut4", False), ("lut2_r4", False), ("fours8_s8", False)],
)
def test_indices_and_levels_are_those_of_the_weight_in_ascending_order(
    spec_name: str, *, is_latent: bool
) -> None:
    model = shuffled(spec_name, is_latent=is_latent)
    state = packed_state_dict(model)
    assert not any(name.endswith("proj.weight") for name in state)
    for name, linear in quant_linears(model).items():
        quantized = ascending(linear.quantized())
        codebook = from_stored("codebook", state[f"{name}.codebook"])
        assert torch.equal(codebook, quantized.codebook)
        octets = pack(quantized.indices, linear.spec.bits)
        assert torch.equal(state[f"{name}.packed"], octets)


@pytest.mark.parametrize("is_latent", [False, True])
def test_the_state_is_that_of_the_moment(*, is_latent: bool) -> None:
    model = shuffled("lut2", is_latent=is_latent)
    expected = {name: tensor.clone() for name, tensor in packed_state_dict(model).items()}
    raw = raw_state(model)
    copies = {name: tensor.clone() for name, tensor in (raw.own | raw.made).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    found = stored_state(model, copies)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_float32_is_stored_in_the_16_bits_that_lose_nothing() -> None:
    brain = torch.tensor([1.0, 2.0**-100])  # what bfloat16 alone holds
    half = torch.tensor([1.0, 1 + 2.0**-10])  # float16 alone
    wide = torch.tensor([1.0, 1 + 2.0**-20])
    both = torch.tensor([1.0, 0.5])
    dtypes = {
        k: t.dtype for k, t in narrowed({"b": brain, "h": half, "w": wide, "o": both}).items()
    }
    assert dtypes == {
        "b": torch.bfloat16, "h": torch.float16, "w": torch.float32, "o": torch.bfloat16,
    }  # fmt: skip
    for one, expected in ((brain, torch.bfloat16), (half, torch.float16)):
        found = narrowed({"one": one, "other": both})
        assert {t.dtype for t in found.values()} == {expected}  # one dtype where it holds all
        assert torch.equal(found["one"].float(), one)
        mixed = narrowed({"one": one, "other": both.bfloat16()})  # a source of two dtypes
        assert {t.dtype for t in mixed.values()} == {expected}  # as where it is read back
    tied = narrowed({"one": half, "tied": half})
    assert tied["one"] is tied["tied"]
