"""Comparison of two sets of measurements by case: same, slower, faster, or not comparable.

A case is slower if its median is, by more than a threshold, and the 95 % intervals of both medians
do not overlap. The exit code of `qat bench compare` follows from all cases together.
"""

import json
import re
import shutil
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib
import tomli_w
from matplotlib.figure import Figure

from qat.errors import CheckpointError, ComparisonError, ConfigError
from qat.extensions.bench.results import IN_EVERY_ROW, ROWS, WHOLE
from qat.extensions.bench.stats import median_interval, variation
from qat.extensions.lab.pages import markdown_table
from qat.extensions.lab.stats import MIN_SAMPLES, THRESHOLD, Difference, compare
from qat.files import whole_directory, write_atomically
from qat.logs import read_json_lines
from qat.observe.charts import fit_scale

FIGURES = "figures.jsonl"
SHAPE = (
    *("student", "parameters", "data", "seq_len", "top_k", "batch_size", "grad_accum_steps"),
    *("scope", "to", "shape", "size", "unit"),
)
"""Facts about the amount of work in a case, which must be equal in both sets."""
PLACE = ("device", "dtype")
PLACE_OF_CPU = ("cpu", "threads")
"""Facts about the hardware. All devices called "cpu" differ by the second tuple."""
SETTINGS = (
    *("learn", "loss", "optimizer", "latent_dtype", "gradient_checkpointing", "checkpoint_every"),
    *("compile", "settings", "torch", "triton", "commit"),
)
"""Facts that may differ, as the subject of a comparison; it lists those that do."""

Row = dict[str, object]


@dataclass(frozen=True)
class MeasuredCase:
    """All rows of one name: runs of one command, turns in one process, or several hosts."""

    name: str
    rows: tuple[Row, ...]

    @property
    def runs(self) -> list[list[float]]:
        """Samples of each row."""
        return [row["samples"] for row in self.rows]

    @property
    def samples(self) -> list[float]:
        """The basis of intervals: the medians of three rows or more, else all samples.

        Samples within one run share its clocks and memory layout, so only several runs show the
        variation between runs.
        """
        if len(self.rows) >= MIN_SAMPLES:
            return self.medians
        return [sample for run in self.runs for sample in run]

    @property
    def medians(self) -> list[float]:
        """The median of the samples of each row."""
        return [statistics.median(run) for run in self.runs]

    def facts(self, names: Sequence[str]) -> dict[str, object]:
        """Return those of `names` that the rows have; all rows agree on shape and place."""
        return {name: self.rows[0][name] for name in names if name in self.rows[0]}

    @property
    def place(self) -> dict[str, object]:
        """The device, and for a CPU its processor and threads."""
        names = (*PLACE, *PLACE_OF_CPU) if self.rows[0].get("device") == "cpu" else PLACE
        return self.facts(names)

    @property
    def within_runs(self) -> float:
        """The coefficient of variation of the samples within a row, averaged over rows."""
        return statistics.fmean(variation(run) for run in self.runs)


def read_cases(path: Path) -> dict[str, MeasuredCase]:
    """Read the cases of a file of rows, a directory of results, or a record.

    Raises:
        ComparisonError: the path does not exist, no row has raw samples, or a case has two shapes.
    """
    try:
        rows = [row for file in files_of(path) for row in read_json_lines(file)]
    except CheckpointError as error:
        raise ComparisonError(str(error)) from None
    timed = [row for row in rows if row.get("samples")]
    if not timed:
        raise ComparisonError(
            f"{path} holds {len(rows)} rows and no raw samples, expected rows with `samples`; "
            "measure again with this version of 'qat bench'"
        )
    by_name: dict[str, list[Row]] = {}
    for row in timed:
        by_name.setdefault(str(row.get("case", "")), []).append(row)
    cases = {}
    for name, found in by_name.items():
        # prefer single turns if there are any: the other rows of such a case are their sum
        turns = [row for row in found if str(row.get("kind")).endswith("round")]
        cases[name] = MeasuredCase(name, tuple(turns or found))
        _check_alike(cases[name], path)
    return cases


