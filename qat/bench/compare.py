"""Two sets of measurements, case by case: same, slower, faster, or not to be compared.

A case is slower when its median is by more than a threshold and the 95 % intervals of both medians
share nothing. What `qat bench compare` exits with follows from all cases together.
"""

from dataclasses import dataclass
from pathlib import Path

from qat.bench.samples import (
    SETTINGS,
    SHAPE,
    Case,
    between_cases,
    between_runs,
    has_repeats,
    read_cases,
)
from qat.bench.stats import MIN_SAMPLES, THRESHOLD, Difference, compare
from qat.errors import ComparisonError

SAME, REGRESSION, NOT_COMPARABLE = 0, 1, 2


@dataclass(frozen=True)
class Pair:
    """One case on both sides."""

    before: Case
    after: Case
    difference: Difference | None
    """None where they cannot be compared."""
    reason: str = ""
    """Why not."""

    @property
    def name(self) -> str:
        """Of the case."""
        return self.before.name

    @property
    def verdict(self) -> str:
        """`same`, `slower`, `faster` or `not comparable`."""
        return self.difference.verdict if self.difference else "not comparable"


@dataclass(frozen=True)
class Comparison:
    """All cases of two sets."""

    pairs: tuple[Pair, ...]
    gone: tuple[str, ...]
    """Cases of the first set alone."""
    new: tuple[str, ...]
    """Cases of the second set alone."""
    between_cases: float
    between_runs: float | None
    settings: dict[str, tuple[object, object]]
    """Settings that differ: before and after."""
    hosts: int
    """How many hosts measured."""

    @property
    def exit_code(self) -> int:
        """1 for any regression; else 2 if a case could not be compared or is gone; else 0."""
        verdicts = {pair.verdict for pair in self.pairs}
        if "slower" in verdicts:
            return REGRESSION
        return NOT_COMPARABLE if "not comparable" in verdicts or self.gone else SAME

    @property
    def is_single_run(self) -> bool:
        """Whether some verdict rests on samples within one run or two."""
        cases = [case for pair in self.pairs for case in (pair.before, pair.after)]
        return any(len(case.rows) < MIN_SAMPLES for case in cases)


def compare_files(before: Path, after: Path, threshold: float = THRESHOLD) -> Comparison:
    """Pair the cases of two results by name and compare each.

    Raises:
        ComparisonError: a side has no raw samples, or they have no case in common.
    """
    return compare_cases(read_cases(before), read_cases(after), threshold)


def compare_cases(
    before: dict[str, Case], after: dict[str, Case], threshold: float = THRESHOLD
) -> Comparison:
    """As `compare_files`, of cases that were read already."""
    shared = [name for name in before if name in after]
    if not shared:
        raise ComparisonError(
            f"no case is in both (first: {_some(before)}; second: {_some(after)}), expected equal "
            "names; measure the same shapes"
        )
    pairs = tuple(compare_pair(before[name], after[name], threshold) for name in shared)
    both = [case for pair in pairs for case in (pair.before, pair.after)]
    return Comparison(
        pairs,
        gone=tuple(name for name in before if name not in after),
        new=tuple(name for name in after if name not in before),
        between_cases=between_cases(pair.before for pair in pairs),
        between_runs=between_runs(both),
        settings=_changed(pairs),
        hosts=len(set().union(*(case.hosts for case in both))),
    )


def compare_pair(before: Case, after: Case, threshold: float) -> Pair:
    """One case; the reason instead of a difference where shapes, devices or repeats forbid it."""
    reason = _difference_of(before.facts(SHAPE), after.facts(SHAPE)) or _difference_of(
        before.place, after.place
    )
    if not reason and not (has_repeats(before) and has_repeats(after)):
        fewest = min(len(before.samples), len(after.samples))
        reason = f"{fewest} samples, at least {MIN_SAMPLES} are needed"
    if reason:
        return Pair(before, after, None, reason)
    return Pair(before, after, compare(before.samples, after.samples, threshold=threshold))


def _difference_of(before: dict[str, object], after: dict[str, object]) -> str:
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            return f"{name}: {before.get(name)} and {after.get(name)}"
    return ""


def _changed(pairs: tuple[Pair, ...]) -> dict[str, tuple[object, object]]:
    found = {}
    for pair in pairs:
        before, after = pair.before.facts(SETTINGS), pair.after.facts(SETTINGS)
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                found.setdefault(name, (before.get(name), after.get(name)))
    return found


def _some(cases: dict[str, Case]) -> str:
    names = list(cases)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
