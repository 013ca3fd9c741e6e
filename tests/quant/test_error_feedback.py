"""Fitting to inputs, against textbook GPTQ and brute-force least squares.

Shapes: N input rows, O out_features, I in_features, G groups per row, C codebook entries.
"""

import pytest
import torch
from quantized import SPECS, random_weight
from torch import Tensor

from qat.quant import error_feedback as ef
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec
from qat.quant.weight import (
    as_stored,
    dequantize,
    expand_scales,
    nearest_indices,
)

O, I, N = 6, 48, 200


@pytest.fixture(autouse=True)
def _one_thread(_seeded: None) -> None:
    torch.set_num_threads(1)  # on small weights a second thread costs more than it gives


def inputs(features: int = I, rows: int = N, seed: int = 0) -> Tensor:
    """Correlated rows with features of very different size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator) / features**0.5
    return torch.randn(rows, features, generator=generator) @ mix * torch.linspace(0.2, 2, features)


def moment(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


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


@pytest.mark.parametrize("features", [48, 160])
def test_error_feedback_is_gptq(features: int) -> None:
    weight = torch.randn(O, features)
    H = ef.damped(moment(inputs(features, 400)))
    start = fit_weight(weight, LutSpec(bits=2, group_size=16))
    S = expand_scales(start.scales, features)
    found = ef.error_feedback(weight, S, start.codebook, H)
    expected = textbook_gptq(weight, S, start.codebook, H)
    # float32 may round a tie the other way, after which a row goes on differently
    assert (found == expected).float().mean() > 0.97
    errors = [ef.output_error(weight, start._replace(indices=i), H) for i in (found, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert errors[0] < 0.8 * ef.output_error(weight, start, H)


def test_without_correlation_feedback_changes_nothing() -> None:
    weight = torch.randn(O, I)
    start = fit_weight(weight, LutSpec(bits=3, group_size=16))
    S = expand_scales(start.scales, I)
    found = ef.error_feedback(weight, S, start.codebook, torch.diag(torch.rand(I) + 0.1))
    assert torch.equal(found, nearest_indices(weight, S, start.codebook))


def test_output_error_is_the_mean_square_of_the_output() -> None:
    weight, x = torch.randn(O, I), inputs()
    quantized = fit_weight(weight, LutSpec(bits=2, group_size=16))
    expected = ((x @ (weight - dequantize(quantized)).T) ** 2).sum() / len(x)
    assert ef.output_error(weight, quantized, moment(x)) == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("name", ["lut2", "int3", "lut2_r4", "ternary"])
def test_coordinate_descent_never_raises_the_error(name: str) -> None:
    spec, features = SPECS[name], 160
    weight, H = torch.randn(O, features), ef.damped(moment(inputs(features)))
    quantized = random_weight(O, features, spec)
    errors = [ef.output_error(weight, quantized, H)]
    for _ in range(5):
        indices = ef.coordinate_descent(weight, quantized, H)
        quantized = quantized._replace(indices=indices)
        errors.append(ef.output_error(weight, quantized, H))
    assert all(b <= a * (1 + 1e-5) for a, b in zip(errors, errors[1:], strict=False))
    assert errors[1] < errors[0]


def test_one_sweep_moves_each_index_to_its_best_level_in_turn() -> None:
    spec, features = SPECS["lut2"], 16
    weight, H = torch.randn(O, features), ef.damped(moment(inputs(features)))
    start = random_weight(O, features, spec)
    expected = start
    for i in range(features):
        trials = []
        for c in range(spec.num_levels):
            indices = expected.indices.clone()
            indices[:, i] = c
            error = weight - dequantize(start._replace(indices=indices))
            trials.append(((error @ H) * error).sum(1))
        indices = expected.indices.clone()
        indices[:, i] = torch.stack(trials).argmin(0)
        expected = start._replace(indices=indices)
    assert torch.equal(ef.coordinate_descent(weight, start, H), expected.indices)


def test_group_scales_equal_brute_force() -> None:
    weight, x = torch.randn(O, I), inputs()
    quantized = fit_weight(weight, LutSpec(bits=3, group_size=16))
    fitted = ef.fit_group_scales_to_inputs(weight, quantized, moment(x))
    levels = quantized.codebook[quantized.indices.int()].double()
    G = fitted.shape[1]
    for o in range(O):
        # the output of row o is linear in its scales: x @ D, one column a group
        D = torch.zeros(I, G, dtype=torch.float64)
        for g in range(G):
            part = slice(g * I // G, (g + 1) * I // G)
            D[part, g] = levels[o, part]
        target = x.double() @ weight[o].double()
        expected = torch.linalg.lstsq(x.double() @ D, target).solution
        torch.testing.assert_close(fitted[o].double(), expected, rtol=1e-3, atol=1e-4)


def test_group_scales_that_would_turn_negative_stay() -> None:
    weight, H = torch.randn(O, I), torch.eye(I)
    quantized = random_weight(O, I, LutSpec(bits=2, group_size=16))
    signal = dequantize(quantized)
    mirrored = torch.where(torch.arange(I) < 16, -signal, 2 * signal)
    fitted = ef.fit_group_scales_to_inputs(mirrored, quantized, H)
    old = quantized.scales.scales
    assert torch.equal(fitted[:, 0], old[:, 0])
    torch.testing.assert_close(fitted[:, 1:], 2 * old[:, 1:], rtol=1e-4, atol=1e-6)
    assert weight.shape == fitted.repeat_interleave(16, 1).shape


@pytest.mark.parametrize("name", ["lut2", "lut2_r4"])
def test_levels_equal_brute_force(name: str) -> None:
    weight, x = torch.randn(O, I), inputs()
    quantized = random_weight(O, I, SPECS[name])
    S = expand_scales(quantized.scales, I).double()
    parts = [torch.where(quantized.indices == c, S, 0.0) for c in range(4)]
    columns = torch.stack([(x.double() @ part.T).flatten() for part in parts], dim=1)
    target = (x @ weight.T).double().flatten()
    expected = torch.linalg.lstsq(columns, target).solution
    fitted = ef.fit_levels_to_inputs(weight, quantized, moment(x))
    torch.testing.assert_close(fitted.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_level_that_nobody_takes_gets_a_finite_value() -> None:
    weight, quantized = torch.randn(O, I), random_weight(O, I, SPECS["lut2"])
    quantized = quantized._replace(indices=quantized.indices.clamp_max(2))
    assert torch.isfinite(ef.fit_levels_to_inputs(weight, quantized, moment(inputs()))).all()


@pytest.mark.parametrize("name", SPECS)
def test_never_worse_than_rounding_alone(name: str) -> None:
    spec, weight = SPECS[name], torch.randn(O, 32)
    H = moment(inputs(32))
    fitted = ef.fit_to_inputs(weight, spec, H)
    alone = fit_weight(weight, spec, ef.damped(H).diagonal())
    H = ef.damped(H)
    assert ef.output_error(weight, fitted, H) < 0.95 * ef.output_error(weight, alone, H)
    stored = as_stored(fitted)
    assert torch.equal(dequantize(stored), dequantize(fitted))
    assert (fitted.codebook.diff() >= 0).all() and fitted.indices.max() < spec.num_levels


@pytest.mark.parametrize("kind", ["dead features", "few rows", "no input at all"])
def test_inputs_that_leave_the_hessian_singular(kind: str) -> None:
    x = inputs(32, rows=3 if kind == "few rows" else N)
    if kind == "dead features":
        x[:, 5:20] = 0.0
    if kind == "no input at all":
        x.zero_()
    weight, spec = torch.randn(O, 32), SPECS["lut2"]
    fitted = ef.fit_to_inputs(weight, spec, moment(x))
    value = dequantize(fitted)
    assert torch.isfinite(value).all()
    alone = fit_weight(weight, spec)
    seen = (((weight - value) @ x.T) ** 2).sum()
    assert seen <= (((weight - dequantize(alone)) @ x.T) ** 2).sum() + 1e-9


def test_damping_leaves_the_callers_hessian_alone() -> None:
    H = torch.diag(torch.tensor([4.0, 0.0]))
    assert ef.damped(H).diagonal().tolist() == pytest.approx([4.02, 0.02])
    assert H[1, 1] == 0 and ef.damped(torch.zeros(2, 2)).tolist() == [[1, 0], [0, 1]]
