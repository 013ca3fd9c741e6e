"""Rounding of a linear's input: against torchao and the textbook, in value and in gradient."""

import pytest
import torch
from covering import covering
from torch import Tensor

from qat.quant.activation import quantize_static, quantize_tokens, static_scale, token_levels
from qat.quant.spec import ACTIVATION_KINDS, ActivationSpec

DYNAMIC = [kind for kind in ACTIVATION_KINDS if not ActivationSpec(kind=kind).is_static]


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    """Tokens of many sizes: of one sign, with an outlier, of zeros, and too small to divide."""
    torch.manual_seed(0)
    x = torch.randn(64, 48) * torch.logspace(-6, 4, 64)[:, None]
    x[0], x[1] = x[0].abs(), -x[1].abs()
    x[2, 3] *= 1000
    x[3], x[4] = 0, 1e-40
    return x.to(dtype)


def test_asymmetric_is_torchaos_to_the_bit() -> None:
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    x, how = tokens(), {"quant_min": -128, "quant_max": 127}
    scale, zero = primitives.choose_qparams_affine(
        x,
        primitives.MappingType.ASYMMETRIC,
        (1, 48),
        torch.int8,
        **how,
        zero_point_dtype=torch.int8,
    )
    levels = primitives.quantize_affine(x, (1, 48), scale, zero, torch.int8, **how)
    values = primitives.dequantize_affine(levels, (1, 48), scale, zero, torch.int8, **how)
    found = token_levels(x, "int8-asymmetric")
    assert torch.equal(found.scale[:, 0], scale) and torch.equal(found.zero[:, 0], zero.float())
    assert torch.equal(found.levels, levels.float())
    assert torch.equal(quantize_tokens(x, "int8-asymmetric"), values)


def test_zero_points_lie_among_the_levels() -> None:
    """The range of any token begins at its lowest number or at 0."""
    one = torch.tensor(
        [[-1.0, 1e-3], [-3.0, 0.0], [-1e-30, -1e-38], [-2e38, 1e38], [1e-40, -1e-40]]
    )
    x = torch.cat([one, -one, torch.rand(1000, 2) * torch.logspace(-30, 30, 1000)[:, None] - 1])
    found = token_levels(x, "int8-asymmetric")
    assert found.zero.min() == -128 and found.zero.max() == 127
    assert torch.equal(found.zero, found.zero.round())


def test_symmetric_reaches_127_and_rounds_to_nearest() -> None:
    x = tokens()
    found = token_levels(x, "int8")
    expected = x.double() / (x.double().abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-126)
    is_large = x.abs().amax(-1) > 1e-30
    assert (found.levels - expected).abs().max() <= 0.5 + 1e-4
    assert torch.equal(found.levels, found.levels.round()) and found.zero is None
    assert (found.levels.abs().amax(-1)[is_large] == 127).all()


def test_fp8_is_torchs_own_rounding_at_amax_over_448() -> None:
    x = tokens()
    scale = (x.abs().amax(-1, keepdim=True).double() / 448).float().clamp_min(2.0**-126)
    expected = (x * scale.double().reciprocal().float()).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(quantize_tokens(x, "fp8"), expected)
    largest = quantize_tokens(x, "fp8").abs().amax(-1)
    torch.testing.assert_close(largest, x.abs().amax(-1), rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize(
    ("kind", "dtype"), covering(DYNAMIC, [torch.float32, torch.bfloat16, torch.float16])
)
def test_tokens_do_not_know_each_other_and_gradients_pass(kind: str, dtype: torch.dtype) -> None:
    x = tokens().clamp(-1e4, 1e4).to(dtype).requires_grad_()
    y = quantize_tokens(x, kind)
    assert y.dtype == dtype and torch.equal(y[7:9], quantize_tokens(x[7:9], kind))
    assert torch.equal(y.detach(), token_levels(x, kind).values().to(dtype))
    slope = torch.randn_like(x)
    y.backward(slope)
    assert torch.equal(x.grad, slope)
    assert not torch.equal(y, x)


def test_static_gradients_are_those_of_learned_step_sizes() -> None:
    torch.manual_seed(1)
    x, slope = torch.randn(5, 32, requires_grad=True), torch.randn(5, 32)
    scale = torch.tensor(1.5 / 127, requires_grad=True)
    y = quantize_static(x, scale)
    ratio = (x / scale).detach()
    levels = ratio.clamp(-128, 127).round()
    torch.testing.assert_close(y.detach(), levels * scale.detach(), rtol=1e-6, atol=0)
    y.backward(slope)
    is_inside = (ratio >= -128) & (ratio <= 127)
    assert 0 < is_inside.sum() < x.numel()
    torch.testing.assert_close(x.grad, slope * is_inside)
    # arXiv:1902.08153, equation 3, and the factor of section 2.2
    expected = torch.where(is_inside, levels - ratio, levels) * slope
    torch.testing.assert_close(scale.grad, expected.sum() / (127 * 32) ** 0.5, rtol=1e-4, atol=1e-6)


def test_static_forward_is_the_stored_scales_to_the_bit() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        x, scale = torch.randn(3, 24), torch.rand(()) / 50
        levels = (x * scale.double().reciprocal().float()).clamp(-128, 127).round()
        assert torch.equal(quantize_static(x, scale), levels * scale)
        half = quantize_static(x.bfloat16(), scale)
        assert half.dtype == torch.bfloat16


def test_a_static_scale_of_16_bits_is_the_nearest_half() -> None:
    torch.manual_seed(0)
    middles = (1 + torch.arange(2048) / 2048 + 2.0**-12) * 0.01  # ties are among them
    scales = torch.cat([torch.randn(10_000).mul(3).exp().clamp(2.0**-14, 65504), middles])
    assert torch.equal(static_scale(scales, 16), scales.half().float())
    assert torch.equal(static_scale(scales, 32), scales)
    x, scale = torch.randn(3, 24), torch.tensor(0.0123, requires_grad=True)
    y = quantize_static(x, scale, 16)
    assert torch.equal(y, quantize_static(x, scale.half().float()))
    assert not torch.equal(y, quantize_static(x, scale))
    y.sum().backward()
    assert scale.grad.abs() > 0


def test_bits_of_a_scale_are_of_static_ones() -> None:
    short = ActivationSpec(kind="int8-static", scale_bits=16)
    assert short.model_dump() == {"kind": "int8-static", "scale_bits": 16}
    assert ActivationSpec(kind="int8-static").model_dump() == {"kind": "int8-static"}
    with pytest.raises(ValueError, match="scale_bits=16 is for kind=int8-static, got kind=fp8"):
        ActivationSpec(kind="fp8", scale_bits=16)
