"""A quantized weight as a checkpoint stores it: what is rounded to what."""

import pytest
import torch
from quantized import e5m3_values, nearest_e5m3

from qat.backend.base import Backend
from qat.quant.weight import (
    SMALLEST,
    decode,
    encode,
    from_stored,
    index_dtype,
    pack,
    packed_width,
    round_as_stored,
    round_levels,
    round_to_byte,
    to_stored,
    unpack,
)

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
    powers = round_as_stored("scales", levels.abs(), 5)
    assert torch.equal(from_stored("scales", to_stored("scales", powers, 5), 5), powers)
    for name, value in {"codebook": levels, "scales": levels.abs()}.items():
        rounded = round_as_stored(name, value, bits)
        stored = to_stored(name, rounded, bits)
        assert stored.dtype.itemsize == bits // 8
        assert torch.equal(from_stored(name, stored, bits), rounded)
        assert torch.equal(round_as_stored(name, rounded, bits), rounded)


WIDTHS = [1, 2, 3, 5, 7, 8, 9, 13, 16, 31, 64, 100]


def test_a_row_is_one_little_endian_integer_that_comes_back() -> None:
    for bits in [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]:
        for I in WIDTHS:
            indices = torch.randint(2**bits, (5, I), dtype=index_dtype(2**bits))
            packed = pack(indices, bits)
            assert packed.dtype == torch.uint8 and packed.is_contiguous(), I
            assert packed.shape == (5, packed_width(I, bits)) == (5, -(-I * bits // 8)), I
            assert torch.equal(unpack(packed, bits, I), indices), I
            for row, octets in zip(indices.tolist(), packed.tolist(), strict=True):
                value = sum(index << (i * bits) for i, index in enumerate(row))
                assert bytes(octets) == value.to_bytes(len(octets), "little"), I


def test_shapes_follow_without_data() -> None:
    assert pack(torch.empty(4, 10, dtype=torch.uint8, device="meta"), 3).shape == (4, 4)


HALVES = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
"""Every finite float16 that is not negative."""


def test_every_float16_and_any_float32_goes_to_the_nearest_value_and_ties_to_even() -> None:
    assert round_to_byte(HALVES).dtype == torch.float32
    values = torch.cat([torch.logspace(-8, 4.8, 10_001), torch.rand(10_001)])
    for each in (HALVES, values, torch.rand(6, 10).T[::2], e5m3_values().float()):
        for bits in (8, 5):
            assert torch.equal(round_to_byte(each, bits), nearest_e5m3(each, bits))


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
        found = round_to_byte(torch.tensor([value]))
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
    expected = {bits: round_to_byte(values, bits) for bits in (8, 5)}
    monkeypatch.setattr(Backend, "is_traced", True)
    for bits, each in expected.items():
        found = round_to_byte(values, bits)
        assert torch.equal(found, each)
        assert not found.signbit().any()
    assert round_to_byte(torch.tensor(torch.nan)).isnan()
