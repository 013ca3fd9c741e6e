"""`qat bench record`: freezes a result into a directory that others can read, check and repeat."""

import json
import re
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib
import tomli_w
from matplotlib.figure import Figure

from qat.bench.compare import (
    FIGURES,
    MeasuredCase,
    between_cases,
    between_runs,
    files_of,
    has_repeats,
    read_cases,
)
from qat.bench.results import IN_EVERY_ROW, ROWS, WHOLE, fit_scale, markdown_table
from qat.bench.stats import MIN_SAMPLES, median_interval, variation
from qat.errors import ComparisonError, ConfigError
from qat.files import whole_directory, write_atomically

ENVIRONMENT, RECIPE, PLOT, PAGE = "environment.json", "recipe.toml", "medians.svg", "README.md"
SLUG = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")
WIDE = 20
"""Samples that span so many times the least are drawn on a logarithmic axis."""
HEADINGS = ("case", "median", "95 % interval", "tokens/s", "MFU", "peak GiB", "runs", "CV")
FIELDS_OF_PLACE = (
    *("device", "cpu", "dtype", "python", "torch", "triton", "transformers", "commit", "host"),
)


@dataclass(frozen=True)
class Record:
    """What goes into a record."""

    slug: str
    day: str
    source: Path
    cases: dict[str, MeasuredCase]
    environment: dict[str, object]
    settings: dict[str, object]
    """A sweep's recipe, or what a verb was asked for."""

    @property
    def is_dirty(self) -> bool | None:
        """Whether any row was measured from changes in no commit; None if no row tells."""
        told = [row.get("dirty") for case in self.cases.values() for row in case.rows]
        return True if True in told else None if None in told else False

    @property
    def commit(self) -> str:
        """Of the code that was measured, with `-dirty` behind it where that was not all.

        All of them, if it changed between rows.
        """
        told = [row.get("commit") for case in self.cases.values() for row in case.rows]
        told = told if any(told) else [self.environment.get("commit")]
        names = " ".join(dict.fromkeys(str(each)[:12] for each in told))
        return f"{names}{'-dirty' if self.is_dirty else ''}"


def write_record(slug: str, source: Path, records: Path, day: str | None = None) -> Path:
    """Make `records/DAY_SLUG` of the results in `source`: whole, or not at all.

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
        _write_recipe(record, partial)
        lines = [json.dumps(figure) for figure in [*_earlier_figures(source), *figures(record)]]
        write_atomically(partial / FIGURES, "\n".join(lines) + "\n")
        draw_medians(record.cases, partial / PLOT)
        write_atomically(partial / PAGE, page(record))
    return out


def figures(record: Record) -> list[dict[str, object]]:
    """A figure for the median of each case, and one for its tokens per second."""
    found = []
    for case in record.cases.values():
        name = re.sub(r"[^a-z0-9]+", "_", case.name.lower()).strip("_")
        interval = median_interval(case.samples)
        unit = case.rows[0].get("unit", "s")
        bounds = {"low": interval.low, "high": interval.high, "samples": len(case.samples)}
        found.append(
            _figure(record, case, f"{name}_{unit}", values=case.medians, unit=unit) | bounds
        )
        speeds = [row["tokens_per_s"] for row in case.rows if row.get("tokens_per_s")]
        if speeds:
            found.append(_figure(record, case, f"{name}_tok_s", values=speeds, unit="tokens/s"))
    return found


def page(record: Record) -> str:
    """The record's README: where it comes from, the table, and how much varies."""
    cases, runs = list(record.cases.values()), between_runs(record.cases.values())
    noise = "not known, as no case has two runs" if runs is None else f"{runs:.1%}"
    return "\n".join(
        [
            f"# {record.day}: {record.slug.replace('_', ' ').replace('-', ' ')}\n",
            f"    {record.environment.get('command', f'of {record.source.name}')}\n",
            f"{_state(record)}\n",
            markdown_table(HEADINGS, [_line(case) for case in cases]),
            f"![Medians with 95 % intervals]({PLOT})\n",
            f"Variation between cases {between_cases(cases):.1%}; between runs of a case {noise}. "
            f"An interval is the bootstrap's, of the median over runs ({MIN_SAMPLES} or more), or "
            "over the samples of fewer runs, and then says nothing about the next run.\n",
            markdown_table(("environment", ""), _place(record)),
            f"{_timed(cases)}\n",
            f"`{ROWS}` holds every row with its raw samples, `{RECIPE}` the settings, "
            f"`{ENVIRONMENT}` versions and device, `{FIGURES}` the numbers.\n",
        ]
    )


