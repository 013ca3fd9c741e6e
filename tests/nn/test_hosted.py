"""A linear whose latent weight lies on the host equals the one that holds it on the device."""

import pytest
import torch
from covering import covering
from quantized import SPECS, random_weight
from torch import Tensor

from qat.models.stored_state import packed_state_dict
from qat.nn.hosted import HostedLutLinear
from qat.nn.quant_linear import LutLinear
from qat.quant.lora import random_lora
from qat.quant.weight import PackedIndices, dequantize

O, I = 7, 32
KINDS = [
    "lut1",
    "lut2",
    "lut3",
    "lut4_r1",
    "ternary_r2",
    "lut2_s8",
    "pairs6",
    "fours10_r2",
]


def pair(name: str) -> tuple[LutLinear, HostedLutLinear]:
    """The same random linear in both forms, latent weights in bfloat16."""
    torch.manual_seed(0)
    quantized = random_weight(O, I, SPECS[name])
    latent = dequantize(quantized) + 0.01 * torch.randn(O, I)
    parts = latent, quantized, torch.randn(O), SPECS[name]
    room = torch.zeros(O, I, dtype=torch.bfloat16)
    here, away = LutLinear(*parts), HostedLutLinear(*parts, room=room)
    here.weight.data = here.weight.data.bfloat16()
    return here, away


def run(linear: LutLinear) -> dict[str, Tensor]:
    """Output, weight and gradients of two micro-batches."""
    torch.manual_seed(1)
    linear.form_(torch.float32)
    found = {"weight": linear.formed.detach().clone(), "indices": linear.indices()}
    for number in range(2):
        found[f"y{number}"] = y = linear(torch.randn(3, I))
        y.backward(torch.randn(3, O))
    for name, parameter in linear.weight_parameters().items():
        found[f"d_{name}"], parameter.grad = parameter.grad, None
    return found


@pytest.mark.parametrize(("name", "has_adapter"), covering(KINDS, [False, True]))
def test_it_forms_and_pulls_back_the_same_bits(name: str, has_adapter: bool) -> None:
    here, away = pair(name)
    if has_adapter:
        lora = random_lora(here.quantized_weight(), 2, torch.Generator().manual_seed(1))
        for linear in (here, away):
            linear.set_lora(lora._replace(lora_out=torch.randn(O, 2, generator=seeded())))
            linear.weight.requires_grad_(False)
    assert isinstance(away.source(), PackedIndices) and away.latent.dtype == torch.bfloat16
    assert here.latent_size() == away.latent_size()
    for _ in range(2):
        wanted, found = run(here), run(away)
        assert wanted.keys() == found.keys() and len(found) > 6
        for key, tensor in wanted.items():
            assert tensor is None if found[key] is None else torch.equal(found[key], tensor), key
        with torch.no_grad():  # as a step moves them: levels may pass one another
            moved = torch.randn(O, I, generator=seeded()).mul(0.1).bfloat16()
            here.weight.copy_(moved)
            for linear in (here, away):
                linear.codebook += 0.5 * torch.randn(linear.codebook.shape, generator=seeded())
                for parameter in linear.scale_parameters().values():
                    parameter *= 1.1
            address = away.packed.data_ptr()
            away.latent.copy_(moved)
            away.follow_(away.latent)
            assert away.packed.data_ptr() == address, "a recorded forward reads them there"
    here, away = (packed_state_dict(torch.nn.ModuleDict({"a": each})) for each in (here, away))
    assert here.keys() == away.keys() and "a.weight" not in away
    assert all(torch.equal(away[key], tensor) for key, tensor in here.items())


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_its_parameter_is_one_number_that_tells_of_numbers_that_are_none() -> None:
    _, linear = pair("lut2")
    assert linear.weight.shape == (O, I) and linear.weight.untyped_storage().nbytes() == 2
    assert not linear.weight.isnan().any()
    for bad in (torch.nan, torch.inf):
        spoilt = linear.latent.clone()
        spoilt[2, 3] = bad
        linear.follow_(spoilt)
        assert linear.weight.isnan().all()
    linear.follow_(linear.latent)
    assert not linear.weight.isnan().any()
