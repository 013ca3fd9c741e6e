"""Fitting to inputs, against textbook GPTQ and brute-force least squares.

Shapes: N input rows, O out_features, I in_features, G groups per row, C codebook entries.
"""

import math

import pytest
import torch
from quantized import KINDS, SPECS, fit_to_inputs, random_weight
from torch import Tensor

from qat.errors import ConfigError
from qat.quant import error_feedback as ef
from qat.quant.codebook import nearest_indices
from qat.quant.error_feedback import REFERENCE, descent_sweep
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight, Scales, as_stored, dequantize, expand_scales

O, I, N = 6, 48, 200


def inputs(features: int = I, rows: int = N, seed: int = 0) -> Tensor:
    """Correlated rows with features of very different size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator) / features**0.5
    return torch.randn(rows, features, generator=generator) @ mix * torch.linspace(0.2, 2, features)


def moment(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def energy(weight: Tensor, H: Tensor) -> float:
    return ((weight @ H) * weight).sum().item()


def textbook_gptq(weight: Tensor, S: Tensor, levels: Tensor, H: Tensor) -> Tensor:
    """GPTQ without blocks, Cholesky factors or a permuted copy, in float64 (arXiv:2210.17323, 3).

    Quantizes the column of the largest diagonal, moves all columns left by the optimal update, and
    takes the column out of the inverse Hessian by one step of Gaussian elimination.
    """
    W, H, S, levels = weight.double(), H.double(), S.double(), levels.double()
    inverse, left = torch.linalg.inv(H), list(range(W.shape[1]))
    indices = torch.zeros(W.shape, dtype=torch.uint8)
    for q in H.diagonal().argsort(descending=True).tolist():
        distance = (W[:, q, None] - levels * S[:, q, None]).abs()
        indices[:, q] = distance.argmin(1)
        error = (W[:, q] - levels[indices[:, q].int()] * S[:, q]) / inverse[q, q]
        left.remove(q)
        W[:, left] -= error[:, None] * inverse[q, left]
        inverse = inverse - inverse[:, q, None] * inverse[None, q] / inverse[q, q]
    return indices


def fed_back(weight: Tensor, start: QuantizedWeight, H: Tensor) -> Tensor:
    """The indices that feedback chooses under the scales and levels of `start`."""
    columns = ef.stack([weight], [start])
    ef.feed_back(columns, H, REFERENCE)
    return ef.unstack(columns, [len(weight)], [start])[0].indices


def descended(
    weight: Tensor, start: QuantizedWeight, H: Tensor, *, moves_scales: bool
) -> QuantizedWeight:
    """One sweep of coordinate descent."""
    columns = ef.stack([weight], [start])
    coupling = (H / H.diagonal()[:, None]).fill_diagonal_(0.0)
    descent_sweep(columns, coupling, H.diagonal(), moves_scales=moves_scales, ops=REFERENCE)
    return ef.unstack(columns, [len(weight)], [start])[0]


def trial_error(weight: Tensor, quantized: QuantizedWeight, H: Tensor) -> Tensor:
    """The output error of each row, `(O,)`, in float64."""
    error = (weight - dequantize(quantized)).double()
    return ((error @ H.double()) * error).sum(1)


@pytest.mark.parametrize("features", [48, 320])
def test_feedback_is_gptq(features: int) -> None:
    weight = torch.randn(O, features)
    H = ef.damped(moment(inputs(features, 600)))
    start = fit_weight(weight, LutSpec(bits=2, group_size=16))
    found = fed_back(weight, start, H)
    S = expand_scales(start.scales, features)
    expected = textbook_gptq(weight, S, start.codebook, H)
    # float32 may round a tie the other way, after which a row goes on differently
    assert (found == expected).float().mean() > 0.97
    errors = [ef.output_error(weight, start._replace(indices=i), H) for i in (found, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert errors[0] < 0.8 * ef.output_error(weight, start, H)


def test_without_correlation_feedback_changes_nothing() -> None:
    weight = torch.randn(O, I)
    start = fit_weight(weight, LutSpec(bits=3, group_size=16))
    found = fed_back(weight, start, torch.diag(torch.rand(I) + 0.1))
    S = expand_scales(start.scales, I)
    assert torch.equal(found, nearest_indices(weight, S, start.codebook))


def test_a_hessian_too_close_to_singular_for_float32_is_factored() -> None:
    x = torch.randn(300, 1, dtype=torch.float64) + 1e-5 * torch.randn(300, 8, dtype=torch.float64)
    H = (x.T @ x / len(x)).float()
    H += 2e-7 * torch.eye(8)
    assert torch.linalg.cholesky_ex(H.flip(0, 1) - 4e-7 * torch.eye(8)).info > 0
    coupling = ef.feedback_coupling(H)
    assert coupling.isfinite().all() and torch.equal(coupling, coupling.tril(-1))


def test_output_error_is_the_mean_square_of_the_output() -> None:
    weight, x = torch.randn(O, I), inputs()
    quantized = fit_weight(weight, LutSpec(bits=2, group_size=16))
    expected = ((x @ (weight - dequantize(quantized)).T) ** 2).sum() / len(x)
    assert ef.output_error(weight, quantized, moment(x)) == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("group_size", [4, 16])
@pytest.mark.parametrize("moves_scales", [False, True])
def test_one_sweep_moves_everything_to_its_best_in_turn(
    group_size: int, moves_scales: bool
) -> None:
    features = 16
    spec = LutSpec(bits=2, group_size=group_size)
    weight, H = torch.randn(O, features), ef.damped(moment(inputs(features)))
    start = random_weight(O, features, spec)
    if not moves_scales:  # a row of scales for each column, as low-rank scales have
        start = start._replace(scales=Scales(expand_scales(start.scales, features)))
    expected = start
    for i in range(features):
        if moves_scales and i % group_size == 0:
            expected = with_best_scale(weight, expected, H, i // group_size)
        trials = []
        for c in range(spec.num_levels):
            indices = expected.indices.clone()
            indices[:, i] = c
            trials.append(trial_error(weight, expected._replace(indices=indices), H))
        indices = expected.indices.clone()
        indices[:, i] = torch.stack(trials).argmin(0)
        expected = expected._replace(indices=indices)
    found = descended(weight, start, H, moves_scales=moves_scales)
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.scales.scales, expected.scales.scales, rtol=2e-3, atol=0)


def with_best_scale(
    weight: Tensor, quantized: QuantizedWeight, H: Tensor, group: int
) -> QuantizedWeight:
    """Least squares for one group's scales; one that would turn negative stays."""
    S, G = quantized.scales.scales.clone(), quantized.scales.scales.shape[1]
    size = weight.shape[1] // G
    part = torch.zeros(weight.shape[1]).double()
    part[group * size : (group + 1) * size] = 1.0
    D = quantized.codebook[quantized.indices.int()].double() * part
    residual = (weight - dequantize(quantized)).double() + D * S[:, group, None].double()
    best = ((residual @ H.double()) * D).sum(1) / ((D @ H.double()) * D).sum(1)
    best = best.half().float()
    S[:, group] = torch.where(best > 0, best, S[:, group])
    return quantized._replace(scales=Scales(S))


