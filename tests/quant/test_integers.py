"""Integers behind a weight that llama.cpp's types have rounded already."""

import pytest
import torch

from qat.quant.integers import exact_integers, integer_spec, is_integers, rounded_bits
from qat.quant.spec import LutSpec
from qat.quant.weight import dequantize

TYPES = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}


@pytest.mark.parametrize("name", TYPES)
def test_what_ggml_rounded_is_found_to_the_bit(name: str) -> None:
    library = pytest.importorskip("gguf")
    kind, bits = library.GGMLQuantizationType[name], TYPES[name]
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0  # a row of zeros, as unused words have
    weight[5, :32] = weight[5, :32].abs()
    blocks = library.quants.quantize(weight.numpy(), kind)
    read = torch.from_numpy(library.quants.dequantize(blocks, kind).copy())
    assert rounded_bits(read) == bits
    found = exact_integers(read, bits)
    assert torch.equal(dequantize(found), read)
    assert torch.equal(found.scales.scales, found.scales.scales.half().float())


def test_a_scale_that_was_searched_is_found() -> None:
    codes = torch.randint(-13, 13, (6, 32), generator=torch.Generator().manual_seed(1))
    scales = torch.linspace(-0.03, 0.04, 6).half().float()
    assert rounded_bits(codes * scales[:, None]) == 5


@pytest.mark.parametrize("rows", [torch.ones(4, 24), torch.zeros(4, 32), torch.randn(4, 64)])
def test_floats_zeros_and_odd_widths_are_no_integers(rows: torch.Tensor) -> None:
    assert rounded_bits(rows) is None


def test_formats_of_found_integers() -> None:
    assert all(is_integers(integer_spec(bits)) for bits in TYPES.values())
    assert not is_integers(LutSpec(bits=8, codebook="int", group_size=32, scale_bits=8))
    assert not is_integers(LutSpec(bits=2, codebook="int", group_size=32, scale_bits=16))
