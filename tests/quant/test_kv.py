"""Keys and values in 8 or 4 bits: against the equations written out, and packed to the bit."""

import math

import pytest
import torch
from covering import covering
from torch import Tensor

from qat.errors import ConfigError
from qat.quant.kv import PackedHeads, dequantize_heads, fake_quantize_heads, quantize_heads
from qat.quant.spec import KvSpec


def textbook(x: Tensor, bits: int) -> Tensor:
    """One half of a head `(D / 2,)` in float64, a number at a time."""
    levels, fine, x = 2**bits - 1, 2 ** (8 - bits), x.clamp(-65504, 65504)
    low, high = min(0.0, x.min().item()), max(0.0, x.max().item())
    raw = max((high - low) / levels, 2.0**-18)
    exponent = math.floor(math.log2(raw))
    scale = math.ceil(raw / 2.0**exponent * 8) / 8 * 2.0**exponent
    zero = math.floor(-low / scale * fine + 0.5)
    assert zero < 256
    zero -= zero / fine * scale > 65504
    codes = [math.floor(min(max(v / scale + zero / fine, 0), levels) + 0.5) for v in x.tolist()]
    codes = [code - ((code - zero / fine) * scale > 65504) for code in codes]
    return torch.tensor([(code - zero / fine) * scale for code in codes], dtype=torch.float64)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("size", "shift"), covering([1e-9, 1e-4, 1.0, 300.0, 2e4], [0.0, -2.0, 5.0])
)
def test_the_equations(bits: int, size: float, shift: float) -> None:
    x = size * (torch.randn(5, 3, 24) + shift)
    expected = [textbook(half, bits) for half in x.view(-1, 12)]
    found = fake_quantize_heads(x, bits)
    assert torch.equal(found.double(), torch.stack(expected).view_as(x))
    x = x.clamp(-65504, 65504)
    span = x.unflatten(-1, (2, -1)).amax(-1).clamp_min(0) - x.unflatten(-1, (2, -1)).amin(-1)
    worst = (found - x).abs().unflatten(-1, (2, -1)).amax(-1)
    part = 0.6 if size < 2e4 else 1.1  # a code that would lie beyond float16 is one lower
    assert (worst <= part * (span + abs(shift) * size) * 1.125 / (2**bits - 1) + 2e-6).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_short_numbers_between_two_codes(bits: int) -> None:
    """Many lie halfway to the bit, or end a scale's range: no rounding of a quotient may show."""
    x = (torch.randn(400, 16) * 4).round() / 4
    halves = [textbook(half, bits) for half in x.view(-1, 8)]
    assert torch.equal(fake_quantize_heads(x, bits).double(), torch.stack(halves).view_as(x))


def test_a_number_just_below_the_middle_of_two_codes_takes_the_lower() -> None:
    """The scale is 1.125, the zero 100; `x / scale + zero + 0.5` in float32 rounds to the upper."""
    middles = (torch.arange(8) + 0.5) * 1.125
    x = torch.zeros(16)
    x[:2] = torch.tensor([-100.0, 155.0]) * 1.125
    x[2:8] = middles[:6].nextafter(torch.tensor(0.0))
    found = fake_quantize_heads(x, 8)
    assert torch.equal(found.double(), torch.cat([textbook(x[:8], 8), torch.zeros(8).double()]))
    assert torch.equal(found[2:8], torch.arange(6) * 1.125)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_is_what_training_computes_to_the_bit(bits: int, dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3, 7, 48) * 3).to(dtype)
    x[0, 0, 0] = 0.0
    packed = quantize_heads(x, bits)
    assert packed.codes.shape == (2, 3, 7, 48 * bits // 8) and packed.codes.dtype == torch.uint8
    assert packed.width == 48 and packed.steps.shape == (2, 3, 7)
    found = dequantize_heads(packed)
    assert found.dtype == dtype and not found[0, 0, 0].any()
    assert torch.equal(found, fake_quantize_heads(x, bits))
    heads = 2 * 3 * 7
    assert packed.nbytes == heads * KvSpec(bits=bits).head_bytes(48)


@pytest.mark.parametrize("bits", [8, 4])
def test_room_is_filled_where_it_is_asked(bits: int) -> None:
    x = torch.randn(2, 3, 5, 16)
    room = PackedHeads.empty((2, 3, 9, 16), bits, torch.float32, torch.device("cpu"))
    assert not dequantize_heads(room).any()
    room.put(x, slice(None), slice(None), slice(2, 7))
    assert torch.equal(dequantize_heads(room)[:, :, 2:7], fake_quantize_heads(x, bits))
    some = room.at(torch.tensor([1, 0]), slice(None), slice(2, 7))
    assert torch.equal(dequantize_heads(some), fake_quantize_heads(x.flip(0), bits))
    assert not dequantize_heads(room)[:, :, 7:].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_pass_unchanged(bits: int) -> None:
    x, grad = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    fake_quantize_heads(x, bits).backward(grad)
    assert torch.equal(x.grad, grad)


def test_more_bits_are_closer_and_what_is_too_large_is_cut_off() -> None:
    x = torch.randn(4, 64)
    errors = [(fake_quantize_heads(x, bits) - x).norm() / x.norm() for bits in (8, 4)]
    assert errors[0] < 0.01 < errors[1] < 0.1
    assert fake_quantize_heads(torch.full((1, 4), 3e38), 4).isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_up_to_the_ends_of_float16_are_kept(bits: int, dtype: torch.dtype) -> None:
    """One half of a head holds both ends: its scale is the largest that there is, and what is read
    back is finite and as near as codes are."""
    ends = torch.tensor([[-65504.0, 65504.0], [-60000, 65504], [-10000, 65504], [0, 57700]])
    ends = torch.cat([ends, -ends.flip(-1)]).to(dtype)
    x = ends.lerp(ends.flip(-1), torch.linspace(0, 1, 16, dtype=dtype)[:, None, None])
    x = torch.cat([x, torch.randn(16, 8, 2).to(dtype)], -1)
    found = fake_quantize_heads(x, bits)
    assert found.isfinite().all() and found.dtype == dtype
    assert torch.equal(dequantize_heads(quantize_heads(x, bits)), found)
    x, found = x.float(), found.float()
    span = (x[..., :2].amax(-1).clamp_min(0) - x[..., :2].amin(-1).clamp_max(0)).clamp_max(131008)
    scale = span * 1.125 / (2**bits - 1)
    assert ((found - x).abs()[..., :2].amax(-1) <= 1.1 * scale).all()
    assert ((found - x).abs()[..., 2:] < 0.5).all()
    beyond = torch.tensor([[-1e6, 1e6, 0.0, 1.0], [3e38, 1.0, -3e38, 0.0]])
    found = fake_quantize_heads(beyond, bits)
    assert ((found - beyond.clamp(-65504, 65504)).abs() <= 131008 / (2**bits - 1)).all()
    assert (found.abs() <= 65504).all()


def test_bytes_and_widths() -> None:
    four, eight = KvSpec(bits=4), KvSpec(bits=8)
    assert four.head_bytes(128) == 68 and 68 / 256 <= 0.27
    assert eight.head_bytes(128) == 132
    four.check_width(6)
    with pytest.raises(ConfigError, match="kv=int4 keeps a head in two equal halves.* 7 numbers"):
        four.check_width(7)
    with pytest.raises(ConfigError, match="bits"):
        KvSpec.parse({"bits": 5}, "here")
