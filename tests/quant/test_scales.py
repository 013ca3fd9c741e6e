"""Scales against textbook least squares.

Shapes: O out_features, I in_features, G groups per row, W weights per group, R rank.
"""

import pytest
import torch
from torch import Tensor

from qat.quant.fit import absmax_scales, balance, fit_group_scales, fit_low_rank, low_rank_start
from qat.quant.weight import expand_scales

O, I, W = 5, 24, 8
G = I // W


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, the levels chosen for them, and an importance with a few zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(O, I, generator=generator)
    levels = weight.sign() * torch.rand(O, I, generator=generator).add(0.1)
    importance = torch.rand(O, I, generator=generator)
    return weight, levels, importance * (importance > 0.1)


def weighted_lstsq(columns: Tensor, target: Tensor, importance: Tensor) -> Tensor:
    """The x that minimises `sum importance * (target - columns @ x)**2`, in float64."""
    root = importance.double().sqrt()
    return torch.linalg.lstsq(root[:, None] * columns.double(), root * target.double()).solution


def test_group_scales_equal_lstsq() -> None:
    weight, levels, importance = case()
    fitted = fit_group_scales(weight, levels, importance, torch.ones(O, G))
    for o in range(O):
        for g in range(G):
            part = slice(g * W, (g + 1) * W)
            expected = weighted_lstsq(levels[o, part, None], weight[o, part], importance[o, part])
            torch.testing.assert_close(fitted[o, g].double(), expected[0], rtol=1e-5, atol=1e-6)


def test_groups_without_signal_or_turned_negative_keep_their_scale() -> None:
    weight, levels, importance = case()
    old = torch.rand(O, G) + 0.5
    levels[0, :W] = 0.0
    importance[1, W : 2 * W] = 0.0
    levels[2, :W] = -levels[2, :W]
    fitted = fit_group_scales(weight, levels, importance, old)
    kept = torch.zeros(O, G, dtype=torch.bool)
    kept[0, 0] = kept[1, 1] = kept[2, 0] = True
    assert torch.equal(fitted[kept], old[kept])
    assert (fitted[~kept] != old[~kept]).all() and (fitted > 0).all()


def test_absmax_is_the_largest_magnitude_and_never_zero() -> None:
    weight = torch.tensor([[1.0, -3.0, 0.0, 0.0], [0.5, 0.25, -1e-3, 2e-3]])
    scales = absmax_scales(weight, 2)
    tiny = torch.finfo(torch.float16).tiny
    torch.testing.assert_close(scales, torch.tensor([[3.0, tiny], [0.5, 2e-3]]))
    assert (scales.half() > 0).all()


@pytest.mark.parametrize("R", [1, 3, 5])
def test_low_rank_start_is_the_best_of_its_rank(R: int) -> None:
    S = torch.rand(O, I)
    start = low_rank_start(S, R)
    assert start.scale_out.shape == (O, R) and start.scale_in.shape == (R, I)
    singular = torch.linalg.svdvals(S)
    error = (S - expand_scales(start, I)).norm()
    torch.testing.assert_close(error, singular[R:].norm(), rtol=1e-4, atol=1e-5)


def test_low_rank_refit_is_one_round_of_alternating_lstsq() -> None:
    weight, levels, importance = case()
    start = low_rank_start(torch.rand(O, I) + 0.5, 2)
    basis = start.scale_in.double()
    gained = torch.stack(
        [weighted_lstsq((basis * levels[o]).T, weight[o], importance[o]) for o in range(O)]
    )
    columns = [
        weighted_lstsq(gained * levels[:, i, None], weight[:, i], importance[:, i])
        for i in range(I)
    ]
    expected = gained @ torch.stack(columns, dim=1)
    fitted = fit_low_rank(weight, levels, importance, start)
    torch.testing.assert_close(expand_scales(fitted, I).double(), expected, rtol=1e-2, atol=1e-3)


def test_low_rank_refit_of_rows_without_signal_is_finite() -> None:
    weight, levels, importance = case()
    weight[0], levels[1], importance[:, 3] = 0.0, 0.0, 0.0
    fitted = fit_low_rank(weight, levels, importance, low_rank_start(torch.rand(O, I), 2))
    assert all(torch.isfinite(tensor).all() for tensor in fitted.present().values())


def test_balanced_factors_are_unit_and_the_product_stays() -> None:
    A, B = torch.randn(O, 3), torch.randn(3, I)
    scales = balance(A, B)
    torch.testing.assert_close(scales.scale_out.norm(dim=0), torch.ones(3))
    torch.testing.assert_close(scales.scale_in.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(expand_scales(scales, I), A @ B)
    assert torch.isfinite(balance(torch.zeros(O, 1), B[:1]).scale_out).all()
