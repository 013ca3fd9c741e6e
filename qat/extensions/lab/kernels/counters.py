"""Counters of a kernel by Nsight Compute: the shares of its peak rates that the hardware counted.

`ncu` runs this module as a program, which launches one case at the timed size.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
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


def program() -> str | None:
    """Return the path of `ncu`, None if it is not installed."""
    return shutil.which("ncu")


def counters(case: str, config: KernelsConfig, speed: Speed | None) -> Row:
    """Run a case under `ncu` and return the columns `METRICS`, the largest of its kernels each.

    Empty without `config.ncu`, the program or a compiled kernel. A driver that refuses counters to
    this user leaves `ncu_error`.
    """
    ncu, compiled = program(), speed.compiled if speed else ()
    if not config.ncu or ncu is None or not compiled:
        return {}
    names = "|".join(sorted({each.kernel.rpartition(".")[2] for each in compiled}))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        words = [ncu, "--csv", "--log-file", str(log), "--metrics", ",".join(METRICS.values())]
        words += ["--kernel-name", f"regex:^({names})$"]
        words += [sys.executable, "-m", __name__, case, str(config.shape), config.device]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    found = read_counters(lines)
    if found:
        return found
    said = [line for line in (*lines, *ran.stderr.splitlines()) if line.strip()]
    return {"ncu_error": said[-1].strip() if said else f"ncu ended with {ran.returncode}"}


def read_counters(lines: list[str]) -> Row:
    """Return the largest value of each metric in the lines that `ncu --csv` wrote."""
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    values: dict[str, list[float]] = {}
    for row in table:
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # "n/a": this GPU has no such counter
            continue
        values.setdefault(row["Metric Name"], []).append(value)
    return {
        name: max(values[metric]) / PERCENT for name, metric in METRICS.items() if metric in values
    }


def launch(name: str, shape: str, device: str) -> None:
    """Launch a case at the size that is timed."""
    case, seeds = all_cases()[name], Seeds(select(device).device, 0, is_interpreted=False)
    size = case.size(work_of(shape))
    with torch.no_grad():
        case.kernel(case.inputs(seeds.maker(0), size), size)
    torch.cuda.synchronize()


if __name__ == "__main__":
    launch(*sys.argv[1:])