def test_scales_that_would_turn_negative_stay() -> None:
    H = torch.eye(I)
    quantized = random_weight(O, I, LutSpec(bits=2, group_size=16))
    signal = dequantize(quantized)
    mirrored = torch.where(torch.arange(I) < 16, -signal, 2 * signal)
    found = descended(mirrored, quantized, H, moves_scales=True).scales.scales
    old = quantized.scales.scales
    assert torch.equal(found[:, 0], old[:, 0])
    torch.testing.assert_close(found[:, 1:], 2 * old[:, 1:], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["lut2", "lut2_r4"])
def test_levels_equal_brute_force(name: str) -> None:
    weight, x = torch.randn(O, I), inputs()
    quantized = random_weight(O, I, SPECS[name])
    S = expand_scales(quantized.scales, I)
    parts = [torch.where(quantized.indices == c, S, 0.0) for c in range(4)]
    columns = torch.stack([(x.double() @ part.double().T).flatten() for part in parts], dim=1)
    target = (x @ weight.T).double().flatten()
    expected = torch.linalg.lstsq(columns, target).solution
    fitted = ef.solve_levels(weight.T, S.T, quantized.indices.T, H=moment(x), C=4)
    torch.testing.assert_close(fitted.double(), expected, rtol=1e-3, atol=1e-4)
    few = quantized.indices.T.clamp_max(2)  # nobody takes the last level
    assert ef.solve_levels(weight.T, S.T, few, H=moment(x), C=4).isfinite().all()


