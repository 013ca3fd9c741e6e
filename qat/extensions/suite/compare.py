"""Compare a student with its teacher on the same questions: plain statistics of pairs.

The scores of a question are `x` for the student and `y` for the teacher, N questions in all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import NamedTuple


@dataclass(frozen=True)
class Mean:
    """A mean or a ratio of means, and its standard error."""

    value: float
    stderr: float | None
    """None with fewer than two questions."""


class Judged(NamedTuple):
    """One question as one model answered it."""

    score: float
    """1 if right, 0 if wrong; some tasks have grades between."""
    answer: str
    """The part of the answer that the task scores: a number, code, the chosen letter."""
    ids: list[int] | None
    """Tokens of a generated answer."""


class Comparison(NamedTuple):
    """A student beside its teacher on one task."""

    retention: Mean | None
    """Score of the student over that of the teacher; None if the teacher is never right."""
    right_to_wrong: int
    """Questions that the teacher answers better."""
    wrong_to_right: int
    """Questions that the student answers better."""
    agreement: Mean
    """Fraction of questions with equal answers."""
    first_divergence_median: float | None
    """Median number of generated tokens before the first that differs from the teacher's; an equal
    answer counts with its length. None without generated answers."""
    first_divergence_mean: float | None
    same_text_frac: float | None
    """Fraction of generated answers that are the teacher's token for token."""


def mean(values: Sequence[float]) -> Mean:
    """Return the mean, and `s / sqrt(N)` with the sample's standard deviation `s`."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Mean(fmean(values), error)


def ratio(x: Sequence[float], y: Sequence[float]) -> Mean | None:
    """Return `r = mean(x) / mean(y)` of pairs; None if the latter is 0.

    The standard error is that of `x - r y`, over `mean(y)` (delta method; Cochran, Sampling
    Techniques, 6.4): the models answer the same questions, so their errors are not independent.
    """
    below = fmean(y)
    if below == 0:
        return None
    r = fmean(x) / below
    error = mean([a - r * b for a, b in zip(x, y, strict=True)]).stderr
    return Mean(r, None if error is None else error / below)


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that two answers share."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return min(len(a), len(b))


def compare(student: Sequence[Judged], teacher: Sequence[Judged]) -> Comparison:
    """Compare the answers of a student and of its teacher to the same questions, in order."""
    pairs = [*zip(student, teacher, strict=True)]
    texts = [(s.ids, t.ids) for s, t in pairs if s.ids is not None and t.ids is not None]
    places = [first_divergence(*each) for each in texts]
    return Comparison(
        retention=ratio([s.score for s in student], [t.score for t in teacher]),
        right_to_wrong=sum(s.score < t.score for s, t in pairs),
        wrong_to_right=sum(s.score > t.score for s, t in pairs),
        agreement=mean([float(s.answer == t.answer) for s, t in pairs]),
        first_divergence_median=median(places) if places else None,
        first_divergence_mean=fmean(places) if places else None,
        same_text_frac=fmean(a == b for a, b in texts) if texts else None,
    )


def mean_retention(found: Sequence[Mean | None]) -> Mean | None:
    """Return the mean of the tasks' retentions; None if one is missing.

    The tasks have questions of their own, so the variances add.
    """
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    errors = [each.stderr for each in known]
    total = None if None in errors else math.hypot(*(e for e in errors if e is not None))
    return Mean(fmean(each.value for each in known), None if total is None else total / len(known))