def files_of(path: Path) -> list[Path]:
    """Return the files of rows at `path`: itself, its results.jsonl, those below, or other .jsonl.

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
    """Return whether a case has enough samples to estimate a spread."""
    return len(case.samples) >= MIN_SAMPLES


def between_cases(cases: Iterable[MeasuredCase]) -> float:
    """Return the coefficient of variation of the medians of the cases."""
    return variation([statistics.median(case.samples) for case in cases])


def between_runs(cases: Iterable[MeasuredCase]) -> float | None:
    """Return the coefficient of variation between runs of a case, averaged over cases: the noise.

    None if no case has two runs.
    """
    found = [variation(case.medians) for case in cases if len(case.rows) > 1]
    return statistics.fmean(found) if found else None


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
    """One case in both sets."""

    before: MeasuredCase
    after: MeasuredCase
    difference: Difference | None
    """The difference of the medians; None if the cases are not comparable."""
    reason: str = ""  # the reason why the cases are not comparable

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.before.name

    @property
    def verdict(self) -> str:
        """`same`, `slower`, `faster` or `not comparable`."""
        return self.difference.verdict if self.difference else "not comparable"


@dataclass(frozen=True)
class Comparison:
    """The comparison of all cases of two sets."""

    pairs: tuple[Pair, ...]
    gone: tuple[str, ...]  # cases only in the first set
    new: tuple[str, ...]  # cases only in the second set
    between_cases: float
    between_runs: float | None
    settings: dict[str, tuple[object, object]]  # settings that differ, as (before, after)
    hosts: int  # number of hosts that measured

    @property
    def exit_code(self) -> int:
        """1 for any regression; else 2 if a case is not comparable or missing; else 0."""
        verdicts = {pair.verdict for pair in self.pairs}
        if "slower" in verdicts:
            return REGRESSION
        return NOT_COMPARABLE if "not comparable" in verdicts or self.gone else SAME

    @property
    def beats_code(self) -> int:
        """0 if every case is faster; else 2 if one is not comparable; else 1."""
        verdicts = {pair.verdict for pair in self.pairs}
        return NOT_COMPARABLE if "not comparable" in verdicts else int(verdicts != {"faster"})

    @property
    def is_single_run(self) -> bool:
        """True if some interval rests on samples within fewer than `MIN_SAMPLES` runs."""
        cases = [case for pair in self.pairs for case in (pair.before, pair.after)]
        return any(len(case.rows) < MIN_SAMPLES for case in cases)


def compare_files(before: Path, after: Path, threshold: float = THRESHOLD) -> Comparison:
    """Pair the cases of two results by name and compare each pair.

    Raises:
        ComparisonError: a side has no raw samples, or there is no case in common.
    """
    before, after = read_cases(before), read_cases(after)
    shared = [name for name in before if name in after]
    if not shared:
        first, second = (
            ", ".join([*cases][:3]) + (", ..." if len(cases) > 3 else "")
            for cases in (before, after)
        )
        raise ComparisonError(
            f"no case is in both (first: {first}; second: {second}), expected equal names; measure "
            "the same shapes"
        )
    pairs = tuple(compare_pair(before[name], after[name], threshold) for name in shared)
    both = [case for pair in pairs for case in (pair.before, pair.after)]
    changed = {}
    for pair in pairs:
        found = _differences(pair.before.facts(SETTINGS), pair.after.facts(SETTINGS))
        changed |= {name: both for name, both in found.items() if name not in changed}
    return Comparison(
        pairs,
        gone=tuple(name for name in before if name not in after),
        new=tuple(name for name in after if name not in before),
        between_cases=between_cases(pair.before for pair in pairs),
        between_runs=between_runs(both),
        settings=changed,
        hosts=len({row.get("host") for case in both for row in case.rows}),
    )


def compare_kernels(before: Path, after: Path, gain: float) -> Comparison:
    """Compare the kernels of two results without their references: faster is only `gain` or more.

    Raises:
        ComparisonError: a side has no raw samples, or there is no kernel in common.
    """
    # seconds become 1 - gain of what they were: the threshold is of their ratio
    found = compare_files(before, after, 1 / (1 - gain) - 1)
    pairs = tuple(pair for pair in found.pairs if pair.before.rows[0].get("kind") == "kernel")
    if not pairs:
        raise ComparisonError(
            f"{before} and {after} have no timed kernel in common, expected results of 'qat bench "
            "kernels' on a GPU; measure both there"
        )
    return replace(found, pairs=pairs, gone=(), new=())


def compare_pair(before: MeasuredCase, after: MeasuredCase, threshold: float) -> Pair:
    """Compare one case, or give the reason if shapes, devices or too few samples forbid it."""
    found = _differences(before.facts(SHAPE), after.facts(SHAPE))
    found |= _differences(before.place, after.place)
    reason = next((f"{name}: {old} and {new}" for name, (old, new) in found.items()), "")
    if not reason and not (has_repeats(before) and has_repeats(after)):
        fewest = min(len(before.samples), len(after.samples))
        reason = f"{fewest} samples, at least {MIN_SAMPLES} are needed"
    if reason:
        return Pair(before, after, None, reason)
    return Pair(before, after, compare(before.samples, after.samples, threshold=threshold))


def _differences(
    before: dict[str, object], after: dict[str, object]
) -> dict[str, tuple[object, object]]:
    both = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    return {name: (old, new) for name, (old, new) in both.items() if old != new}


# `qat bench record`: freezes a result into a directory that others can read, check and repeat.

ENVIRONMENT, RECIPE, PLOT, PAGE = "environment.json", "recipe.toml", "medians.svg", "README.md"
SLUG = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")
WIDE = 20
"""Samples are drawn on a logarithmic axis if the largest is more than this times the least."""
HEADINGS = ("case", "median", "95 % interval", "tokens/s", "MFU", "peak GiB", "runs", "CV")
IN_PAGE = (
    *("device", "gpus", "cpu", "dtype", "python", "torch", "cuda", "driver", "triton"),
    *("transformers", "branch", "commit", "host"),
)
"""Facts about the environment that the page shows."""
STATES = {
    None: "; whether the tree had changes besides is not known.",
    True: ": **the tree had changes that are in no commit**.",
    False: ", nothing changed besides.",
}
"""The text after the commit on the page, by `Record.is_dirty`."""


@dataclass(frozen=True)
class Record:
    """The content of a record."""

    slug: str
    day: str
    source: Path
    cases: dict[str, MeasuredCase]
    environment: dict[str, object]
    settings: dict[str, object]  # the recipe of a sweep, or the settings of a verb

    @property
    def is_dirty(self) -> bool | None:
        """True if any row was measured with uncommitted changes; None if unknown for some row."""
        flags = [row.get("dirty") for case in self.cases.values() for row in case.rows]
        return True if True in flags else None if None in flags else False

    @property
    def commit(self) -> str:
        """The measured commit, with the suffix `-dirty` if there were uncommitted changes.

        If rows have different commits, all of them.
        """
        commits = [row.get("commit") for case in self.cases.values() for row in case.rows]
        commits = commits if any(commits) else [self.environment.get("commit")]
        names = " ".join(dict.fromkeys(str(each)[:12] for each in commits))
        return f"{names}{'-dirty' if self.is_dirty else ''}"


def write_record(slug: str, source: Path, records: Path, day: str | None = None) -> Path:
    """Create `records/DAY_SLUG` from the results in `source`, completely or not at all.

    Raises:
        ConfigError: no raw samples, a case without repeats, a bad name, or the record exists.
    """
    record = _gathered(slug, source, day or date.today().isoformat())
    out = records / f"{record.day}_{slug}"
    if out.exists():
        raise ConfigError(f"{out} exists, expected a new record; choose another SLUG or --date")
    with whole_directory(out) as partial:
        lines = [file.read_text(encoding="utf-8") for file in files_of(source)]
        write_atomically(partial / ROWS, "".join(lines))
        write_atomically(partial / ENVIRONMENT, json.dumps(record.environment, indent=1) + "\n")
        recipes = sorted(source.glob("*.toml")) if source.is_dir() else []
        for recipe in recipes:
            shutil.copyfile(recipe, partial / recipe.name)
        if not recipes:
            write_atomically(partial / RECIPE, tomli_w.dumps(_without_none(record.settings)))
        earlier = source / FIGURES
        lines = earlier.read_text(encoding="utf-8").splitlines() if earlier.is_file() else []
        found = [*map(json.loads, lines), *figures(record)]
        write_atomically(partial / FIGURES, "".join(json.dumps(each) + "\n" for each in found))
        draw_medians(record.cases, partial / PLOT)
        write_atomically(partial / PAGE, page(record))
    return out


def figures(record: Record) -> list[dict[str, object]]:
    """Return a figure for the median of each case, and one for its tokens per second."""
    found = []

    def add(case: MeasuredCase, unit: str, values: list[float], **more: object) -> None:
        name = re.sub(r"[^a-z0-9]+", "_", case.name.lower()).strip("_")
        found.append(
            {
                "figure": f"{name}_{'tok_s' if unit == 'tokens/s' else unit}",
                "value": statistics.median(values),
                "unit": unit,
                "goal": "stated",
                "command": record.environment.get("command", ""),
                "commit": record.commit,
                "device": case.rows[0].get("device"),
                "runs": len(values),
                "spread": statistics.stdev(values) if len(values) > 1 else None,
                **more,
            }
        )

    for case in record.cases.values():
        interval = median_interval(case.samples)
        bounds = {"low": interval.low, "high": interval.high, "samples": len(case.samples)}
        add(case, case.rows[0].get("unit", "s"), case.medians, **bounds)
        speeds = [row["tokens_per_s"] for row in case.rows if row.get("tokens_per_s")]
        if speeds:
            add(case, "tokens/s", speeds)
    return found


def page(record: Record) -> str:
    """Return the record's README: its source, the table of cases, and the variation."""
    cases, runs = list(record.cases.values()), between_runs(record.cases.values())
    timed = [row for case in cases for row in case.rows if row.get("unit", "s") == "s"]
    hours = sum(sum(row["samples"]) for row in timed) / 3600
    tokens = sum(sum(row["samples"]) * (row.get("tokens_per_s") or 0.0) for row in timed)
    known = {**cases[0].rows[0], **record.environment}
    place = [[name, str(known[name])] for name in IN_PAGE if known.get(name) is not None]
    noise = "not known, as no case has two runs" if runs is None else f"{runs:.1%}"
    return "\n".join(
        [
            f"# {record.day}: {record.slug.replace('_', ' ').replace('-', ' ')}\n",
            f"    {record.environment.get('command', f'of {record.source.name}')}\n",
            f"Commit {record.commit}{STATES[record.is_dirty]}\n",
            markdown_table(HEADINGS, [_line(case) for case in cases]),
            f"![Medians with 95 % intervals]({PLOT})\n",
            f"Variation between cases {between_cases(cases):.1%}; between runs of a case {noise}. "
            f"An interval is the bootstrap's, of the median over runs ({MIN_SAMPLES} or more), or "
            "over the samples of fewer runs, and then says nothing about the next run.\n",
            markdown_table(("environment", ""), place),
            f"Samples took {hours:.3g} hours and {tokens:,.0f} tokens, warm-up left out.\n",
            f"`{ROWS}` holds every row with its raw samples, `{RECIPE}` the settings, "
            f"`{ENVIRONMENT}` versions and device, `{FIGURES}` the numbers.\n",
        ]
    )


