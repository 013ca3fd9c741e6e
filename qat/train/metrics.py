"""The metrics of a run: JSON lines, CSV tables, and a summary at the end.

The tables hold no data of their own: they are rebuilt from `metrics.jsonl` whenever a run starts or
is resumed, then appended to. `metrics.json` summarizes a finished run from the run's own files.
"""

import csv
import io
import json
import statistics
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from qat.files import parse_json, write_atomically
from qat.logs import (
    EVENTS,
    FACTS,
    HEARTBEAT,
    METRICS,
    SUMMARY,
    TRAINING_CSV,
    VAL_CSV,
    JsonLines,
    Lines,
    read_json_lines,
)
from qat.observe.runs import step_seconds, token_count, wall_seconds

FILES = {"train": TRAINING_CSV, "eval": VAL_CSV}
LATER = {"train": (), "eval": ("codes_flipped_frac",)}
"""Columns that may first appear after the first line."""
COPIED = ("commit", "config_fingerprint", "world_size", "device", "dtype")
"""Facts of `run.json` that are copied to the summary."""
NO_COLUMN = ("kind", "sample", "nsa_layers")
"""Values of a metrics line that have no column, because they are not numbers."""


class Metrics:
    """`metrics.jsonl`, `training.csv` and `val.csv` of one run, written by its first rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = JsonLines(path / METRICS)
        self._columns: dict[str, list[str]] = {}
        self._tables: dict[str, Lines] = {}
        found = _lines(path / METRICS)
        for kind, name in FILES.items():
            rows = [row for row in found if row.get("kind") == kind]
            if not rows:
                (path / name).unlink(missing_ok=True)
                continue
            header = self._columns[kind] = _header(kind, rows[0])
            cells: list[Iterable[object]] = [
                header,
                *([row.get(column) for column in header] for row in rows),
            ]
            write_atomically(path / name, "".join(f"{_text(each)}\n" for each in cells))
            self._tables[kind] = Lines(path / name)

    def write(self, *, kind: str, **values: object) -> None:
        """Append one line, and the same values as one row; the first row writes a header.

        Raises:
            OSError: one of the files could not be written.
        """
        self._lines.write(kind=kind, **values)
        if kind not in self._tables:
            self._columns[kind] = _header(kind, values)
            self._tables[kind] = Lines(self._path / FILES[kind])
            self._tables[kind].append(_text(self._columns[kind]))
        self._tables[kind].append(_text([values.get(name) for name in self._columns[kind]]))

    def close(self) -> None:
        """Close the files."""
        for file in (self._lines, *self._tables.values()):
            file.close()


def _header(kind: str, first: dict[str, object]) -> list[str]:
    return [*(name for name in first if name not in NO_COLUMN), *LATER[kind]]


def _text(cells: Iterable[object]) -> str:
    """Return one line of CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def write_summary(path: Path, *, final: Path, best: float, best_step: int) -> dict[str, Any]:
    """Write `metrics.json` of the run in `path`, computed from the run's own files; return it.

    `final` is the checkpoint to use, that of `best_step`, and `best` its held-out score in nats per
    token. The speed is the median over heartbeats except the first, which includes compilation; a
    heartbeat covers the steps since the previous one.
    """
    facts = parse_json((path / FACTS).read_text(encoding="utf-8"))
    beats, steps = _lines(path / HEARTBEAT), _lines(path / METRICS)
    steps = [line for line in steps if line["kind"] == "train"] or [{}]
    warm = [beat["tokens_per_s"] for beat in beats[1:] or beats]
    events = chain(*map(read_json_lines, sorted(path.glob(EVENTS))))
    found = {
        "steps": steps[-1].get("step", 0),
        "first_loss_nats": steps[0].get("loss_nats"),
        "last_loss_nats": steps[-1].get("loss_nats"),
        "best_nats": best,
        "best_step": best_step,
        "wall_s": wall_seconds(beats),
        "train_s": step_seconds(beats),
        "tokens": token_count(beats),
        "tokens_per_s": statistics.median(warm) if warm else None,
        "peak_gib": max((b["peak_gib"] for b in beats if b["peak_gib"] is not None), default=None),
        **_compiler(beats),
        "events": dict(sorted(Counter(event["kind"] for event in events).items())),
        **{name: facts.get(name) for name in COPIED},
        "final": final.name,
    }
    write_atomically(path / SUMMARY, json.dumps(found, indent=1) + "\n")
    return found


def _compiler(beats: list[dict]) -> dict[str, float]:
    """Sum a compiling device's graphs, seconds and host fallbacks over all processes."""
    last = {beat.get("pid"): beat for beat in beats if "xla_compiles" in beat}.values()
    if not last:
        return {}
    fallbacks = sum((Counter(beat["host_fallbacks"]) for beat in last), Counter())
    names = ("xla_compiles", "xla_compile_s", "step_compile_s", "xla_executions")
    return {n: sum(beat[n] for beat in last) for n in names} | {"host_fallbacks": dict(fallbacks)}


def _lines(path: Path) -> list[dict]:
    return read_json_lines(path) if path.exists() else []