@pytest.mark.parametrize("name", ["lut2", "lut3", "lut2_r4"])
def test_new_levels_keep_the_indices_and_lower_the_error(name: str) -> None:
    spec, weights = SPECS[name], [torch.randn(O, 96), torch.randn(4, 96)]
    H = ef.damped(moment(inputs(96)))
    starts = [random_weight(len(weight), 96, spec) for weight in weights]
    columns = ef.stack(weights, starts)
    ef.refit_levels(columns, H, [O, 4], spec)
    for weight, start, end in zip(
        weights, starts, ef.unstack(columns, [O, 4], starts), strict=True
    ):
        assert ef.output_error(weight, end, H) <= ef.output_error(weight, start, H)
        assert (end.codebook.diff() >= 0).all()
        assert end.codebook.abs().max() == pytest.approx(1)
    S = columns.scales.repeat_interleave(columns.group_size, dim=0)
    torch.testing.assert_close(columns.residual, columns.weight - columns.chosen * S)


def test_new_levels_of_larger_weights_are_in_their_scales() -> None:
    spec, weight = SPECS["lut2"], torch.randn(O, 96)
    H, start = ef.damped(moment(inputs(96))), random_weight(O, 96, SPECS["lut2"])
    found = []
    for size in (1, 8):
        columns = ef.stack([size * weight], [start])
        ef.refit_levels(columns, H, [O], spec)
        found += ef.unstack(columns, [O], [start])
    assert found[0].codebook.abs().max() == found[1].codebook.abs().max() == pytest.approx(1)
    torch.testing.assert_close(dequantize(found[1]), 8 * dequantize(found[0]), rtol=2e-3, atol=1e-3)


def test_weights_that_share_inputs_do_not_know_each_other() -> None:
    weights = [torch.randn(rows, I) for rows in (5, 1, 8)]
    H = moment(inputs())
    together = ef.fit_all_to_inputs(weights, SPECS["lut2"], H)
    for weight, fit in zip(weights, together, strict=True):
        alone = fit_to_inputs(weight, SPECS["lut2"], H)
        torch.testing.assert_close(dequantize(fit.quantized), dequantize(alone))


def test_codewords_serve_the_rows_that_count() -> None:
    bells, signs = torch.randn(64, 32), torch.rand(64, 32).mul(0.1).add(0.9)
    weight = torch.cat([bells, signs * torch.randn(64, 32).sign()])
    is_bell, H = torch.arange(128) < 64, moment(inputs(32))

    def errors(mass: Tensor) -> Tensor:
        (fit,) = ef.fit_all_to_inputs([weight], SPECS["pairs6"], H, mass=mass)
        gap = weight - dequantize(fit.quantized)
        own = ((gap @ H) * gap).sum(1)
        return torch.stack([own[is_bell].sum(), own[~is_bell].sum()])

    for_bells, for_signs = (errors(0.001 + each.float()) for each in (is_bell, ~is_bell))
    assert for_bells[0] < for_signs[0] and for_signs[1] < 0.5 * for_bells[1]