def draw_medians(cases: dict[str, MeasuredCase], path: Path) -> None:
    """Draw the median of each case with its interval, and every sample as a dot."""
    every = {name: [x for run in case.runs for x in run] for name, case in cases.items()}
    figure = Figure(figsize=(7.5, 1.2 + 0.4 * len(cases)), layout="constrained")
    with matplotlib.rc_context({"text.parse_math": False}):  # names are not formulas
        axes = figure.subplots()
        for place, (name, case) in enumerate(cases.items()):
            interval = median_interval(case.samples)
            axes.plot(every[name], [place] * len(every[name]), ".", color="#9aa5b4", alpha=0.5)
            axes.plot([interval.low, interval.high], [place] * 2, color="#3b6fd4", linewidth=3)
            axes.plot(interval.median, place, "o", color="#3b6fd4")
        axes.set_yticks(range(len(cases)), list(cases))
        axes.invert_yaxis()
        samples = [sample for found in every.values() for sample in found]
        if max(samples) > WIDE * min(samples):
            fit_scale(axes.xaxis, samples)
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel(str(next(iter(cases.values())).rows[0].get("unit", "s")))
        figure.savefig(path, metadata={"Date": None})


def _gathered(slug: str, source: Path, day: str) -> Record:
    if not SLUG.fullmatch(slug):
        raise ConfigError(f"slug={slug}, expected two or three lower-case words; write fast-path")
    try:
        date.fromisoformat(day)
    except ValueError:
        raise ConfigError(f"date={day}, expected a day; write it as 2026-01-31") from None
    try:
        cases = read_cases(source)
    except ComparisonError as error:
        raise ConfigError(str(error)) from None
    for case in cases.values():
        if not has_repeats(case):
            raise ConfigError(
                f"case={case.name} has {len(case.samples)} samples, expected at least "
                f"{MIN_SAMPLES} repeats; measure again with more --steps or runs"
            )
    path = source / WHOLE
    whole = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    row = next(iter(cases.values())).rows[0]
    of_row = {name: row[name] for name in IN_EVERY_ROW if name in row}
    environment = whole.get("environment") or of_row
    settings = whole.get("recipe") or {"bench": environment.get("config", {})}
    return Record(slug, day, source, cases, environment, settings)


def _without_none(values: object) -> Any:
    if isinstance(values, dict):
        return {k: _without_none(each) for k, each in values.items() if each is not None}
    return [_without_none(each) for each in values] if isinstance(values, list) else values


def _line(case: MeasuredCase) -> list[str]:
    interval, row = median_interval(case.samples), case.rows[-1]
    forms = (("tokens_per_s", "{:,.0f}"), ("mfu_frac", "{:.3f}"), ("peak_gib", "{:.2f}"))
    numbers = ["-" if row.get(key) is None else form.format(row[key]) for key, form in forms]
    return [
        case.name,
        f"{interval.median:.4g} {row.get('unit', 's')}",
        f"{interval.low:.4g} .. {interval.high:.4g}",
        *numbers,
        str(len(case.rows)),
        f"{variation(case.samples):.1%}",
    ]
