"""A quantized weight as a checkpoint stores it: what is rounded to what."""

import pytest
import torch

from qat.quant.weight import from_stored, round_as_stored, round_levels, to_stored

HALF = 1 / 128  # of a step of levels in 8 bits


def test_levels_of_16_bits_are_the_nearest_halves() -> None:
    levels = torch.tensor([1 / 3, -1.0001, 1e-9, 1000.3])
    found = round_levels(levels, 16)
    assert torch.equal(found, levels.half().float()) and not torch.equal(found, levels)
    assert torch.equal(round_levels(levels, 32), levels)


def test_levels_of_8_bits_are_64ths_between_minus_127_and_127() -> None:
    levels = torch.tensor([0.3, -0.3, HALF * 1.01, -HALF * 0.99, 5.0, -5.0, -2.0, 1.99])
    expected = torch.tensor([19.0, -19, 1, 0, 127, -127, -127, 127]) / 64
    assert torch.equal(round_levels(levels, 8), expected)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_what_is_rounded_is_stored_to_the_bit(bits: int) -> None:
    levels = torch.randn(64, 2) * 2
    for name, value in {"codebook": levels, "scales": levels.abs()}.items():
        rounded = round_as_stored(name, value, bits)
        stored = to_stored(name, rounded, bits)
        assert stored.dtype.itemsize == bits // 8
        assert torch.equal(from_stored(name, stored, bits), rounded)
        assert torch.equal(round_as_stored(name, rounded, bits), rounded)
