"""One self-contained page with all records over time, per device.

It reads the `figures.jsonl` of every record; a figure in several records becomes a curve.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from pydantic import BaseModel, ConfigDict, ValidationError

from qat.config import explain
from qat.errors import ConfigError
from qat.files import parse_json, write_atomically
from qat.observe.charts import SERIES, Chart
from qat.observe.page import check_replaceable, number, picture, template

FIGURES = "figures.jsonl"
DATED = re.compile(r"(\d{4}-\d{2}-\d{2})_(.+)")
GOAL = re.compile(r"\s*(<=|>=|==|<|>)\s*([0-9.eE+-]+)")


class RecordFigure(BaseModel):
    """One line of a record's `figures.jsonl`; keys that the page does not show are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    figure: str
    value: float
    unit: str = ""
    goal: str = ""
    device: str
    commit: str = ""
    command: str = ""
    runs: int = 1
    spread: float | None = None

    @property
    def is_met(self) -> bool | None:
        """True if the value meets the bound at the start of `goal`; None without a bound."""
        found = GOAL.match(self.goal)
        if found is None:
            return None
        sign, bound = found[1], float(found[2])
        if sign == "==":
            return self.value == bound
        reached = self.value <= bound if sign[0] == "<" else self.value >= bound
        return reached and not (sign in {"<", ">"} and self.value == bound)


@dataclass(frozen=True)
class RecordEntry:
    """One figure with the day and the name of its record."""

    day: str
    record: str
    figure: RecordFigure


def write_leaderboard(records: Path, out: Path) -> Path:
    """Write the page about all records in `records` to `out`.

    Raises:
        ConfigError: there are no records, the figures of one cannot be read, or `out` exists and
            was not written by qat.
    """
    entries = read_records(records)
    if not entries:
        raise ConfigError(
            f"{records} has no DATE_SLUG/{FIGURES}, expected records; make one with 'qat bench "
            "record' or name another --records"
        )
    devices = by_device(entries)
    check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    count = len({(entry.day, entry.record) for entry in entries})
    subtitle = f"{len(entries)} figures of {count} records on {len(devices)} devices"
    views = [_device_view(name, found) for name, found in devices.items()]
    made = template("leaderboard.html", Path(__file__).parent)
    page = made.render(title="Records", subtitle=subtitle, devices=views)
    write_atomically(out, page)
    return out


def read_records(records: Path) -> list[RecordEntry]:
    """Return the figures of all records, oldest first.

    Raises:
        ConfigError: a line is not a figure, or a directory is not named like a record.
    """
    entries = []
    for path in sorted(records.glob(f"*/{FIGURES}")):
        named = DATED.fullmatch(path.parent.name)
        if named is None:
            raise ConfigError(f"{path.parent} is no record's name; call it YYYY-MM-DD_SLUG")
        for line in path.read_text(encoding="utf-8").splitlines():
            entries.append(RecordEntry(named[1], named[2], _figure(line, path)))
    return entries


def by_device(entries: Iterable[RecordEntry]) -> dict[str, list[RecordEntry]]:
    """Group entries by device, the device with the most entries first."""
    found: dict[str, list[RecordEntry]] = {}
    for entry in entries:
        found.setdefault(entry.figure.device, []).append(entry)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def by_figure(entries: Iterable[RecordEntry]) -> dict[str, list[RecordEntry]]:
    """Group entries by figure, in the order of first appearance.

    If a record holds a figure twice, the last line counts.
    """
    found: dict[str, dict[tuple[str, str], RecordEntry]] = {}
    for entry in entries:
        found.setdefault(entry.figure.figure, {})[entry.day, entry.record] = entry
    return {name: list(of_record.values()) for name, of_record in found.items()}


def curves(name: str, entries: Iterable[RecordEntry]) -> list[Chart]:
    """Return a chart for each figure that at least two records of a device hold."""
    charts = []
    for figure, found in by_figure(entries).items():
        if len(found) > 1:
            last = found[-1].figure
            caption = f"{last.unit}; goal {last.goal}." if last.goal else f"{last.unit}."
            charts.append(Chart(f"{name}-{figure}", last.figure, caption, partial(_paint, found)))
    return charts


def _figure(line: str, path: Path) -> RecordFigure:
    try:
        return RecordFigure.model_validate(parse_json(line))
    except json.JSONDecodeError:
        raise ConfigError(
            f"{path}: {line[:40]!r} is no JSON object; write it by a script"
        ) from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error)}; see speedrun/records/README.md") from None


def _device_view(name: str, entries: list[RecordEntry]) -> dict[str, object]:
    rows = [
        _row(entry, best_of(found), is_first=i == 0)
        for found in by_figure(entries).values()
        for i, entry in enumerate(reversed(found))
    ]
    met = [entry.figure.is_met for entry in entries if entry.figure.is_met is not None]
    return {
        "name": name,
        "met": f"{sum(met)} of {len(met)} goals met",
        "rows": rows,
        "images": [picture(chart) for chart in curves(name, entries)],
    }


def best_of(entries: list[RecordEntry]) -> RecordEntry | None:
    """Return the best entry in the direction of the goal; None without a goal or with one entry."""
    found = GOAL.match(entries[-1].figure.goal)
    if found is None or len(entries) < 2:
        return None
    choose = max if found[1][0] == ">" else min
    return choose(entries, key=lambda entry: entry.figure.value)


def _row(entry: RecordEntry, best: RecordEntry | None, *, is_first: bool) -> dict[str, object]:
    figure = entry.figure
    spread = "" if figure.spread is None else f" +- {number(figure.spread)}"
    return {
        "figure": figure.figure if is_first else "",
        "value": f"{number(figure.value)}{spread}",
        "unit": figure.unit,
        "goal": figure.goal,
        "met": {True: "met", False: "missed", None: "-"}[figure.is_met],
        "is_best": entry is best,
        "runs": figure.runs,
        "record": f"{entry.day} {entry.record}",
        "commit": figure.commit,
        "command": figure.command,
    }


def _paint(entries: list[RecordEntry], axes: Axes) -> None:
    places = [f"{entry.day}\n{entry.record}" for entry in entries]
    axes.errorbar(
        places,
        [entry.figure.value for entry in entries],
        [entry.figure.spread or 0.0 for entry in entries],
        color=SERIES[0],
        marker="o",
    )
    goal = GOAL.match(entries[-1].figure.goal)
    if goal is not None:
        axes.axhline(float(goal[2]), color=SERIES[1], linestyle="--")
