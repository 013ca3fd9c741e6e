"""Two sets of measurements, case by case: same, slower, faster, or not to be compared.

A case is slower when its median is by more than a threshold and the 95 % intervals of both medians
share nothing. What `qat bench compare` exits with follows from all cases together.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qat.bench.results import ROWS
from qat.bench.stats import MIN_SAMPLES, THRESHOLD, Difference, compare, variation
from qat.errors import CheckpointError, ComparisonError
from qat.logs import read_json_lines

# Raw samples as files of results hold them: one `MeasuredCase` for all rows of one name.
#
# Rows of one case are its repeats: runs of one command, turns in one process, or several hosts.

FIGURES = "figures.jsonl"
SHAPE = (
    *("student", "parameters", "data", "seq_len", "top_k", "batch_size", "grad_accum_steps"),
    *("scope", "to", "shape", "size", "unit"),
)
"""Facts that say how much work a case is: of two sets they must agree."""
PLACE = ("device", "dtype")
PLACE_OF_CPU = ("cpu", "threads")
"""Facts that say what it ran on; a device called "cpu" is told apart by the second."""
SETTINGS = (
    *("learn", "loss", "optimizer", "latent_dtype", "gradient_checkpointing", "checkpoint_every"),
    *("compile", "settings", "torch", "triton", "commit"),
)
"""Facts that may differ: what a comparison is about. It names those that do."""

Row = dict[str, object]


@dataclass(frozen=True)
class MeasuredCase:
    """All that was measured of one case."""

    name: str
    rows: tuple[Row, ...]

    @property
    def runs(self) -> list[list[float]]:
        """The samples of each row."""
        return [row["samples"] for row in self.rows]

    @property
    def samples(self) -> list[float]:
        """What intervals rest on: the median of each of three rows or more, else every sample.

        Samples of one run share its luck (clocks, memory layout); only several runs tell of it.
        """
        if len(self.rows) >= MIN_SAMPLES:
            return self.medians
        return [sample for run in self.runs for sample in run]

    @property
    def medians(self) -> list[float]:
        """Median of the samples of each row."""
        return [statistics.median(run) for run in self.runs]

    def facts(self, names: Sequence[str]) -> dict[str, object]:
        """Those of `names` that the rows have; all rows agree on a shape and a place."""
        return {name: self.rows[0][name] for name in names if name in self.rows[0]}

    @property
    def place(self) -> dict[str, object]:
        """Device, and on a CPU the processor and threads, that the case ran on."""
        names = (*PLACE, *PLACE_OF_CPU) if self.rows[0].get("device") == "cpu" else PLACE
        return self.facts(names)

    @property
    def within_runs(self) -> float:
        """Coefficient of variation of the samples within a row, mean over rows."""
        return statistics.fmean(variation(run) for run in self.runs)

    @property
    def hosts(self) -> set[object]:
        """Where it ran, as far as rows say."""
        return {row.get("host") for row in self.rows}


def read_cases(path: Path) -> dict[str, MeasuredCase]:
    """The cases of a file of rows, of a directory of results, or of a record.

    Raises:
        ComparisonError: nothing is there, no row has raw samples, or a case has two shapes.
    """
    rows = [row for file in files_of(path) for row in _rows(file)]
    timed = [row for row in rows if row.get("samples")]
    if not timed:
        raise ComparisonError(
            f"{path} holds {len(rows)} rows and no raw samples, expected rows with `samples`; "
            "measure again with this version of 'qat bench'"
        )
    by_name: dict[str, list[Row]] = {}
    for row in timed:
        by_name.setdefault(str(row.get("case", "")), []).append(row)
    cases = [MeasuredCase(name, tuple(_turns(found))) for name, found in by_name.items()]
    for case in cases:
        _check_alike(case, path)
    return {case.name: case for case in cases}


def files_of(path: Path) -> list[Path]:
    """The files of rows at `path`: itself, its results.jsonl, those below it, or other tables.

    Raises:
        ComparisonError: there are none.
    """
    if not path.exists():
        raise ComparisonError(
            f"{path} does not exist, expected what 'qat bench' wrote; check the path"
        )
    if path.is_file():
        return [path]
    if (path / ROWS).is_file():
        return [path / ROWS]
    found = sorted(path.rglob(ROWS)) or [
        file for file in sorted(path.glob("*.jsonl")) if file.name != FIGURES
    ]
    if not found:
        raise ComparisonError(
            f"{path} has no {ROWS}, expected what 'qat bench' wrote; name its directory or file"
        )
    return found


def has_repeats(case: MeasuredCase) -> bool:
    """Whether there are enough samples to speak of a spread."""
    return len(case.samples) >= MIN_SAMPLES


def between_cases(cases: Iterable[MeasuredCase]) -> float:
    """Coefficient of variation of the cases' medians: what the choice of case changes."""
    return variation([statistics.median(case.samples) for case in cases])


def between_runs(cases: Iterable[MeasuredCase]) -> float | None:
    """The same of the runs of a case, mean over cases: what changes though nothing was changed.

    None where no case has two runs.
    """
    found = [variation(case.medians) for case in cases if len(case.rows) > 1]
    return statistics.fmean(found) if found else None


def _rows(file: Path) -> list[Row]:
    try:
        return read_json_lines(file)
    except CheckpointError as error:
        raise ComparisonError(str(error)) from None


def _turns(rows: list[Row]) -> list[Row]:
    """Single turns where there are any: the other rows of such a case are their sum."""
    return [row for row in rows if str(row.get("kind")).endswith("round")] or rows


def _check_alike(case: MeasuredCase, path: Path) -> None:
    first = case.rows[0]
    for row in case.rows[1:]:
        for name in (*SHAPE, *PLACE):
            if row.get(name) != first.get(name):
                raise ComparisonError(
                    f"{path}: case={case.name} has {name}={first.get(name)} and {row.get(name)}, "
                    "expected rows of one shape and device under one name; compare them one by one"
                )


SAME, REGRESSION, NOT_COMPARABLE = 0, 1, 2


@dataclass(frozen=True)
class Pair:
    """One case on both sides."""

    before: MeasuredCase
    after: MeasuredCase
    difference: Difference | None
    """None where they cannot be compared."""
    reason: str = ""
    """Why not."""

    @property
    def name(self) -> str:
        """Name of the case."""
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
    before: dict[str, MeasuredCase], after: dict[str, MeasuredCase], threshold: float = THRESHOLD
) -> Comparison:
    """Compare cases that were read already, as `compare_files` does with files."""
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


def compare_pair(before: MeasuredCase, after: MeasuredCase, threshold: float) -> Pair:
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


def _some(cases: dict[str, MeasuredCase]) -> str:
    names = list(cases)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
