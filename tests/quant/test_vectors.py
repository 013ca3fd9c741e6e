"""Fitting to codebooks of vectors, against brute force in float64 and scikit-learn's k-means.

Shapes: O out_features, I in_features, d weights of a vector, N vectors, C codewords.
"""

import itertools

import numpy as np
import pytest
import torch
from covering import covering
from quantized import fit_to_inputs
from sklearn.cluster import KMeans, kmeans_plusplus
from torch import Tensor

from qat.quant import error_feedback as ef
from qat.quant.codebook import best_codewords
from qat.quant.error_feedback import REFERENCE, damped, fit_stack_to_inputs, output_error
from qat.quant.fit import fit_weight, refit_levels, refit_scales, weighted_error
from qat.quant.spec import LutSpec, by_group
from qat.quant.vectors import (
    descent_of_blocks,
    diagonal_blocks,
    nearest_vectors,
    seeds_in_rounds,
    start_codewords,
)
from qat.quant.weight import (
    QuantizedWeight,
    Scales,
    as_stored,
    chosen_levels,
    dequantize,
    expand_scales,
)

PAIRS = LutSpec(bits=3, vector_size=2, group_size=16)
FOURS = LutSpec(bits=4, vector_size=4, group_size=16, scale_bits=8)
EIGHTS = LutSpec(bits=3, vector_size=8, group_size=24)
RANKED = LutSpec(bits=4, vector_size=4, scale="low_rank", rank=2, group_size=8)
RANKED_LEVELS = LutSpec(bits=2, scale="low_rank", rank=4, group_size=8)
FORMATS = {"pairs": PAIRS, "fours": FOURS, "eights": EIGHTS, "ranked": RANKED}


@pytest.fixture(autouse=True)
def _one_thread(_seeded: None) -> None:
    torch.set_num_threads(1)  # on small weights a second thread costs more than it gives


def hessian(I: int, rows: int = 300) -> Tensor:
    """The second moment of correlated inputs of very different size."""
    x = torch.randn(rows, I) @ (torch.randn(I, I) / I**0.5) * torch.linspace(0.2, 2, I)
    return x.T @ x / rows


def case(name: str, O: int = 12, I: int = 48) -> tuple[LutSpec, Tensor, Tensor, QuantizedWeight]:
    """A format, a weight, its damped Hessian, and the weight fitted alone."""
    spec, weight, H = FORMATS[name], torch.randn(O, I) * 0.1, damped(hessian(I))
    return spec, weight, H, fit_weight(weight, spec, H.diagonal())


