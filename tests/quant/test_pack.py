"""Bit packing: every width of index, odd rows, and the layout against Python's integers."""

import pytest
import torch

from qat.quant.weight import index_dtype, pack, packed_width, unpack

WIDTHS = [1, 2, 3, 5, 7, 8, 9, 13, 16, 31, 64, 100]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12])
def test_a_row_is_one_little_endian_integer_that_comes_back(bits: int) -> None:
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