def _timed(cases: Sequence[MeasuredCase]) -> str:
    """How long was measured, and how many tokens went through meanwhile."""
    rows = [row for case in cases for row in case.rows if row.get("unit", "s") == "s"]
    hours = sum(sum(row["samples"]) for row in rows) / 3600
    tokens = sum(sum(row["samples"]) * (row.get("tokens_per_s") or 0.0) for row in rows)
    return f"Samples took {hours:.3g} hours and {tokens:,.0f} tokens, warm-up left out."


def draw_medians(cases: dict[str, MeasuredCase], path: Path) -> None:
    """Each case's median with its interval, and every sample as a dot."""
    with matplotlib.rc_context({"text.parse_math": False}):  # names are no formulas
        _draw_medians(cases).savefig(path, metadata={"Date": None})


def _draw_medians(cases: dict[str, MeasuredCase]) -> Figure:
    figure = Figure(figsize=(7.5, 1.2 + 0.4 * len(cases)), layout="constrained")
    axes = figure.subplots()
    for place, case in enumerate(cases.values()):
        interval = median_interval(case.samples)
        every = [sample for run in case.runs for sample in run]
        axes.plot(every, [place] * len(every), ".", color="#9aa5b4", alpha=0.5)
        axes.plot([interval.low, interval.high], [place] * 2, color="#3b6fd4", linewidth=3)
        axes.plot(interval.median, place, "o", color="#3b6fd4")
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    every = [sample for case in cases.values() for run in case.runs for sample in run]
    if max(every) > WIDE * min(every):
        fit_scale(axes.set_xscale, axes.xaxis, every)
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(str(next(iter(cases.values())).rows[0].get("unit", "s")))
    return figure


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
    environment = whole.get("environment") or _told_by_rows(cases)
    settings = whole.get("recipe") or {"bench": environment.get("config", {})}
    return Record(slug, day, source, cases, environment, settings)


def _told_by_rows(cases: dict[str, MeasuredCase]) -> dict[str, object]:
    row = next(iter(cases.values())).rows[0]
    return {name: row[name] for name in IN_EVERY_ROW if name in row}


def _write_recipe(record: Record, partial: Path) -> None:
    recipes = sorted(record.source.glob("*.toml")) if record.source.is_dir() else []
    for recipe in recipes:
        shutil.copyfile(recipe, partial / recipe.name)
    if not recipes:
        write_atomically(partial / RECIPE, tomli_w.dumps(_without_none(record.settings)))


def _without_none(values: object) -> Any:
    """TOML has no word for nothing."""
    if isinstance(values, dict):
        return {k: _without_none(each) for k, each in values.items() if each is not None}
    return [_without_none(each) for each in values] if isinstance(values, list) else values


def _earlier_figures(source: Path) -> list[dict[str, object]]:
    path = source / FIGURES
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _figure(
    record: Record, case: MeasuredCase, name: str, *, values: list[float], unit: object
) -> dict[str, object]:
    return {
        "figure": name,
        "value": statistics.median(values),
        "unit": unit,
        "goal": "stated",
        "command": record.environment.get("command", ""),
        "commit": record.commit,
        "device": case.rows[0].get("device"),
        "runs": len(values),
        "spread": statistics.stdev(values) if len(values) > 1 else None,
    }


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


def _state(record: Record) -> str:
    if record.is_dirty is None:
        return f"Commit {record.commit}; whether the tree had changes besides is not known."
    if record.is_dirty:
        return f"Commit {record.commit}: **the tree had changes that are in no commit**."
    return f"Commit {record.commit}, nothing changed besides."


def _place(record: Record) -> list[list[str]]:
    row = next(iter(record.cases.values())).rows[0]
    known = {**row, **record.environment}
    return [[name, str(known[name])] for name in FIELDS_OF_PLACE if known.get(name) is not None]
