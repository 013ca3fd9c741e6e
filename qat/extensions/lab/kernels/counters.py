"""Counters of a kernel by Nsight Compute: the shares of its peak rates that the hardware counted.

`ncu` runs this module as a program, which launches one case at the timed size.
"""

import csv
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from qat.backend.device import select
from qat.extensions.bench.measure import Row
from qat.extensions.lab.config import KernelsConfig
from qat.extensions.lab.kernels.cases import all_cases, work_of
from qat.extensions.lab.kernels.gates import Seeds, Speed

PERCENT = 100
METRICS = {
    "ncu_dram_frac": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_tensor_frac": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "ncu_warps_frac": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Columns of a row, and the metrics that they hold as fractions."""
TOOLKIT = Path("/usr/local/cuda/bin/ncu")
"""The program in CUDA's toolkit, whose directory often is not on PATH."""
MOST_LAUNCHES = 50  # a case that launches its kernels hundreds of times is counted by these
NCU_TIMEOUT_S = 600
ERROR, NO_METRIC = "==ERROR==", "Failed to find metric"


def program() -> str | None:
    """Return the path of `ncu`, None if it is not installed."""
    return shutil.which("ncu") or shutil.which(TOOLKIT)


def counters(case: str, config: KernelsConfig, speed: Speed | None) -> Row:
    """Run a case under `ncu` and return the columns `METRICS`, the largest of its kernels each.

    Empty without `config.ncu`, the program or a compiled kernel. A metric that this GPU lacks is
    left out. A driver that refuses counters to this user leaves `ncu_error`.
    """
    ncu, compiled = program(), speed.compiled if speed else ()
    if not config.ncu or ncu is None or not compiled:
        return {}
    names = "|".join(sorted({each.kernel.rpartition(".")[2] for each in compiled}))
    # In another language it would write the decimal point as a comma. Its default locks the clocks
    # of the card, while the roofline beside its counters is measured with the clocks as they are.
    options = ["env", "LC_ALL=C", ncu, "--csv", "--clock-control", "none"]
    options += ["--launch-count", str(MOST_LAUNCHES)]
    options += ["--kernel-name", f"regex:^({names})$"]
    program_words = [sys.executable, "-m", __name__, case, str(config.shape), config.device]
    metrics = list(METRICS.values())
    while True:
        lines = _run([*options, "--metrics", ",".join(metrics)], program_words)
        if found := read_counters(lines):
            return found
        refused = [line for line in lines if NO_METRIC in line]
        known = [each for each in metrics if not _is_named(each, refused)]
        if not known or known == metrics:
            break
        metrics = known
    errors = [line for line in lines if line.startswith(ERROR)]
    return {"ncu_error": (errors or lines[-1:] or ["it counted no kernel"])[0]}


def _is_named(metric: str, lines: Sequence[str]) -> bool:
    """Return whether a metric is named; ncu writes it as a pattern, so its first part counts."""
    return any(metric.partition(".")[0] in line for line in lines)


def _run(options: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the lines of the log that ncu wrote, followed by those of the program's errors."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        try:
            errors = subprocess.run(
                [*options, "--log-file", str(log), *words],
                capture_output=True,
                text=True,
                check=False,
                timeout=NCU_TIMEOUT_S,
            ).stderr
        except subprocess.TimeoutExpired:
            errors = f"{ERROR} not done after {NCU_TIMEOUT_S} s"
        written = log.read_text(encoding="utf-8") if log.exists() else ""
    lines = (*written.splitlines(), *errors.splitlines())
    return [line.strip() for line in lines if line.strip()]


def read_counters(lines: Sequence[str]) -> Row:
    """Return the largest value of each metric in the lines that `ncu --csv` wrote.

    Its page `details` has a line for each metric, and `raw` a line for each kernel below one of
    units.
    """
    values: dict[str, list[float]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        found = {row["Metric Name"]: row["Metric Value"]} if "Metric Name" in row else row
        for column, metric in METRICS.items():
            value = _number(found.get(metric))
            if math.isfinite(value):
                values.setdefault(column, []).append(value / PERCENT)
    return {column: max(values[column]) for column in METRICS if column in values}


def _number(text: str | None) -> float:
    """Return a value such as `1,234.5`, or NaN: a unit, or n/a where a GPU has no such counter."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return math.nan


def launch(name: str, shape: str, device: str) -> None:
    """Launch a case at the size that is timed."""
    case, seeds = all_cases()[name], Seeds(select(device).device, 0, is_interpreted=False)
    size = case.size(work_of(shape))
    with torch.no_grad():
        case.kernel(case.inputs(seeds.maker(0), size), size)
    torch.cuda.synchronize()


if __name__ == "__main__":
    launch(*sys.argv[1:])
