"""`qat bench attention`: dense and sparse attention in turns, over lengths and group sizes."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.attention.ways import Pass, Way, Work, call_of, layer_of, problem, recorded, ways_of
from qat.bench.config import AttentionConfig, parse_sizes
from qat.bench.kernels.gates import Clock, Row, times
from qat.bench.results import Results, environment
from qat.errors import ConfigError

logger = logging.getLogger(__name__)

SAMPLE_S = 40e-3
MOST_CALLS = 32
"""A sample is of so many calls in a row that the host's launches do not show."""


class Ready(NamedTuple):
    """A way that ran once."""

    row: Row
    call: Callable[[], object]
    calls: int
    """In one sample."""


@dataclass(frozen=True)
class AttentionReport:
    """What was measured, for whoever shows it."""

    path: Path
    rows: list[Row]
    crossovers: list[Row]


def run_attention(config: AttentionConfig, out: Path | None) -> AttentionReport:
    """Time every way on every shape; what cannot run has a row that says why.

    Raises:
        ConfigError: no such device or preset.
    """
    backend = select(config.device)
    clock = Clock(backend, config.repeats, config.limit_s)
    rows: list[Row] = []
    with Results(out, environment(backend, config)) as results:
        for work, which in cases_of(config):
            ways = ways_of(which, tuple(config.attention.split(",")))
            for row in measured(ways, work, which, clock=clock):
                results.add(**row)
                rows.append(row)
        found = crossovers(rows)
        results.finish(crossovers=found)
    return AttentionReport(results.path, rows, found)


def cases_of(config: AttentionConfig) -> Iterator[tuple[Work, Pass]]:
    """Every shape in every pass."""
    for group in parse_sizes(config.groups):
        for length in parse_sizes(config.lengths):
            work = Work(length, group, config.key_heads, config.head_dim, config.batch_size)
            for which in config.passes.split(","):
                yield work, which


def measured(ways: Iterator[Way], work: Work, which: Pass, *, clock: Clock) -> list[Row]:
    """A row for each way, those that can run in turns; `over_dense` against the best dense one."""
    logger.info("%s, S=%d, %d/%d heads", which, work.length, work.heads, work.key_heads)
    tried = [ready(way, work, which, clock.backend) for way in ways]
    able = [each for each in tried if isinstance(each, Ready)]
    turns = clock.turns([_repeated(each) for each in able])
    for each, seconds in zip(able, turns, strict=True):
        each.row.update(times([second / each.calls for second in seconds]))
    dense = [each.row["p50_s"] for each in able if each.row["is_dense"]]
    for each in able:
        each.row["over_dense"] = min(dense) / each.row["p50_s"] if dense else None
    return [each.row if isinstance(each, Ready) else each for each in tried]


def ready(way: Way, work: Work, which: Pass, backend: Backend) -> Ready | Row:
    """A way after its first calls, whose compiling and memory the row tells; or why not."""
    row: Row = {
        "kind": "attention",
        "case": f"{way.name}, {which}, S={work.length}, {work.heads}/{work.key_heads}",
        "way": way.name,
        "is_dense": way.is_dense,
        "pass": which,
        "length": work.length,
        "heads": work.heads,
        "key_heads": work.key_heads,
        "width": work.width,
        "batch_size": work.batch,
        "dtype": dtype_on(backend),
    }
    backend.free_memory()
    dtype = backend.dtype(dtype_on(backend))
    try:
        began = time.perf_counter()
        layer = layer_of(work, which, device=backend.device, dtype=dtype)
        attend = way.prepare(layer, work)
        if which == "decode":
            attend = recorded(attend, layer, backend)
        call = call_of(attend, layer, which)
        call()
        backend.synchronize()
        row["compile_s"] = time.perf_counter() - began
        row["peak_gib"] = _added_gib(call, backend)
        seconds = _seconds(call, backend)
        if way.config is not None and which != "decode":
            with torch.set_grad_enabled(which == "train"):
                wrong = problem(attend, layer, way.config)
            if wrong is not None:
                return {**row, "status": "WRONG", "reason": wrong}
    except (ConfigError, RuntimeError) as error:
        status = "OOM" if backend.is_out_of_memory(error) else "UNSUPPORTED"
        reason = " ".join(str(error).split())
        return {**row, "status": status, "reason": reason[:200]}
    calls = max(1, min(MOST_CALLS, round(SAMPLE_S / seconds)))
    return Ready({**row, "status": "OK", "calls": calls}, call, calls)


def crossovers(rows: Sequence[Row]) -> list[Row]:
    """For each sparse way the least length from which on it beats every dense one; None: never."""
    found = []
    timed = [row for row in rows if row["status"] == "OK" and not row["is_dense"]]
    kinds = dict.fromkeys(
        (row["way"], row["pass"], row["heads"], row["key_heads"]) for row in timed
    )
    for kind in kinds:
        way, which, heads, key_heads = kind
        of_kind = [
            row
            for row in timed
            if (row["way"], row["pass"], row["heads"], row["key_heads"]) == kind
        ]
        length = None
        for row in sorted(of_kind, key=lambda row: -row["length"]):
            if row["over_dense"] is None or row["over_dense"] <= 1:
                break
            length = row["length"]
        found.append(
            {"way": way, "pass": which, "heads": heads, "key_heads": key_heads, "length": length}
        )
    return found


def dtype_on(backend: Backend) -> str:
    """bf16 on a GPU, fp32 elsewhere."""
    return "bf16" if backend.records() else "fp32"


def _repeated(each: Ready) -> Callable[[], None]:
    def run() -> None:
        for _ in range(each.calls):
            each.call()

    return run


def _seconds(call: Callable[[], object], backend: Backend) -> float:
    """Seconds of one call: the median of three."""
    found = []
    for _ in range(3):
        first = backend.mark()
        call()
        found.append(backend.seconds_between(first, backend.mark()))
    return statistics.median(found)


def _added_gib(call: Callable[[], object], backend: Backend) -> float | None:
    """What one call holds at most beyond what is held before it."""
    backend.reset_peak_memory()
    before = backend.held_memory_gib()
    call()
    backend.synchronize()
    peak = backend.peak_memory_gib()
    return None if peak is None or before is None else max(0.0, peak - before)
