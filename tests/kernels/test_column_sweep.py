"""The kernels of a column sweep against the reference and float64; odd shapes always.

Shapes: I in_features, O rows, C codebook entries, B columns of a block.
"""

from dataclasses import replace

import pytest
import torch
from quantized import nearest_e5m3
from three_way import assert_no_worse_than_eager

from qat.quant import error_feedback as reference
from qat.quant.error_feedback import ColumnOps, Columns, descent_sweep, feedback_sweep
from qat.quant.weight import round_to_e5m3

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter runs where no GPU is", allow_module_level=True)

from qat.kernels import column_sweep as kernel

OPS = ColumnOps(kernel.settle_columns_by_kernel, kernel.refit_scale_by_kernel)
CASES = [(32, 40, 4, 1), (8, 70, 16, 1), (20, 129, 2, 1), (1, 3, 3, 1), (48, 33, 4, 48)]
"""B, O, C and rows of scales."""


def block(B: int, O: int, C: int, G: int) -> tuple[Columns, torch.Tensor, torch.Tensor]:
    """A block in the middle of a sweep, its targets, and a coupling with zeros on its diagonal."""
    levels = torch.randn(C, O).sort(0).values
    scales = (torch.rand(G, O) + 0.1).half().float()
    chosen = levels.gather(0, torch.randint(C, (B, O)))
    weight = torch.randn(B, O)
    S = scales.repeat_interleave(B // G, 0)
    columns = Columns(weight, weight - chosen * S, chosen, scales, levels)
    coupling = 0.3 * torch.randn(B, B)
    return columns, weight + 0.3 * torch.randn(B, O), coupling.fill_diagonal_(0.0)


def copied(columns: Columns, dtype: torch.dtype = torch.float32) -> Columns:
    held = {n: t for n, t in vars(columns).items() if isinstance(t, torch.Tensor)}
    tensors = {n: t.clone().to(dtype) for n, t in held.items()}
    return replace(columns, **tensors)


@pytest.mark.parametrize(("B", "O", "C", "G"), CASES)
def test_settling_equals_the_reference(B: int, O: int, C: int, G: int) -> None:
    columns, target, coupling = block(B, O, C, G)
    if G == B > 1:
        columns.scales[0, :5] = 0.0  # a low-rank scale may be zero, or negative
        columns.scales[1] *= -1.0
    ours, theirs = copied(columns), copied(columns)
    kernel.settle_columns_by_kernel(ours, target.clone(), coupling)
    reference.settle_columns(theirs, target.clone(), coupling)
    is_same = torch.isclose(ours.chosen, theirs.chosen)
    assert is_same.float().mean() > 0.99  # a tie may round the other way
    rows = is_same.all(0)
    torch.testing.assert_close(ours.residual[:, rows], theirs.residual[:, rows])
    S = columns.scales.expand(B, O)
    torch.testing.assert_close(ours.residual, columns.weight - ours.chosen * S)
    assert torch.equal(ours.scales, columns.scales)


@pytest.mark.parametrize(("B", "O", "C", "G"), CASES[:3])
def test_a_scale_of_8_bits_is_one_afterwards(B: int, O: int, C: int, G: int) -> None:
    columns, target, coupling = block(B, O, C, G)
    columns = replace(columns, scales=round_to_e5m3(columns.scales), scale_bits=8)
    ours, theirs = copied(columns), copied(columns)
    for own, refit in ((ours, kernel.refit_scale_by_kernel), (theirs, reference.refit_scale)):
        refit(own, target.clone(), 0.3 * coupling, torch.ones(B))
        assert torch.equal(own.scales, nearest_e5m3(own.scales))
        assert not torch.equal(own.scales, columns.scales)
    is_same = ours.scales == theirs.scales
    assert is_same.float().mean() > 0.99  # a tie may round the other way
    torch.testing.assert_close(ours.residual[:, is_same[0]], theirs.residual[:, is_same[0]])


@pytest.mark.parametrize(("B", "O", "C", "G"), CASES[:-1])
def test_a_refitted_scale_is_no_worse_than_eager(B: int, O: int, C: int, G: int) -> None:
    columns, target, coupling = block(B, O, C, G)
    diagonal = torch.rand(B) + 0.5
    coupling *= 0.3  # the curvature of a real Hessian is positive
    results = []
    for refit, dtype in (
        (kernel.refit_scale_by_kernel, torch.float32),
        (reference.refit_scale, torch.float32),
        (reference.refit_scale, torch.float64),
    ):
        own, aim = copied(columns, dtype), target.clone().to(dtype)
        refit(own, aim, coupling.to(dtype), diagonal.to(dtype))
        results.append((own.scales, own.residual, aim))
    assert not torch.equal(results[0][0], columns.scales)
    for ours, eager, exact in zip(*results, strict=True):
        # both round to float16: a tie may go the other way
        assert_no_worse_than_eager(ours, eager, exact, slack=2e-3)


def test_scales_that_would_turn_negative_or_infinite_stay() -> None:
    columns, target, coupling = block(8, 40, 4, 1)
    target[:, :10] = -target[:, :10].abs() * columns.chosen[:, :10].sign() * 50
    target[:, 10:20] = 1e9 * columns.chosen[:, 10:20]
    before = columns.scales.clone()
    kernel.refit_scale_by_kernel(columns, target, torch.zeros_like(coupling), torch.ones(8))
    assert torch.equal(columns.scales[:, :20], before[:, :20])
    assert not torch.equal(columns.scales, before)


@pytest.mark.parametrize(("group_size", "I"), [(16, 80), (48, 96)])
def test_whole_sweeps_end_where_the_references_do(group_size: int, I: int) -> None:
    O, x = 21, torch.randn(300, I) @ (torch.randn(I, I) / I**0.5)
    H = x.T @ x / len(x) + 0.01 * torch.eye(I)
    diagonal = H.diagonal()
    start, _, _ = block(I, O, 4, I // group_size)
    errors = []
    for ops in (reference.REFERENCE, OPS):
        columns = copied(start)
        by_column = copied(start)
        by_column.scales = by_column.scales.repeat_interleave(group_size, 0)
        feedback_sweep(by_column, (H / diagonal).tril(-1), ops)
        columns.residual, columns.chosen = by_column.residual, by_column.chosen
        coupling = (H / diagonal[:, None]).fill_diagonal_(0.0)
        for _ in range(2):
            descent_sweep(columns, coupling, diagonal, moves_scales=True, ops=ops)
        errors.append(((H @ columns.residual) * columns.residual).sum().item())
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
