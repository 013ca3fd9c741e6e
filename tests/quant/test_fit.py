"""Fitting without inputs: less error than the start, exact where exact is possible.

Shapes: O out_features, I in_features.
"""

import pytest
import torch
from covering import covering
from quantized import KINDS, SPECS, fit_to_inputs, random_weight
from torch import Tensor

from qat.quant.codebook import fixed_grid, nearest_indices
from qat.quant.fit import absmax_scales, fit_weight, refit_levels, weighted_error, with_zero_groups
from qat.quant.spec import LutSpec
from qat.quant.weight import (
    SMALLEST,
    QuantizedWeight,
    Scales,
    as_stored,
    dequantize,
    expand_scales,
    index_dtype,
)

SHAPES = [(1, 32), (7, 96), (33, 32)]


def same_bits(left: QuantizedWeight, right: QuantizedWeight) -> bool:
    pairs = zip(
        [left.indices, left.codebook, *left.scales.present().values()],
        [right.indices, right.codebook, *right.scales.present().values()],
        strict=True,
    )
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def rounded_to_absmax(weight: Tensor, spec: LutSpec) -> QuantizedWeight:
    """No fitting at all: absmax group scales, evenly spaced levels."""
    scales = absmax_scales(weight, spec.group_size)
    levels = fixed_grid(spec)
    if levels is None:
        levels = torch.linspace(-1, 1, spec.num_levels)
    scales = Scales(scales / levels.abs().max())
    S = expand_scales(scales, weight.shape[1])
    return QuantizedWeight(nearest_indices(weight, S, levels), levels, scales)


