"""What GPU and host do while a run goes on, sampled from beside it.

A column that nobody can measure here stays empty; it is never zero.
"""

import csv
import logging
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from qat.logs import read_json_lines

GPU_COLUMNS = {
    "gpu_util_pct": "utilization.gpu",
    "gpu_mem_mib": "memory.used",
    "gpu_temp_c": "temperature.gpu",
    "gpu_power_w": "power.draw",
    "gpu_clock_mhz": "clocks.sm",
}
"""Column by the field of nvidia-smi that fills it."""
HOST_COLUMNS = ("host_cpu_pct", "host_mem_pct", "rss_mib")
COLUMNS = ("time_s", "gpu", *GPU_COLUMNS, *HOST_COLUMNS)
TOOL = "nvidia-smi"
TOOL_TIMEOUT_S = 10.0
LEAST_SPAN_S = 0.05
BUSY_PCT = 50.0
"""Clocks of a GPU that does less say nothing."""
HOT_C, CLOCK_SPREAD = 80.0, 0.05
"""A GPU above this temperature, or whose busy clock moves by this share, is warned of."""

logger = logging.getLogger(__name__)

Sample = dict[str, float | None]


def has_gpu_tool() -> bool:
    """Whether GPUs can be watched; said once where they cannot."""
    if shutil.which(TOOL):
        return True
    logger.warning("%s is not here: the GPU columns of telemetry stay empty", TOOL)
    return False


class Watch:
    """Samples GPU and host into a CSV file from now until the block ends."""

    def __init__(self, pid: int, path: Path, every_s: float, *, with_gpu: bool) -> None:
        self._pid = pid
        self._path = path
        self._every_s = every_s
        self._with_gpu = with_gpu
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> None:
        """Begin."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """End with the sample that is being taken."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        began = time.monotonic()
        psutil.cpu_percent()  # tells the share since the call before
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            while True:
                time_s = time.monotonic() - began
                host = {"time_s": round(time_s, 3), **host_sample(self._pid)}
                if time_s < LEAST_SPAN_S:
                    host["host_cpu_pct"] = None  # nothing has passed that it could be a share of
                gpus = query_gpus() if self._with_gpu else []
                for gpu in gpus or [{}]:
                    writer.writerow({**host, **gpu})
                file.flush()
                if self._stop.wait(self._every_s):
                    return


def host_sample(pid: int) -> Sample:
    """Share of all cores and of memory in use, and what the process and its children hold."""
    return {
        "host_cpu_pct": psutil.cpu_percent(),
        "host_mem_pct": psutil.virtual_memory().percent,
        "rss_mib": _tree_rss_mib(pid),
    }


def query_gpus() -> list[Sample]:
    """A sample of every GPU; what a GPU does not tell is None, and so is all if the tool fails."""
    fields = ",".join(["index", *GPU_COLUMNS.values()])
    command = [TOOL, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(found.stdout)


def parse_gpus(text: str) -> list[Sample]:
    """The lines of nvidia-smi as samples; `[N/A]` and the like are None."""
    rows = [[word.strip() for word in line.split(",")] for line in text.strip().splitlines()]
    names = ("gpu", *GPU_COLUMNS)
    return [dict(zip(names, map(_number, row), strict=True)) for row in rows]


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file; none if it is not there. A line cut short by a kill is left out."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return [{name: _number(word) for name, word in row.items()} for row in rows]


def summarise(samples: Sequence[Sample]) -> Sample:
    """Medians and maxima over a run; None where nothing was sampled.

    Clocks count while the GPU is busy; `gpu_clock_spread` is (p90 - p10) / median of them.
    """
    busy = [row for row in samples if (row.get("gpu_util_pct") or 0) >= BUSY_PCT]
    clocks = _known(busy, "gpu_clock_mhz")
    return {
        "gpu_util_pct": _or_none(median, _known(samples, "gpu_util_pct")),
        "gpu_mem_mib": _or_none(max, _known(samples, "gpu_mem_mib")),
        "gpu_temp_c": _or_none(max, _known(samples, "gpu_temp_c")),
        "gpu_power_w": _or_none(median, _known(samples, "gpu_power_w")),
        "gpu_clock_mhz": _or_none(median, clocks),
        "gpu_clock_spread": _or_none(_spread, clocks),
        "host_cpu_pct": _or_none(median, _known(samples, "host_cpu_pct")),
        "rss_mib": _or_none(max, _known(samples, "rss_mib")),
    }


def machine_warnings(summary: Sample) -> list[str]:
    """What makes the timings of a run doubtful, in words."""
    hot, spread = summary["gpu_temp_c"], summary["gpu_clock_spread"]
    found = []
    if hot is not None and hot > HOT_C:
        found.append(f"GPU at {hot:.0f} C")
    if spread is not None and spread > CLOCK_SPREAD:
        found.append(f"GPU clock moved by {spread:.0%}")
    return found


def _tree_rss_mib(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    total = 0
    for each in tree:
        try:
            total += each.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return total / 2**20 or None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _known(samples: Sequence[Sample], name: str) -> list[float]:
    return [row[name] for row in samples if row.get(name) is not None]


def _or_none(of, values: list[float]) -> float | None:  # noqa: ANN001 - a function of a list
    return of(values) if values else None


def _spread(values: list[float]) -> float:
    ranked = sorted(values)
    low, high = (ranked[round(share * (len(ranked) - 1))] for share in (0.1, 0.9))
    return (high - low) / median(values)


# Step times by rank, from the heartbeats that each process of a run leaves.

PATTERN = "heartbeat-rank*.jsonl"


def rank_facts(directory: Path) -> dict[str, object]:
    """Median step seconds by rank, the slowest rank, and how much longer it takes than the fastest.

    None of a run without heartbeats; a rank whose lines have no `step_s` is left out.
    """
    by_rank = {}
    for path in directory.rglob(PATTERN):
        rank = re.search(r"rank(\d+)\.jsonl$", path.name)
        seconds = [line["step_s"] for line in read_json_lines(path) if line.get("step_s")]
        if rank and seconds:
            by_rank[int(rank[1])] = median(seconds)
    slowest = max(by_rank, key=by_rank.get, default=None)
    spread = max(by_rank.values()) / min(by_rank.values()) - 1 if by_rank else None
    return {
        "rank_step_s": [by_rank[rank] for rank in sorted(by_rank)] or None,
        "slowest_rank": slowest,
        "rank_spread": spread,
    }
