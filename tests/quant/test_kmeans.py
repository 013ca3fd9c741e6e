"""One-dimensional k-means against an exact optimum found another way.

Shapes: N values, C levels.
"""

import numpy as np
import pytest
from covering import covering
from numpy.typing import NDArray

from qat.quant.codebook import best_split, coarser, histogram, polish, weighted_kmeans

Array = NDArray[np.float64]
ALLOWED = 1 + 1e-4  # the promise: 0.01 %
N = 600
LEVELS = (2, 3, 4, 8, 16)

DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, size=n),
    "student": lambda rng, n: rng.standard_t(3, size=n),
    "lognormal": lambda rng, n: rng.lognormal(size=n),
    "clusters": lambda rng, n: rng.choice([-3.0, -1.0, 0.5, 2.0], n) + 0.05 * rng.normal(size=n),
    "ties": lambda rng, n: rng.normal(size=n).round(1),
    "far": lambda rng, n: 1e4 + rng.normal(size=n),
}


def optima(values: Array, weights: Array, most: int) -> dict[int, float]:
    """The least weighted squared error with 1 ... `most` levels, by every possible last cut.

    Works on the sorted values themselves, in extended precision, in O(C N^2).
    """
    order = np.argsort(values)
    x = (values[order] - np.median(values)).astype(np.longdouble)
    w = weights[order].astype(np.longdouble)
    x, w = x[w > 0], w[w > 0]
    runs = [_run_errors(x[:end], w[:end]) for end in range(1, len(x) + 1)]
    best = np.array([run[0] for run in runs])
    found = {1: float(best[-1])}
    for level in range(2, most + 1):
        # run[i] is the error of values i ... end; the levels before it cover 0 ... i - 1
        through = (np.min(best[: len(r) - 1] + r[1:], initial=np.inf) for r in runs)
        best = np.minimum(best, np.fromiter(through, np.longdouble, len(runs)))
        found[level] = float(best[-1])
    return found


def _run_errors(x: Array, w: Array) -> Array:
    """Return the error of `x[i:]` around its weighted mean, for each i."""
    mass, first, second = (np.cumsum((w * x**p)[::-1])[::-1] for p in (0, 1, 2))
    return second - first**2 / mass


def cost(values: Array, weights: Array, levels: Array) -> float:
    distance = (values[:, None] - levels) ** 2
    return float((weights * distance.min(1)).sum())


def sample(name: str, n: int = N, seed: int = 0) -> Array:
    return DISTRIBUTIONS[name](np.random.default_rng(seed), n)


def importance(kind: str, n: int = N) -> Array:
    rng = np.random.default_rng(1)
    if kind == "equal":
        return np.ones(n)
    weights = rng.lognormal(sigma=1.5, size=n)
    weights[rng.random(n) < 0.1] = 0.0
    return weights


@pytest.mark.parametrize(("name", "kind"), covering(DISTRIBUTIONS, ["weighted", "equal"]))
def test_within_a_ten_thousandth_of_the_optimum(name: str, kind: str) -> None:
    values, weights = sample(name), importance(kind)
    least = optima(values, weights, max(LEVELS))
    for C in LEVELS:
        levels = weighted_kmeans(values, weights, C)
        assert levels.shape == (C,) and (np.diff(levels) >= 0).all()
        assert cost(values, weights, levels) <= ALLOWED * least[C] + 1e-12


def outliers(name: str, n: int) -> Array:
    rng = np.random.default_rng(3)
    values = rng.standard_cauchy(size=n) if name == "cauchy" else rng.normal(size=n)
    values[: {"one": 1, "few": 5}.get(name, 0)] *= 1e6
    return values


@pytest.mark.parametrize(
    ("name", "kind"), covering(["one", "few", "cauchy"], ["weighted", "equal"])
)
def test_values_far_out_leave_the_others_their_levels(name: str, kind: str, monkeypatch) -> None:
    """One bin of the histogram would hold all others; scikit-learn, from our levels, is no better.

    Nor is it from starts of its own.
    """
    from sklearn.cluster import KMeans  # a second of imports, of each process that collects tests

    monkeypatch.setattr("qat.quant.codebook.POLISH_BINS", 4096)
    values, weights = outliers(name, 8000), importance(kind, 8000)
    ours = weighted_kmeans(values, weights, 16)
    error = cost(values, weights, ours)
    for start, times in ((ours[:, None], 1), ("k-means++", 3)):
        judge = KMeans(16, init=start, n_init=times, random_state=0)
        judge.fit(values[:, None], sample_weight=weights)
        assert error <= ALLOWED * cost(values, weights, np.sort(judge.cluster_centers_[:, 0]))


