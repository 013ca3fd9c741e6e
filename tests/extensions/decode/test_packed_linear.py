"""A linear read packed: where it multiplies packed indices and where it forms its weight."""

import pytest
import torch
from covering import covering
from quantized import SPECS, frozen_linear, rounding
from torch import nn
from torch.nn import functional as F

from qat.extensions.decode import slots
from qat.extensions.decode.kernels.lut_matvec import MOST_VECTORS, Norm, matvec
from qat.extensions.decode.kernels.lut_rows import LutRows, order_of, spread
from qat.extensions.decode.slots import Dense, Packed, linear_of
from qat.extensions.decode.step import FusedLinears, PackedLinear, Scratch, dense_linear
from qat.nn.quant_linear import FrozenLutLinear
from qat.quant.spec import ACTIVATION_KINDS, LutSpec


@pytest.mark.parametrize(
    ("size", "has_bias"),
    [({"bits": 2}, True), ({"bits": 2}, False), ({"bits": 8, "vector_size": 4}, False)],
)
@pytest.mark.parametrize("tokens", [1, MOST_VECTORS, MOST_VECTORS + 1])
def test_up_to_eight_tokens_are_multiplied_from_packed_indices(tokens, size, has_bias) -> None:
    linear = frozen_linear(16, 32, LutSpec(**size, group_size=16, scale_bits=8), has_bias)
    parts = linear.source(), linear.levels(), linear.scales_as_stored()
    packed = PackedLinear(linear, LutRows.of(*parts, is_short=False), Scratch())
    formed = []
    real = packed.weight_in
    packed.weight_in = lambda dtype: formed.append(dtype) or real(dtype)
    x = torch.randn(1, tokens, 32)
    found = packed(x)
    assert found.shape == (1, tokens, 16) and bool(formed) is (tokens > MOST_VECTORS)
    torch.testing.assert_close(found, linear(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype"), covering(ACTIVATION_KINDS, [torch.float32, torch.bfloat16])
)
def test_inputs_are_rounded_to_the_bits_of_the_frozen_linear(kind: str, dtype: torch.dtype) -> None:
    linear = frozen_linear(16, 32, LutSpec(bits=2, group_size=16, scale_bits=8), bias=True)
    parts = linear.source(), linear.levels(), linear.scales_as_stored()
    packed = PackedLinear(linear, LutRows.of(*parts, is_short=False), Scratch())
    dense = dense_linear(linear, dtype)
    quantizer = rounding(kind)
    for tokens in (1, MOST_VECTORS + 1):
        x = torch.randn(tokens, 32).to(dtype)
        read = quantizer(x)
        expected = packed(read), dense(read), linear(read)
        for module in (packed, dense, linear):
            module.activation = quantizer
        assert all(map(torch.equal, (packed(x), dense(x), linear(x)), expected))
        together = Dense.of(FusedLinears.of([dense], dtype), dtype)
        assert torch.equal(together(x), F.linear(read, dense.weight, dense.bias))
        for module in (packed, dense, linear):
            module.activation = None
    # one token of a stream: the norm comes first, then the rounding in the model's dtype
    packed.activation = quantizer
    together, stream = FusedLinears.of([packed], dtype), torch.randn(1, 32)
    norm = Norm(stream.square().sum(1, keepdim=True), 1e-6)
    normed = stream * torch.rsqrt(norm.squares / 32 + 1e-6)
    read = spread(quantizer(normed.to(dtype)), order_of(packed.rows))
    assert together.order == 1
    assert torch.equal(together(stream, norm), matvec(read, packed.rows, bias=together.bias))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (LutSpec(bits=2, group_size=16, scale_bits=8), torch.float32),
        (SPECS["fours8_s8"], torch.bfloat16),
    ],
)
def test_slots_form_the_weights_that_were_trained(spec: LutSpec, dtype: torch.dtype) -> None:
    """Two linears are packed alike; a third one, in another format, may join them."""
    linears = [frozen_linear(16, 64, each, bias=True) for each in (spec, spec, SPECS["lut4"])]
    expected = [linear.quantized_weight(dtype) for linear in linears]

    def read(linear: FrozenLutLinear) -> nn.Module:
        if linear.spec.group_size % 16:
            return dense_linear(linear, dtype)
        parts = linear.source(), linear.levels(), linear.scales_as_stored()
        return PackedLinear(linear, LutRows.of(*parts), Scratch())

    for members in (slice(2), slice(3)):
        together = FusedLinears.of([read(linear) for linear in linears[members]], dtype)
        formed = Dense.of(together, dtype)
        assert torch.equal(formed.weight, torch.cat(expected[members]))
        bias = torch.cat([linear.bias for linear in linears[members]])
        assert torch.equal(formed.bias, bias.to(dtype))


def test_few_slots_read_a_large_weight_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "LEAST_WEIGHTS", 16 * 64)
    monkeypatch.setattr(slots, "WEIGHTS_A_SLOT", 2 * 64)
    linear = frozen_linear(16, 64, LutSpec(bits=2, group_size=16, scale_bits=8), bias=True)
    parts = linear.source(), linear.levels(), linear.scales_as_stored()
    half = torch.float16
    together = FusedLinears.of([PackedLinear(linear, LutRows.of(*parts), Scratch())], half)
    few, many = (linear_of(together, half, slots) for slots in (8, 9))
    assert isinstance(few, Packed) and isinstance(many, Dense)
    assert few.nbytes == 16 * 64 // 4 + 16 * 4 and many.nbytes == 16 * 64 * 2
    x = torch.randn(5, 64).to(half)
    assert torch.equal(few(x), many(x))
    assert isinstance(linear_of(together, torch.float32, 8), Dense)
    monkeypatch.setattr(slots, "LEAST_WEIGHTS", 16 * 64 + 1)
    assert isinstance(linear_of(together, half, 8), Dense)
    monkeypatch.setattr(slots, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(slots, "MOST_SLOTS", 7)
    assert isinstance(linear_of(together, half, 8), Dense)
