"""The kernels of a column sweep against the reference and float64; odd shapes always.

Shapes: I in_features, O rows, C codebook entries, B columns of a block, d weights of a vector.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from column_case import block, block_of_vectors, copied, values
from quantized import nearest_e5m3
from three_way import assert_no_worse_than_eager

from qat.kernels.dispatch import computing_by
from qat.quant import error_feedback as reference
from qat.quant.error_feedback import descent_sweep, feedback_sweep, fit_all_to_inputs
from qat.quant.spec import LutSpec
from qat.quant.vectors import nearest_vectors
from qat.quant.weight import round_to_byte

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter runs where no GPU is", allow_module_level=True)

from qat.kernels import column_sweep as kernel

CASES = [(32, 40, 4, 1), (8, 70, 16, 1), (20, 129, 2, 1), (1, 3, 3, 1), (48, 33, 4, 48)]
"""B, O, C and rows of scales."""
VECTORS = [(16, 20, 16, 4, 1), (12, 19, 8, 2, 1), (8, 3, 8, 8, 1), (12, 9, 256, 4, 3),
           (16, 10, 64, 8, 16), (12, 17, 16, 4, 12), (4, 9, 1024, 2, 1)]  # fmt: skip
"""B, O, C, d and rows of scales."""


@pytest.fixture(autouse=True)
def _by_kernel() -> Iterator[None]:
    with computing_by(kernel=True):
        yield


@pytest.mark.parametrize(("B", "O", "C", "G"), CASES)
def test_settling_equals_the_reference(B: int, O: int, C: int, G: int) -> None:
    columns, target, coupling = block(B, O, C, G)
    if G == B > 1:
        columns.scales[0, :5] = 0.0  # a low-rank scale may be zero, or negative
        columns.scales[1] *= -1.0
    ours, theirs = copied(columns), copied(columns)
    kernel.settle_columns(ours, target.clone(), coupling)
    reference.settle_columns(theirs, target.clone(), coupling)
    is_same = torch.isclose(ours.chosen, theirs.chosen)
    assert is_same.float().mean() > 0.99  # a tie may round the other way
    rows = is_same.all(0)
    torch.testing.assert_close(ours.residual[:, rows], theirs.residual[:, rows])
    S = columns.scales.expand(B, O)
    torch.testing.assert_close(ours.residual, columns.weight - ours.chosen * S)
    assert torch.equal(ours.scales, columns.scales)


@pytest.mark.parametrize(("B", "O", "C", "d", "G"), VECTORS)
def test_settling_vectors_equals_the_reference(B: int, O: int, C: int, d: int, G: int) -> None:
    columns, target, coupling = block_of_vectors(B, O, C, d, G)
    ours, theirs = copied(columns), copied(columns)
    kernel.settle_columns(ours, target.clone(), coupling)
    reference.settle_columns(theirs, target.clone(), coupling)
    is_same = ours.indices == theirs.indices
    assert is_same.float().mean() > 0.99  # a tie may round the other way
    rows = is_same.all(0)
    torch.testing.assert_close(ours.residual[:, rows], theirs.residual[:, rows])
    S = columns.scales.repeat_interleave(B // G, 0)
    assert torch.equal(ours.chosen, values(columns.levels, ours.indices))
    torch.testing.assert_close(ours.residual, columns.weight - ours.chosen * S)
    assert torch.equal(ours.scales, columns.scales)
    # nothing was settled before the first vector: it is the nearest in float64
    gap = target[:d].double() - S[:d].double() * columns.levels.double()[..., None]  # (C, d, O)
    energy = (gap * torch.einsum("ij,cjo->cio", columns.metric[:d].double(), gap)).sum(1)
    found = energy.gather(0, ours.indices[:1].long())[0]
    torch.testing.assert_close(found, energy.amin(0), rtol=1e-4, atol=1e-4)


def test_of_equal_codewords_the_lowest_is_taken() -> None:
    columns, target, coupling = block_of_vectors(8, 20, 64, 4, 1)
    columns.levels[32:] = columns.levels[:32].flip(0)
    kernel.settle_columns(columns, target, coupling)
    assert columns.indices.max() < 32


@pytest.mark.parametrize("each", ["feature", "weight"])
@pytest.mark.parametrize(("O", "I", "C", "d"), [(5, 24, 16, 2), (3, 44, 512, 4), (7, 8, 8, 8)])
def test_nearest_codewords_equal_the_references(O: int, I: int, C: int, d: int, each: str) -> None:
    weight, S, codebook = torch.randn(O, I), torch.rand(O, I) - 0.2, torch.randn(C, d)
    h = torch.rand(I, I).diagonal().expand(O, I) if each == "feature" else torch.rand(O, I)
    ours = kernel.nearest_vectors(weight, S, codebook, h)
    theirs = nearest_vectors(weight, S, codebook, h)
    assert ours.dtype == theirs.dtype and (ours == theirs).float().mean() > 0.99
    w, s, importance = (t.double().reshape(-1, 1, d) for t in (weight, S, h))
    energy = (importance * (w - s * codebook.double()) ** 2).sum(-1)
    found = energy.gather(1, ours.long().view(-1, 1))[:, 0]
    torch.testing.assert_close(found, energy.amin(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("case", "bits"), [*((case, 8) for case in CASES[:3]), (CASES[0], 5)])
def test_a_scale_of_a_byte_is_one_afterwards(case: tuple[int, ...], bits: int) -> None:
    B, *_ = case
    columns, target, coupling = block(*case)
    columns = replace(columns, scales=round_to_byte(columns.scales, bits), scale_bits=bits)
    ours, theirs = copied(columns), copied(columns)
    for own, refit in ((ours, kernel.refit_scale), (theirs, reference.refit_scale)):
        refit(own, target.clone(), 0.3 * coupling, torch.ones(B))
        assert torch.equal(own.scales, nearest_e5m3(own.scales, bits))
        assert not torch.equal(own.scales, columns.scales)
    is_same = ours.scales == theirs.scales
    assert is_same.float().mean() > 0.99  # a tie may round the other way
    torch.testing.assert_close(ours.residual[:, is_same[0]], theirs.residual[:, is_same[0]])


@pytest.mark.parametrize(
    ("B", "O", "C", "G", "d"), [*((*case, 1) for case in CASES[:-1]), (*CASES[0], 4),
                                (*CASES[1], 2), (*CASES[2], 4), (*CASES[3], 8)]
)  # fmt: skip
def test_a_refitted_scale_is_no_worse_than_eager(B: int, O: int, C: int, G: int, d: int) -> None:
    if d == 1:
        columns, target, coupling = block(B, O, C, G)
        metric = torch.rand(B) + 0.5
        coupling *= 0.3  # the curvature of a real Hessian is positive
    else:
        columns, target, coupling = block_of_vectors(min(B * d, 16), O, C, d, G)
        metric = columns.metric
        coupling *= 0.3 / d
    results = []
    for refit, dtype in (
        (kernel.refit_scale, torch.float32),
        (reference.refit_scale, torch.float32),
        (reference.refit_scale, torch.float64),
    ):
        own, aim = copied(columns, dtype), target.clone().to(dtype)
        refit(own, aim, coupling.to(dtype), metric.to(dtype))
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
    kernel.refit_scale(columns, target, torch.zeros_like(coupling), torch.ones(8))
    assert torch.equal(columns.scales[:, :20], before[:, :20])
    assert not torch.equal(columns.scales, before)


@pytest.mark.parametrize(("group_size", "I"), [(16, 80), (48, 96)])
def test_whole_sweeps_end_where_the_references_do(group_size: int, I: int) -> None:
    O, x = 21, torch.randn(300, I) @ (torch.randn(I, I) / I**0.5)
    H = x.T @ x / len(x) + 0.01 * torch.eye(I)
    diagonal = H.diagonal()
    start, _, _ = block(I, O, 4, I // group_size)
    errors = []
    for ops in (reference.REFERENCE, kernel.COLUMN_OPS):
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


class Recording:
    """A device whose graphs are calls; it counts them."""

    records = True

    def __init__(self, memory_gib: float) -> None:
        self.memory, self.graphs = memory_gib, 0

    def memory_gib(self) -> float:
        return self.memory

    def record(self, run: Callable[[], None]) -> tuple[Callable[[], None], None]:
        self.graphs += 1
        return run, None


@pytest.mark.parametrize(("memory_gib", "graphs"), [(1.0, 3), (1e-9, 0)])
def test_recorded_sweeps_do_what_plain_ones_do(memory_gib: float, graphs: int, monkeypatch) -> None:
    device = Recording(memory_gib)
    monkeypatch.setattr(kernel, "on", lambda _: device)
    sweeps = kernel.RecordedSweeps()
    settings = {"times": 3, "moves_scales": True, "ops": reference.REFERENCE}
    starts = [
        *(block(32, 9, 4, 2) for _ in range(3)),  # one graph for all of a shape
        block(32, 7, 4, 2),
        block_of_vectors(32, 9, 16, 4, 2),
        block(32, 9, 32, 2),  # no kernel takes so many levels, and no graph
    ]
    for start, _, coupling in starts:
        metric = torch.rand(32) + 0.5 if start.metric is None else start.metric
        ours, theirs = copied(start), copied(start)
        sweeps(descent_sweep, ours, coupling, metric, **settings)
        reference.run_sweeps(descent_sweep, theirs, coupling, metric, **settings)
        assert not torch.equal(theirs.residual, start.residual)
        for name, tensor in vars(theirs).items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(getattr(ours, name), tensor), name
    assert device.graphs == graphs


@pytest.mark.parametrize("spec", [
    LutSpec(bits=3, vector_size=4, group_size=12, scale_bits=8),
    LutSpec(bits=3, vector_size=4, group_size=36),
    LutSpec(bits=3, vector_size=4, group_size=36, scale="low_rank", rank=2),
])  # fmt: skip
def test_fits_of_vectors_end_where_the_references_do(spec: LutSpec, monkeypatch) -> None:
    monkeypatch.setattr(reference, "SWEEPS", 1)
    monkeypatch.setattr("qat.quant.fit.LLOYD_STEPS", 1)
    monkeypatch.setattr("qat.quant.fit.ROUNDS_OF_VECTORS", 1)
    weight, x = torch.randn(3, 36), torch.randn(300, 36) @ (torch.randn(36, 36) / 6)
    H = x.T @ x / len(x)
    errors = []
    for ops in (reference.REFERENCE, kernel.COLUMN_OPS):
        (fit,) = fit_all_to_inputs([weight], spec, H, ops)
        errors.append(reference.output_error(weight, fit.quantized, reference.damped(H)))
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