def test_more_values_than_bins_stay_within_it(monkeypatch) -> None:
    values, weights = sample("normal", 1500), importance("weighted", 1500)
    monkeypatch.setattr("qat.quant.codebook.POLISH_BINS", 1024)
    monkeypatch.setattr("qat.quant.codebook.START_BINS", 512)
    least = optima(values, weights, 16)[16]
    assert cost(values, weights, weighted_kmeans(values, weights, 16)) <= ALLOWED * least


@pytest.mark.parametrize("C", [1, 2, 5])
def test_best_split_equals_the_oracle(C: int) -> None:
    points = np.sort(sample("laplace", 60))
    mass = importance("weighted", 60) + 0.01
    assert cost(points, mass, best_split(points, mass, C)) == pytest.approx(
        optima(points, mass, C)[C], rel=1e-9
    )


def test_fewer_distinct_values_than_levels() -> None:
    levels = weighted_kmeans(np.array([3.0, -1.0, 3.0, 0.5]), np.ones(4), 8)
    np.testing.assert_array_equal(levels, [-1.0, 0.5, 3, 3, 3, 3, 3, 3])
    for value in (0.0, -2.5):
        levels = weighted_kmeans(np.full(70_000, value), np.ones(70_000), 4)
        np.testing.assert_array_equal(levels, [value] * 4)


def test_values_without_weight_do_not_count() -> None:
    values, weights = sample("normal"), np.ones(N)
    outliers = np.array([-1e3, 1e3, 77.0])
    both = weighted_kmeans(np.append(values, outliers), np.append(weights, [0.0] * 3), 4)
    alike = weighted_kmeans(values, weights, 4)
    np.testing.assert_array_equal(both, alike)
    np.testing.assert_array_equal(weighted_kmeans(values, np.zeros(N), 4), alike)  # none has any


def test_a_weight_counts_like_repetition() -> None:
    values = sample("uniform", 300)
    repeats = np.random.default_rng(2).integers(1, 5, 300)
    np.testing.assert_allclose(
        weighted_kmeans(values, repeats.astype(float), 4),
        weighted_kmeans(np.repeat(values, repeats), np.ones(repeats.sum()), 4),
        rtol=1e-9,
    )


def test_histogram_keeps_mass_and_mean() -> None:
    values, weights = sample("student", 5000), importance("weighted", 5000)
    points, mass, inside = histogram(values, weights, 64)
    assert len(points) <= 64 and (np.diff(points) > 0).all()
    lost = (weights * values**2).sum() - (mass * points**2).sum()
    assert inside == pytest.approx(lost) and histogram(values, weights, 5000)[2] == 0
    assert mass.sum() == pytest.approx(weights.sum())
    assert (mass * points).sum() == pytest.approx((weights * values).sum())


def test_coarser_bins_keep_mass_and_mean() -> None:
    points, mass = np.sort(sample("student", 5000)), importance("weighted", 5000) + 0.01
    few, total = coarser(points, mass, 64)
    assert len(few) <= 64 and (np.diff(few) > 0).all()
    assert total.sum() == pytest.approx(mass.sum())
    assert (total * few).sum() == pytest.approx((mass * points).sum())
    lost, lost_of_equal_bins = (
        (mass * points**2).sum() - (total * few**2).sum(),
        histogram(points, mass, 64)[2],
    )
    assert 0 < lost < lost_of_equal_bins / 4
    for same in coarser(points, mass, 5000):
        assert len(same) == 5000


def test_polishing_takes_lloyds_steps() -> None:
    points, mass = np.sort(sample("student", 500)), importance("weighted", 500) + 0.01
    start = np.linspace(-1.0, 1.0, 8)
    nearest = np.abs(points[:, None] - start).argmin(1)
    expected = np.bincount(nearest, mass * points) / np.bincount(nearest, mass)
    np.testing.assert_allclose(polish(points, mass, start, 1), expected, rtol=1e-9)
    settled = polish(points, mass, start, 1000)
    np.testing.assert_allclose(polish(points, mass, settled, 1), settled, rtol=1e-9)
    assert cost(points, mass, settled) < cost(points, mass, expected)


def test_a_level_without_points_stays() -> None:
    points, mass = np.array([0.0, 1.0]), np.ones(2)
    np.testing.assert_array_equal(polish(points, mass, np.array([0.1, 1.2, 9.0]), 5), [0, 1, 9])
