"""A student beside its teacher: the numbers against plain NumPy."""

import numpy as np
import pytest

from qat.extensions.suite.compare import (
    Judged,
    Mean,
    compare,
    first_divergence,
    mean,
    mean_retention,
    ratio,
)

X = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
Y = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_a_mean_has_the_samples_standard_error() -> None:
    found = mean(X)
    assert found.value == np.mean(X)
    assert found.stderr == pytest.approx(np.std(X, ddof=1) / np.sqrt(len(X)))
    assert mean([1.0]) == Mean(1.0, None)


def test_a_ratio_has_the_error_of_pairs() -> None:
    """Twenty thousand resamples of the pairs spread as the formula says."""
    rng = np.random.default_rng(0)
    y = rng.random(400) < 0.6
    x = np.where(rng.random(400) < 0.2, rng.random(400) < 0.4, y)  # mostly what the teacher says
    found = ratio(x.astype(float).tolist(), y.astype(float).tolist())
    assert found.value == pytest.approx(x.mean() / y.mean())
    picks = rng.integers(0, 400, (20_000, 400))
    assert found.stderr == pytest.approx(
        (x[picks].mean(1) / y[picks].mean(1)).std(ddof=1), rel=0.05
    )
    apart = np.hypot(x.std() / x.mean(), y.std() / y.mean()) * found.value / np.sqrt(400)
    assert found.stderr < 0.8 * apart  # unpaired errors would be larger
    assert ratio(Y, Y) == Mean(1.0, 0.0)
    assert ratio([0.0, 1.0], [0.0, 0.0]) is None


def test_the_first_divergence_is_a_number_of_shared_tokens() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 4, 5]) == 2
    assert first_divergence([7], [1]) == first_divergence([], [1]) == 0
    assert first_divergence([1, 2], [1, 2]) == first_divergence([1, 2], [1, 2, 3]) == 2


def test_flips_agreement_and_divergence() -> None:
    ids = [[1, 2, 3], [1, 9], [4], [5, 6, 7, 8]]
    student = [Judged(1, "a", [1, 2, 3]), Judged(0, "b", [1, 2]), Judged(0, "c", [0])]
    teacher = [Judged(s, a, i) for s, a, i in zip((1, 1, 0), "abd", ids, strict=False)]
    student.append(Judged(1, "e", [5, 6, 7, 9]))
    teacher.append(Judged(0, "f", ids[3]))
    found = compare(student, teacher)
    assert (found.right_to_wrong, found.wrong_to_right) == (1, 1)
    assert found.agreement.value == 0.5 and found.retention.value == 1.0
    assert found.first_divergence_median == np.median([3, 1, 0, 3]) == 2.0
    assert found.first_divergence_mean == np.mean([3, 1, 0, 3])
    assert found.same_text_frac == 0.25
    unwritten = [Judged(1.0, "0", None), Judged(0.0, "1", None)]
    assert compare(unwritten, unwritten).first_divergence_median is None


def test_the_mean_of_retentions() -> None:
    assert mean_retention([Mean(0.5, 0.3), Mean(0.7, 0.4)]) == Mean(0.6, 0.25)
    assert mean_retention([Mean(0.5, 0.3), None]) is None and mean_retention([]) is None
    assert mean_retention([Mean(0.5, None)]) == Mean(0.5, None)
