"""Bit packing: every width of index, odd rows, and the layout against Python's integers."""

import pytest
import torch

from qat.quant.weight import index_dtype, pack, packed_width, unpack

WIDTHS = [1, 2, 3, 5, 7, 8, 9, 13, 16, 31, 64, 100]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12])
def test_round_trip(bits: int) -> None:
    for I in WIDTHS:
        indices = torch.randint(2**bits, (5, I), dtype=index_dtype(2**bits))
        packed = pack(indices, bits)
        assert packed.dtype == torch.uint8, I
        assert packed.shape == (5, packed_width(I, bits)) and packed.is_contiguous(), I
        assert torch.equal(unpack(packed, bits, I), indices), I


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12])
def test_a_row_is_one_little_endian_integer(bits: int) -> None:
    for I in WIDTHS:
        indices = torch.randint(2**bits, (3, I), dtype=index_dtype(2**bits))
        for row, packed in zip(indices.tolist(), pack(indices, bits).tolist(), strict=True):
            value = sum(index << (i * bits) for i, index in enumerate(row))
            assert bytes(packed) == value.to_bytes(packed_width(I, bits), "little"), I


def test_width_counts_whole_bytes() -> None:
    assert [packed_width(10, bits) for bits in (1, 2, 3, 4)] == [2, 3, 4, 5]


def test_shapes_follow_without_data() -> None:
    assert pack(torch.empty(4, 10, dtype=torch.uint8, device="meta"), 3).shape == (4, 4)
