"""Raw samples as files of results hold them: one `Case` for all rows of one name.

Rows of one case are its repeats: runs of one command, turns in one process, or several hosts.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qat.bench.results import ROWS
from qat.bench.stats import MIN_SAMPLES, variation
from qat.errors import CheckpointError, ComparisonError
from qat.logs import read_json_lines

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
class Case:
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
        """Of each row."""
        return [statistics.median(run) for run in self.runs]

    def facts(self, names: Sequence[str]) -> dict[str, object]:
        """Those of `names` that the rows have; all rows agree on a shape and a place."""
        return {name: self.rows[0][name] for name in names if name in self.rows[0]}

    @property
    def place(self) -> dict[str, object]:
        """What it ran on."""
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


def read_cases(path: Path) -> dict[str, Case]:
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
    cases = [Case(name, tuple(_turns(found))) for name, found in by_name.items()]
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


def has_repeats(case: Case) -> bool:
    """Whether there are enough samples to speak of a spread."""
    return len(case.samples) >= MIN_SAMPLES


def between_cases(cases: Iterable[Case]) -> float:
    """Coefficient of variation of the cases' medians: what the choice of case changes."""
    return variation([statistics.median(case.samples) for case in cases])


def between_runs(cases: Iterable[Case]) -> float | None:
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


def _check_alike(case: Case, path: Path) -> None:
    first = case.rows[0]
    for row in case.rows[1:]:
        for name in (*SHAPE, *PLACE):
            if row.get(name) != first.get(name):
                raise ComparisonError(
                    f"{path}: case={case.name} has {name}={first.get(name)} and {row.get(name)}, "
                    "expected rows of one shape and device under one name; compare them one by one"
                )