@pytest.mark.parametrize("name", KINDS)
def test_never_worse_than_rounding_alone(name: str) -> None:
    spec, weight = SPECS[name], torch.randn(O, 32)
    H = moment(inputs(32))
    ((fitted, output_error, *_),) = ef.fit_all_to_inputs([weight], spec, H)
    alone = fit_weight(weight, spec, ef.damped(H).diagonal())
    H = ef.damped(H)
    error, before = (ef.output_error(weight, each, H) for each in (fitted, alone))
    assert output_error == pytest.approx((error / energy(weight, H)) ** 0.5, rel=1e-4)
    # few vectors are held nearly as they are
    assert error <= before if spec.vector_size > 1 else error < 0.95 * before
    stored = as_stored(fitted)
    assert torch.equal(dequantize(stored), dequantize(fitted))
    assert spec.vector_size > 1 or (fitted.codebook.diff() >= 0).all()
    assert int(fitted.indices.max()) < spec.num_levels


@pytest.mark.parametrize("kind", ["dead features", "few rows", "no input at all"])
def test_inputs_that_leave_the_hessian_singular(kind: str) -> None:
    x = inputs(32, rows=3 if kind == "few rows" else N)
    if kind == "dead features":
        x[:, 5:20] = 0.0
    if kind == "no input at all":
        x.zero_()
    weight, spec = torch.randn(O, 32), SPECS["lut2"]
    fitted = fit_to_inputs(weight, spec, moment(x))
    value = dequantize(fitted)
    assert torch.isfinite(value).all()
    alone = fit_weight(weight, spec)
    seen = (((weight - value) @ x.T) ** 2).sum()
    assert seen <= (((weight - dequantize(alone)) @ x.T) ** 2).sum() + 1e-9


def test_damping_leaves_the_callers_hessian_alone() -> None:
    H = torch.diag(torch.tensor([4.0, 0.0]))
    assert ef.damped(H).diagonal().tolist() == pytest.approx([4.02, 0.02])
    assert H[1, 1] == 0 and ef.damped(torch.zeros(2, 2)).tolist() == [[1, 0], [0, 1]]


def massive_inputs(features: int) -> torch.Tensor:
    """Return `(N, features)`; every 64th token has two collinear channels 10^4 times the others.

    The inputs of `down_proj` in Qwen2.5 and Llama models look like this (arXiv:2402.17762).
    """
    x = inputs(features)
    x[::64, 3] = 2e4
    x[::64, 7] = -1.7e4
    return x


def test_massive_activations_need_no_more_damping_than_others() -> None:
    H = moment(massive_inputs(96).double())
    assert ef.needed_damping(H) == ef.DAMPING
    weight = torch.randn(O, 96)
    (fit,) = ef.fit_all_to_inputs([weight], SPECS["lut2"], H)
    assert fit.damping == ef.DAMPING and math.isfinite(fit.output_error)


@pytest.mark.parametrize("name", ["lut2", "int3", "fours8_s8"])
def test_a_moment_spoilt_by_rounding_gets_more_damping(name: str) -> None:
    H = moment(massive_inputs(96).double())
    # two collinear channels whose product came out too large: the moment of nothing
    H[3, 7] = H[7, 3] = -1.001 * (H[3, 3] * H[7, 7]).sqrt()
    assert torch.linalg.cholesky_ex(ef.damped(H)).info > 0
    weight = torch.randn(O, 96)
    (fit,) = ef.fit_all_to_inputs([weight], SPECS[name], H)
    assert fit.damping in (10 * ef.DAMPING, 100 * ef.DAMPING)
    assert dequantize(fit.quantized).isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e9])
def test_what_is_no_second_moment_is_refused(value: float) -> None:
    H = moment(inputs(32))
    H[4, 4] = value
    with pytest.raises(ConfigError, match="32 inputs"):
        fit_to_inputs(torch.randn(O, 32), SPECS["lut2"], H)
    counts = torch.tensor([100, 100])
    with pytest.raises(ConfigError, match="32 inputs"):
        moments = torch.stack([H, H])
        ef.fit_stack_to_inputs(torch.randn(2 * O, 32), SPECS["lut2"], moments, counts)