@pytest.mark.parametrize(("name", "shape"), covering(SPECS, SHAPES))
def test_every_format_comes_back_as_stored(name: str, shape: tuple[int, int]) -> None:
    spec, (O, I) = SPECS[name], shape
    spec = spec.model_copy(update={"rank": min(spec.rank, O)})
    fitted = fit_weight(torch.randn(O, I) * 0.05, spec)
    assert same_bits(fitted, as_stored(fitted))
    assert fitted.indices.shape == (O, I // spec.vector_size)
    assert fitted.indices.dtype == index_dtype(spec.num_levels)
    assert fitted.codebook.shape == spec.codebook_shape
    assert int(fitted.indices.max()) < spec.num_levels
    assert spec.vector_size > 1 or (fitted.codebook.diff() >= 0).all()
    if spec.codebook == "lut":
        assert fitted.codebook.abs().max() == 1
    else:
        assert torch.equal(fitted.codebook, fixed_grid(spec))
    assert all(torch.isfinite(tensor).all() for tensor in fitted.scales.present().values())


LEVELS = [name for name, spec in SPECS.items() if spec.vector_size == 1]


@pytest.mark.parametrize("name", [n for n in LEVELS if SPECS[n].scale == "group"])
def test_error_is_below_that_of_the_start(name: str) -> None:
    weight, spec = torch.randn(48, 96), SPECS[name]
    importance = torch.rand(96) + 0.01
    h = importance.expand_as(weight)
    fitted = weighted_error(weight, fit_weight(weight, spec, importance), h)
    assert fitted < 0.97 * weighted_error(weight, rounded_to_absmax(weight, spec), h)


@pytest.mark.parametrize("name", ["lut1", "lut2", "seq1", "seq2", "int3", "ternary", "e2m1"])
def test_a_representable_weight_is_recovered(name: str) -> None:
    spec = SPECS[name]
    hidden = random_weight(16, 64, spec)
    levels = fixed_grid(spec)
    levels = torch.tensor([-1.0, -0.4, 0.1, 0.7])[: spec.num_levels] if levels is None else levels
    # every group shows the largest magnitude, so absmax starts at the true scale
    indices = hidden.indices.clone()
    indices[:, :: spec.group_size] = levels.abs().argmax().item()
    scales = Scales(2.0 ** torch.randint(-6, 0, hidden.scales.scales.shape))
    weight = dequantize(QuantizedWeight(indices, levels, scales))
    fitted = fit_weight(weight, spec)
    torch.testing.assert_close(dequantize(fitted), weight, rtol=1e-3, atol=1e-6)


def test_importance_decides_where_the_error_goes() -> None:
    weight, spec = torch.randn(32, 64), SPECS["lut2"]
    importance = torch.ones(64)
    importance[::4] = 100.0
    h = importance.expand_as(weight)
    aware, blind = fit_weight(weight, spec, importance), fit_weight(weight, spec)
    assert weighted_error(weight, aware, h) < 0.9 * weighted_error(weight, blind, h)
    # a value for every weight is taken as well as one for every feature
    assert same_bits(fit_weight(weight, spec, h), aware)


def test_levels_of_small_weights_are_learned_and_unused_ones_stay() -> None:
    S, indices = torch.full((4, 8), 1e-4), torch.arange(32).view(4, 8) % 3
    levels, old = torch.tensor([-1.0, 0.25, 2.0]), torch.tensor([5.0, 6.0, 7.0, 8.0])
    found = refit_levels(S * levels[indices], S, torch.ones(4, 8), indices, old=old)
    torch.testing.assert_close(found, torch.cat([levels, old[3:]]))


def test_scaling_a_weight_scales_the_result() -> None:
    weight = torch.randn(8, 32)
    one, four = fit_weight(weight, SPECS["lut2"]), fit_weight(4 * weight, SPECS["lut2"])
    torch.testing.assert_close(dequantize(four), 4 * dequantize(one), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_zero_rows_stay_zero_or_tiny(name: str) -> None:
    weight = torch.randn(6, 32)
    weight[2] = 0.0
    fitted = dequantize(fit_weight(weight, SPECS[name]))
    assert torch.isfinite(fitted).all()
    if SPECS[name].scale == "group":
        assert fitted[2].abs().max() <= torch.finfo(torch.float16).tiny * 4
    nothing = fit_weight(torch.zeros(6, 32), SPECS[name])
    assert torch.isfinite(dequantize(nothing)).all()
    if SPECS[name].codebook == "lut":
        assert not nothing.codebook.any()


@pytest.mark.parametrize(
    ("size", "name"), covering([1e-4, 1e-5, 1e-6, 1e-9], ["lut2_s8", "int3_s8"])
)
def test_a_scale_of_8_bits_never_becomes_zero(size: float, name: str) -> None:
    weight = size * torch.randn(6, 32)
    fitted = fit_weight(weight, SPECS[name])
    assert (fitted.scales.scales > 0).all()
    assert (weight - dequantize(fitted)).abs().max() <= max(4 * size, 4 * SMALLEST)
    inputs = torch.randn(64, 32)
    fitted = fit_to_inputs(weight, SPECS[name], inputs.T @ inputs / 64)
    assert (fitted.scales.scales > 0).all() and same_bits(fitted, as_stored(fitted))


def test_powers_of_two_err_less_than_by_the_rule_of_mx_formats() -> None:
    spec = LutSpec(bits=4, codebook="e2m1", group_size=32, scale_bits=5)
    weight = torch.randn(64, 256) * 0.02
    fitted = fit_weight(weight, spec)
    scales, levels = fitted.scales.by_group(), fixed_grid(spec)
    assert torch.equal(scales, torch.exp2(scales.log2().round()))
    largest = weight.view(64, 8, 32).abs().amax(-1)
    S = torch.exp2(largest.log2().floor() - 2).repeat_interleave(32, 1)  # 4 is the last power
    theirs = levels[nearest_indices(weight, S, levels).int()] * S
    assert (weight - dequantize(fitted)).norm() < 0.99 * (weight - theirs).norm()


def test_dtypes_and_gradients_of_the_weight_do_not_matter() -> None:
    weight = torch.randn(8, 32).bfloat16()
    parameter = torch.nn.Parameter(weight)
    fitted = fit_weight(parameter, SPECS["lut2"], torch.ones(32, dtype=torch.float64))
    assert same_bits(fitted, fit_weight(weight.float(), SPECS["lut2"]))
    assert not fitted.codebook.requires_grad


def test_nearest_index_is_the_argmin() -> None:
    levels = torch.tensor([-1.0, -0.2, 0.3, 0.9])
    weight, S = torch.randn(9, 20), torch.randn(9, 20)
    distance = (weight[..., None] / S[..., None] - levels).abs()
    assert torch.equal(nearest_indices(weight, S, levels).long(), distance.argmin(-1))
    assert (nearest_indices(weight, torch.zeros(9, 20), levels) == 1).all()


@pytest.mark.parametrize("name", ["lut2", "seq2", "lut2_r4"])
def test_levels_of_a_sample_serve_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, spec = torch.randn(300, 96), SPECS[name]
    importance = torch.rand(96) + 0.01
    whole = fit_weight(weight, spec, importance)
    monkeypatch.setattr("qat.quant.fit.SAMPLE", 60 * 96)
    monkeypatch.setattr("qat.quant.fit.PIECE_IN_CACHE", 7 * 96)
    sampled = fit_weight(weight, spec, importance)
    assert same_bits(sampled, as_stored(sampled)) and same_bits(
        sampled, fit_weight(weight, spec, importance)
    )
    h = importance.expand_as(weight)
    errors = [weighted_error(weight, quantized, h) for quantized in (sampled, whole)]
    assert errors[0] < 1.02 * errors[1]


@pytest.mark.parametrize("bits", [8, 16])
def test_a_group_of_zeros_has_no_scale_where_zero_can_be_stored(bits: int) -> None:
    weight = torch.randn(4, 32)
    weight[1], weight[2, 16:] = 0.0, 0.0
    fitted = fit_weight(weight, LutSpec(bits=8, group_size=16, scale_bits=bits))
    found = with_zero_groups(weight, fitted)
    zero_groups = [[0, 0], [1, 1], [0, 1], [0, 0]] if bits == 16 else [[0, 0]] * 4
    assert (found.scales.by_group() == 0).int().tolist() == zero_groups
    assert torch.equal(dequantize(found)[weight != 0], dequantize(fitted)[weight != 0])
