"""What a finished run came to, in one small file: `metrics.json`."""

import json
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from qat.files import write_atomically
from qat.logs import EVENTS, FACTS, HEARTBEAT, METRICS, SUMMARY, read_json_lines
from qat.report.runs import NOTHING, token_count, wall_seconds

COPIED = ("commit", "config_fingerprint", "world_size", "device", "dtype")
"""Facts of `run.json` that stand in the summary too."""


def write_summary(path: Path, *, final: Path, best: float) -> dict[str, Any]:
    """Write `metrics.json` of the run in `path`, all of it read from the run's own files.

    `final` is the checkpoint to use and `best` its held-out score, nats a token.
    """
    facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    beats = _lines(path / HEARTBEAT)
    found = {
        **_course(_lines(path / METRICS)),
        "best_nats": best,
        **_times(beats),
        **_speed(beats),
        **_compiler(beats),
        "events": _events(path),
        **{name: facts.get(name) for name in COPIED},
        "final": final.name,
    }
    write_atomically(path / SUMMARY, json.dumps(found, indent=1) + "\n")
    return found


def _course(metrics: list[dict]) -> dict[str, Any]:
    """Steps, and the training loss in the first and the last logged one."""
    steps = [line for line in metrics if line["kind"] == "train"]
    first, last = (steps[0], steps[-1]) if steps else ({}, {})
    return {
        "steps": last.get("step", 0),
        "first_loss_nats": first.get("loss_nats"),
        "last_loss_nats": last.get("loss_nats"),
    }


def _times(beats: list[dict]) -> dict[str, float]:
    """Seconds of all processes that made the run, and of these the seconds of its steps.

    A beat stands for the steps since the one before it.
    """
    train_s = sum(
        beat["step_s"] * (beat["step"] - before["step"])
        for before, beat in pairwise([NOTHING, *beats])
    )
    return {"wall_s": wall_seconds(beats), "train_s": train_s}


def _speed(beats: list[dict]) -> dict[str, float | int | None]:
    """Tokens over all ranks, the median of their rate without the first beat, the peak memory."""
    warm = beats[1:] or beats
    peaks = [beat["peak_gib"] for beat in beats if beat["peak_gib"] is not None]
    return {
        "tokens": token_count(beats),
        "tokens_per_s": statistics.median(b["tokens_per_s"] for b in warm) if warm else None,
        "peak_gib": max(peaks, default=None),
    }


def _compiler(beats: list[dict]) -> dict[str, float]:
    """What a device that compiles told: graphs, seconds and host fallbacks, over all processes."""
    last = {beat.get("pid"): beat for beat in beats if "xla_compiles" in beat}.values()
    if not last:
        return {}
    fallbacks = sum((Counter(beat["host_fallbacks"]) for beat in last), Counter())
    names = ("xla_compiles", "xla_compile_s", "step_compile_s", "xla_executions")
    return {n: sum(beat[n] for beat in last) for n in names} | {"host_fallbacks": dict(fallbacks)}


def _events(path: Path) -> dict[str, int]:
    """How often each kind of event befell any rank."""
    files = sorted(path.glob(EVENTS))
    kinds = Counter(event["kind"] for file in files for event in read_json_lines(file))
    return dict(sorted(kinds.items()))


def _lines(path: Path) -> list[dict]:
    return read_json_lines(path) if path.exists() else []