def exhaustive(weight: Tensor, S: Tensor, codebook: Tensor, metric: Tensor) -> Tensor:
    """The least error of each vector over all codewords, `(O, I / d)`, in float64.

    `metric` `(I / d, d, d)`.
    """
    (O, I), d = weight.shape, codebook.shape[1]
    w, s = (t.double().view(O, I // d, 1, d) for t in (weight, S))
    gap = w - s * codebook.double()
    return torch.einsum("onci,nij,oncj->onc", gap, metric.double(), gap).amin(2)


def energies(columns: ef.Columns, H: Tensor) -> float:
    return ef._row_energy(columns.residual.double(), H.double()).sum().item()


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_vectors_have_the_least_weighted_error(name: str) -> None:
    spec, weight, _, fitted = case(name)
    S = expand_scales(fitted.scales, 48)
    h = torch.rand(48) + 0.1
    indices = nearest_vectors(weight, S, fitted.codebook, h.expand_as(weight))
    found = (h.double() * (weight - chosen_levels(fitted._replace(indices=indices)) * S) ** 2).view(
        12, -1, spec.vector_size
    )
    metric = torch.diag_embed(h.view(-1, spec.vector_size))
    least = exhaustive(weight, S, fitted.codebook, metric)
    torch.testing.assert_close(found.sum(-1), least, rtol=1e-4, atol=1e-9)


def test_best_codewords_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pulls, entries = torch.randn(37, 5), torch.randn(5, 8)
    whole = best_codewords(pulls, entries)
    monkeypatch.setattr("qat.quant.codebook.SCORES_IN_CACHE", 16)
    assert torch.equal(best_codewords(pulls, entries), whole)
    assert torch.equal(whole.long(), (pulls @ entries).argmax(1))


def test_refitted_codewords_and_scales_are_the_least_squares_ones() -> None:
    _, weight, _, fitted = case("fours")
    h = (torch.rand(48) + 0.1).expand_as(weight)
    S = expand_scales(fitted.scales, 48)
    codebook = refit_levels(weight, S, h, fitted.indices, old=fitted.codebook)
    refitted = fitted._replace(codebook=codebook)
    least = weighted_error(weight.double(), refitted, h)
    assert least <= weighted_error(weight.double(), fitted, h)
    for place in itertools.product(range(16), range(4)):
        for step in (-1e-2, 1e-2):
            moved = codebook.clone()
            moved[place] += step
            assert weighted_error(weight.double(), fitted._replace(codebook=moved), h) >= least
    scales = refit_scales(weight, chosen_levels(refitted), h, fitted.scales)
    least = weighted_error(weight.double(), refitted._replace(scales=scales), h)
    for factor in (0.98, 1.02):
        moved = scales._replace(scales=scales.scales * factor)
        assert weighted_error(weight.double(), refitted._replace(scales=moved), h) > least


def test_a_codeword_that_nobody_takes_stays() -> None:
    old = torch.randn(5, 2)
    indices = torch.tensor([[0, 1, 3, 0]])
    weight = torch.randn(1, 8)
    found = refit_levels(weight, torch.ones(1, 8), torch.ones(1, 8), indices, old=old)
    assert torch.equal(found[[2, 4]], old[[2, 4]])
    torch.testing.assert_close(found[0], (weight[0, :2] + weight[0, 6:]) / 2)
    torch.testing.assert_close(found[1], weight[0, 2:4])


@pytest.mark.parametrize("weighted", [False, True])
def test_as_good_as_weighted_kmeans_of_scikit_learn(weighted: bool) -> None:
    # one group a row and rows of one size: under the scales 1 only the codewords are left to find
    N, d = 1024, 4
    mass = torch.rand(1, N).repeat_interleave(d, 1) ** 3 if weighted else torch.ones(1, N * d)
    vectors = torch.randn(1, N * d) * torch.tensor([1.0, 0.5, 2.0, 1.0]).repeat(N)
    codebook = start_codewords(vectors.view(N, d), mass.view(N, d), 32)
    S = torch.ones_like(vectors)
    for _ in range(15):
        indices = nearest_vectors(vectors, S, codebook, mass)
        codebook = refit_levels(vectors, S, mass, indices, old=codebook)
    unit = Scales(scales=torch.ones(1, 1))
    ours = weighted_error(vectors, QuantizedWeight(indices, codebook, unit), mass)
    judge = KMeans(32, n_init=3, random_state=0)
    judge.fit(vectors.view(N, d).numpy(), sample_weight=mass.view(N, d)[:, 0].numpy())
    assert ours < 1.05 * judge.inertia_


def test_seeds_are_distinct_vectors_of_the_weight() -> None:
    vectors = torch.randn(3, 4)[torch.arange(600) % 3]
    seeds = start_codewords(vectors, torch.ones_like(vectors), 8)
    assert seeds.shape == (8, 4) and len(seeds.unique(dim=0)) == 3
    few = start_codewords(vectors[:2], torch.zeros(2, 4), 8)
    assert torch.equal(few.unique(dim=0), vectors[:2].unique(dim=0))


@pytest.mark.parametrize("d", [2, 4])
def test_seeds_drawn_in_rounds_lie_as_well_as_those_of_the_library(d: int) -> None:
    """The measure is the weighted sum of squared distances to the nearest seed."""
    pool, weights = torch.randn(2000, d).double(), torch.rand(2000).double() ** 2
    ours = seeds_in_rounds(pool, weights, 64)
    theirs = torch.from_numpy(
        kmeans_plusplus(pool.numpy(), 64, sample_weight=weights.numpy(), random_state=0)[0]
    )
    assert len(ours.unique(dim=0)) == 64
    left = [(torch.cdist(pool, s).amin(1).square() * weights).sum() for s in (ours, theirs)]
    assert left[0] < 1.1 * left[1]
    same = torch.randn(3, d).double()[torch.arange(600) % 3]
    assert len(seeds_in_rounds(same, torch.ones(600).double(), 8).unique(dim=0)) == 3


@pytest.mark.parametrize("d", [2, 4])
def test_a_weight_of_few_distinct_vectors_is_recovered(d: int) -> None:
    spec = LutSpec(bits=4, vector_size=d, group_size=16)
    codewords = torch.randn(16, d)
    codewords[0] = codewords[0].sign()  # each group shows it, so that absmax is the true scale
    codewords = codewords.clamp(-1, 1).half().float()
    indices = torch.randint(16, (40, 64 // d))
    indices[:, :: 16 // d] = 0
    scales = Scales(2.0 ** torch.randint(-4, 0, (40, 4)))
    weight = dequantize(QuantizedWeight(indices, codewords, scales))
    fitted = fit_weight(weight, spec)
    torch.testing.assert_close(dequantize(fitted), weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "name"),
    covering(2 * ["zero", "constant", "zero groups", "tiny", "huge", "one row"], FORMATS),
)
def test_odd_weights(name: str, weight: str) -> None:
    spec, values = FORMATS[name], torch.randn(3, 48)
    if weight == "zero groups":
        values[1] = 0.0
        values[:, :24] = 0.0
    if weight == "one row":
        values, spec = values[:1], spec.model_copy(update={"rank": min(spec.rank, 1)})
    size = {"zero": 0.0, "tiny": 1e-7, "huge": 1e3}.get(weight, 1.0)
    values = torch.full((3, 48), 0.3) if weight == "constant" else values * size
    alone, fitted = fit_weight(values, spec), fit_to_inputs(values, spec, hessian(48))
    for found in (alone, fitted):
        assert torch.equal(dequantize(as_stored(found)), dequantize(found))
        assert torch.isfinite(dequantize(found)).all()
        assert found.codebook.shape == spec.codebook_shape
    error = (dequantize(alone) - values).norm()
    assert error <= (0.02 if weight == "constant" else 0.7) * values.norm() + 1e-5


@pytest.mark.parametrize("d", [2, 4, 8])
def test_coupling_and_metric_of_descent_make_up_the_hessian(d: int) -> None:
    H = damped(hessian(24))
    coupling, metric = descent_of_blocks(H, d)
    blocks = torch.block_diag(*metric.view(-1, d, d))
    torch.testing.assert_close(blocks @ (coupling + torch.eye(24)), H, rtol=1e-4, atol=1e-5)
    assert diagonal_blocks(coupling, d).count_nonzero() == 0


@pytest.mark.parametrize("name", FORMATS)
def test_feedback_follows_the_textbook_in_float64(name: str) -> None:
    spec, weight, H, fitted = case(name)
    d, S = spec.vector_size, expand_scales(fitted.scales, 48).double()
    columns = ef.stack([weight], [fitted])
    ef.feed_back(columns, H, REFERENCE)
    left, inverse = weight.double().clone(), torch.linalg.inv(H.double())
    blocks = H.diagonal().view(-1, d).sum(1).argsort(descending=True).tolist()
    undone, codebook = list(range(48)), fitted.codebook.double()
    indices = torch.zeros(12, 48 // d, dtype=torch.long)
    for block in blocks:  # GPTVQ: the error of a block, brought to all columns that are left
        own = torch.arange(block * d, (block + 1) * d)
        metric = torch.linalg.inv(inverse[own][:, own])
        gap = left[:, None, own] - S[:, None, own] * codebook
        indices[:, block] = torch.einsum("oci,ij,ocj->oc", gap, metric, gap).argmin(1)
        error = left[:, own] - S[:, own] * codebook[indices[:, block]]
        undone = [column for column in undone if column not in own]
        left[:, undone] -= error @ metric @ inverse[own][:, undone]
        inverse = inverse - inverse[:, own] @ metric @ inverse[own]
        inverse[own], inverse[:, own] = 0.0, 0.0
    assert (ef.unstack(columns, [12], [fitted])[0].indices == indices).float().mean() > 0.99
    again = chosen_levels(fitted._replace(indices=indices)).double() * S
    R = (weight - again).T
    assert energies(columns, H) == pytest.approx((R * (H.double() @ R)).sum().item(), rel=0.01)


@pytest.mark.parametrize(
    # one block of columns, and no multiple of it
    ("name", "I"),
    covering(FORMATS, [48, 96, 288]),
)
def test_feedback_beats_rounding_and_no_sweep_adds_energy(name: str, I: int, monkeypatch) -> None:
    spec, weight, H, fitted = case(name, I=I)
    monkeypatch.setattr(ef, "SWEEPS", 1)
    columns = ef.stack([weight], [fitted])
    energy = energies(columns, H)
    ef.feed_back(columns, H, REFERENCE)
    assert energies(columns, H) < 0.97 * energy
    for _ in range(5):
        energy = energies(columns, H)
        ef.descend(columns, H, moves_scales=spec.scale == "group", ops=REFERENCE)
        assert energies(columns, H) <= energy * (1 + 1e-5)
    (found,) = ef.unstack(columns, [12], [fitted])
    assert output_error(weight, found, H) == pytest.approx(energies(columns, H), rel=1e-4)
    assert torch.equal(dequantize(as_stored(found)), dequantize(found))


def test_the_scale_of_a_group_is_the_best_one() -> None:
    _, weight, H, fitted = case("pairs")  # scales of 16 bits
    columns = ef.stack([weight], [fitted])
    coupling, metric = descent_of_blocks(H, 2)
    group = ef.Columns(
        columns.weight[:16], columns.residual[:16], columns.chosen[:16], columns.scales[:1],
        columns.levels,
    )  # fmt: skip
    target = columns.weight[:16] + coupling[:16] @ columns.residual
    REFERENCE.refit(group, target, coupling[:16, :16], metric[:16])
    least = energies(columns, H)
    torch.testing.assert_close(
        target, columns.weight[:16] + coupling[:16] @ columns.residual, rtol=1e-4, atol=1e-5
    )
    for factor in (0.99, 1.01):
        moved = columns.weight[:16] - columns.chosen[:16] * columns.scales[0] * factor
        other = ef.Columns(
            columns.weight, torch.cat([moved, columns.residual[16:]]), columns.chosen,
            columns.scales, columns.levels,
        )  # fmt: skip
        assert energies(other, H) > least


@pytest.mark.parametrize("spec", [*FORMATS.values(), by_group(2), RANKED_LEVELS])
def test_experts_share_a_codebook_and_are_fitted_each_to_its_inputs(spec: LutSpec) -> None:
    weight = torch.randn(24, 48)
    moments = torch.stack([hessian(48), hessian(48, rows=5), torch.zeros(48, 48)])
    counts = torch.tensor([500.0, 5.0, 0.0])
    found = fit_stack_to_inputs(weight, spec, moments, counts).quantized
    plain = fit_stack_to_inputs(weight, spec, moments, torch.zeros(3)).quantized
    assert found.codebook.shape == spec.codebook_shape and found.indices.dtype == torch.uint8
    residuals = [(weight - dequantize(each))[:8] for each in (found, plain)]
    errors = [((part @ moments[0]) * part).sum() for part in residuals]
    assert errors[0] < 0.9 * errors[1]
    if spec.scale == "group":  # the others, with few inputs or none, share the codebook alone
        importance = moments.diagonal(dim1=1, dim2=2) * counts[:, None]
        importance = importance + ef.DAMPING * importance.mean()
        start = fit_weight(weight, spec, importance.repeat_interleave(8, 0))
        assert torch.equal(found.indices[8:], start.indices[8:])
    alone = fit_stack_to_inputs(weight, spec, 0 * moments, 0 * counts).quantized
    assert torch.equal(dequantize(alone), dequantize(fit_weight(weight, spec)))


@pytest.mark.parametrize("bits", [10, pytest.param(12, marks=pytest.mark.slow)])
def test_large_codebooks(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLOYD_STEPS", "ROUNDS_OF_VECTORS"):
        monkeypatch.setattr(f"qat.quant.fit.{name}", 2)
    weight, H = torch.randn(5 * 2 ** (bits - 7), 64), hessian(64)  # five vectors for four codewords
    spec, small = (LutSpec(bits=b, vector_size=2, group_size=32) for b in (bits, 8))
    fitted, other = (fit_to_inputs(weight, each, H) for each in (spec, small))
    assert fitted.indices.dtype == torch.int16 and fitted.indices.max() >= 2 ** (bits - 1)
    errors = [output_error(weight, each, damped(H)) for each in (fitted, other)]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("name", FORMATS)
def test_twice_the_same_and_untouched_by_the_callers_random_state(name: str) -> None:
    spec, weight, H, first = case(name)
    fits = [fit_to_inputs(weight, spec, H)]
    torch.manual_seed(99), np.random.seed(99)
    again = fit_weight(weight, spec, H.diagonal())
    fits.append(fit_to_inputs(weight, spec, H))
    for left, right in ((first, again), fits):
        assert torch.equal(left.indices, right.indices)
        assert torch.equal(left.codebook, right.codebook)
        assert torch.equal(dequantize(left), dequantize(right))
