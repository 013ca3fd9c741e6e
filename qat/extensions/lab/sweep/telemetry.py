"""Samples of GPU and host taken by a separate thread during a run.

A column that cannot be measured here stays empty; it is never zero.
"""

import csv
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import psutil

from qat.backend.nvidia import gpu_samples
from qat.logs import read_json_lines

GPU_COLUMNS = ("gpu_util_pct", "gpu_mem_mib", "gpu_temp_c", "gpu_power_w", "gpu_clock_mhz")
COLUMNS = ("time_s", "gpu", *GPU_COLUMNS, "host_cpu_pct", "host_mem_pct", "rss_mib")
LEAST_SPAN_S = 0.05
BUSY_PCT = 50.0  # GPU clocks are ignored below this utilization
HOT_C, CLOCK_SPREAD = 80.0, 0.05
"""Limits above which there is a warning: the GPU's temperature, and the spread of its busy clock as
a fraction."""

Sample = dict[str, float | None]


@contextmanager
def sampled_telemetry(pid: int, path: Path, every_s: float) -> Iterator[None]:
    """Sample GPU and host into a CSV file in the block; the last sample ends with the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def sample() -> None:
        began = time.monotonic()
        psutil.cpu_percent()  # the next call returns the share since this one
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            while True:
                time_s = time.monotonic() - began
                share = psutil.cpu_percent()
                host = {
                    "time_s": round(time_s, 3),
                    # the first sample follows at once: there is no interval to measure a share in
                    "host_cpu_pct": share if time_s >= LEAST_SPAN_S else None,
                    "host_mem_pct": psutil.virtual_memory().percent,
                    "rss_mib": _tree_rss_mib(pid),
                }
                writer.writerows({**host, **gpu} for gpu in gpu_samples() or [{}])
                file.flush()
                if stop.wait(every_s):
                    return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file, without a line cut short by a kill; empty if it is missing."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return [{name: float(word) if word else None for name, word in row.items()} for row in rows]


def summarise(samples: Sequence[Sample]) -> Sample:
    """Return medians and maxima over a run; None for columns without samples.

    Clocks count while the GPU is busy; their `gpu_clock_spread` is (p90 - p10) / median.
    """

    def over(of: Callable, name: str, rows: Sequence[Sample] = samples) -> float | None:  # noqa: ANN401
        known = [row[name] for row in rows if row.get(name) is not None]
        return of(known) if known else None

    busy = [row for row in samples if (row.get("gpu_util_pct") or 0) >= BUSY_PCT]
    return {
        "gpu_util_pct": over(median, "gpu_util_pct"),
        "gpu_mem_mib": over(max, "gpu_mem_mib"),
        "gpu_temp_c": over(max, "gpu_temp_c"),
        "gpu_power_w": over(median, "gpu_power_w"),
        "gpu_clock_mhz": over(median, "gpu_clock_mhz", busy),
        "gpu_clock_spread": over(_spread, "gpu_clock_mhz", busy),
        "host_cpu_pct": over(median, "host_cpu_pct"),
        "rss_mib": over(max, "rss_mib"),
    }


def machine_warnings(summary: Sample) -> list[str]:
    """Return descriptions of what makes the timings of a run doubtful."""
    hot, spread = summary["gpu_temp_c"], summary["gpu_clock_spread"]
    found = []
    if hot is not None and hot > HOT_C:
        found.append(f"GPU at {hot:.0f} C")
    if spread is not None and spread > CLOCK_SPREAD:
        found.append(f"GPU clock moved by {spread:.0%}")
    return found


def rank_facts(directory: Path) -> dict[str, object]:
    """Return the median step seconds by rank, the slowest rank, and its excess over the fastest.

    From the heartbeats that each process of a run writes; None without any. A rank whose lines have
    no `step_s` is left out.
    """
    by_rank = {}
    for path in directory.rglob("heartbeat-rank*.jsonl"):
        rank = re.search(r"rank(\d+)\.jsonl$", path.name)
        seconds = [line["step_s"] for line in read_json_lines(path) if line.get("step_s")]
        if rank and seconds:
            by_rank[int(rank[1])] = median(seconds)
    return {
        "rank_step_s": [by_rank[rank] for rank in sorted(by_rank)] or None,
        "slowest_rank": max(by_rank, key=by_rank.get, default=None),
        "rank_spread": max(by_rank.values()) / min(by_rank.values()) - 1 if by_rank else None,
    }


def _tree_rss_mib(pid: int) -> float | None:
    """Return the memory of a process and its children; None if it has ended."""
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    total = 0
    for each in tree:
        with suppress(psutil.Error):  # it has just ended
            total += each.memory_info().rss
    return total / 2**20 or None


def _spread(values: list[float]) -> float:
    ranked = sorted(values)
    low, high = (ranked[round(share * (len(ranked) - 1))] for share in (0.1, 0.9))
    return (high - low) / median(values)
