"""Scales of 8 bits: rounding against the nearest of all values, and bytes that come back."""

import pytest
import torch
from quantized import e5m3_values, nearest_e5m3

from qat.backend.base import Backend
from qat.quant.weight import SMALLEST, decode, encode, round_to_e5m3

HALVES = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
"""Every finite float16 that is not negative."""


def test_every_float16_and_any_float32_goes_to_the_nearest_value_and_ties_to_even() -> None:
    assert round_to_e5m3(HALVES).dtype == torch.float32
    values = torch.cat([torch.logspace(-8, 4.8, 10_001), torch.rand(10_001)])
    for each in (HALVES, values, torch.rand(6, 10).T[::2], e5m3_values().float()):
        assert torch.equal(round_to_e5m3(each), nearest_e5m3(each))


def test_edges() -> None:
    for value, rounded in [
        (0.0, 0.0),
        (-0.0, 0.0),
        (-1e-9, 0.0),
        (-3.0, 0.0),
        (-torch.inf, 0.0),
        (2.0**-18, 0.0),  # half of the smallest: a tie
        (1.01 * 2.0**-18, SMALLEST),
        (1.0625, 1.0),  # ties go to even mantissas
        (1.1875, 1.25),
        (63488.0, 61440.0),  # the next value would be 65536
        (65519.0, 61440.0),
        (65520.0, torch.inf),  # as a float16
        (1e30, torch.inf),
        (torch.inf, torch.inf),
        (torch.nan, torch.nan),
    ]:
        found = round_to_e5m3(torch.tensor([value]))
        assert torch.equal(found, torch.tensor([rounded])) or (
            found.isnan().all() and value != value
        ), value
        assert not torch.signbit(found).any() or value != value, value


def test_all_finite_bytes_come_back_and_ascend() -> None:
    octets = torch.arange(248, dtype=torch.uint8)
    values = decode(octets)
    assert values.dtype == torch.float32
    assert torch.equal(values, e5m3_values().float())
    assert torch.equal(encode(values), octets)


def test_comparing_finds_what_bits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([HALVES, HALVES * 1.0001, -HALVES, torch.tensor([65520.0, torch.inf])])
    expected = round_to_e5m3(values)
    monkeypatch.setattr(Backend, "is_traced", True)
    found = round_to_e5m3(values)
    assert torch.equal(found, expected)
    assert not found.signbit().any()
    assert round_to_e5m3(torch.tensor(torch.nan)).isnan()
