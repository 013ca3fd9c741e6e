"""How near every Triton kernel comes to what the device can do, at training shapes.

A kernel's bound is what its bytes take at the rate of a large copy, or its FLOPs at that of a large
matmul, whichever is longer; both rates are measured in the same run. Calls are recorded as one
graph, as in training, and the median of its replays counts. See kernel_work.py for what they move.
Beside it: the time of a plain elementwise kernel that moves as many bytes in as many calls, which
no kernel on tensors of that size beats by much.

python speedrun/measure_kernels.py --out runs/kernels
"""

import statistics
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from cyclopts import App
from kernel_work import Place, Work, model_work
from layer_work import layer_work
from speed_case import Figure, Row, record, results_in, settled, show

from qat.backend import DTYPES, Backend
from qat.bench.roofline import Roofline
from qat.bench.run import prepare
from qat.logs import configure

app = App(help=__doc__)
SMALLEST = Figure("kernel_roofline_min", "of the roofline", ">= 0.8")
LARGEST_BYTES = 2**33
"""More is as fast: a plain kernel moves at most so much, and its time is scaled."""
COLUMNS = (
    ("Kernel", "kernel", "{}"),
    ("Calls", "calls", "{}"),
    ("us a call", "call_us", "{:,.2f}"),
    ("GB", "gb", "{:.3f}"),
    ("GB/s", "gb_per_s", "{:,.0f}"),
    ("TFLOP/s", "tflops", "{:,.1f}"),
    ("Bound by", "bound", "{}"),
    ("Of roofline", "roofline_frac", "{:.3f}"),
    ("Of plain kernel", "plain_frac", "{:.3f}"),
)


@app.default
def measure(
    *,
    out: Path,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    only: str = "",
    batch_size: int = 512,
    seq_len: int = 64,
    repeats: int = 20,
) -> None:
    """Write rows, a table and `kernel_roofline_min` to OUT.

    Parameters
    ----------
    only
        Parts of kernels' names, joined by commas; all for none.
    repeats
        Timed replays of each kernel's calls.
    """
    configure()
    config = settled(device=device, seq_len=seq_len, batch_size=batch_size)
    with results_in(out, config) as results:
        setting, student = prepare(config, shape)
        student.model.requires_grad_(False)  # as in training, where the head does not learn
        place = Place(setting, student, DTYPES[config.dtype], batch_size)
        rows = []
        with torch.no_grad():
            for work in chain(layer_work(place), model_work(place)):
                if any(part in work.name for part in only.split(",")):
                    rows.append(row_of(work, setting.backend, setting.roofline, repeats))
                    common = setting.row("kernel", work.name, batch_size)
                    results.add(**common, **rows[-1])
        rates = setting.roofline
        results.finish(copy_gb_per_s=rates.copy_bytes / 1e9, tflops=rates.matmul_flops / 1e12)
    show(rows, columns=COLUMNS)
    print(
        f"copy {rates.copy_bytes / 1e9:,.0f} GB/s, matmul {rates.matmul_flops / 1e12:,.1f} TFLOP/s"
    )
    report(out, rows)


def row_of(work: Work, backend: Backend, rates: Roofline, repeats: int) -> Row:
    """Time and counts of one kernel, and its share of the roofline."""
    seconds = times(work.run, backend, repeats)
    if work.kernel:
        seconds = [kernel_seconds(work, backend)]
    median = statistics.median(seconds)
    plain_s = statistics.median(times(plain(work, backend), backend, repeats))
    plain_s *= max(1.0, work.num_bytes / LARGEST_BYTES)
    by_memory, by_matmul = work.num_bytes / rates.copy_bytes, work.flops / rates.matmul_flops
    return {
        "kernel": work.name,
        "calls": work.calls,
        "call_us": 1e6 * median / work.calls,
        "spread_us": 1e6 * statistics.pstdev(seconds) / work.calls,
        "gb": work.num_bytes / 1e9,
        "gb_per_s": work.num_bytes / median / 1e9,
        "tflops": work.flops / median / 1e12 if work.flops else None,
        "bound": "memory" if by_memory >= by_matmul else "matmul",
        "roofline_frac": max(by_memory, by_matmul) / median,
        "plain_frac": plain_s / median,
        "counts": work.counts,
    }


def plain(work: Work, backend: Backend) -> Callable[[], None]:
    """As many elementwise kernels over as many bytes, half read, half written."""
    count = max(1, min(work.num_bytes, LARGEST_BYTES) // work.calls // 8)
    pairs = [torch.ones(2, count, device=backend.device) for _ in range(work.calls)]

    def run() -> None:
        for source, target in pairs:
            torch.neg(source, out=target)

    return run


def times(run: Callable[[], object], backend: Backend, repeats: int) -> list[float]:
    """Seconds of each of so many runs, recorded as a graph where the device can."""
    run()
    backend.free_memory()
    replay = backend.record(run)[0] if backend.records() else run
    replay()
    found = []
    for _ in range(repeats):
        first = backend.mark()
        replay()
        found.append(backend.seconds_between(first, backend.mark()))
    return found


def kernel_seconds(work: Work, backend: Backend) -> float:
    """Device time of one kernel inside a run of several, as the profiler sees it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work.run()
        backend.synchronize()
    events = [event for event in profile.key_averages() if work.kernel in event.key]
    if not events:
        raise SystemExit(f"the profiler saw no kernel called like {work.kernel!r}")
    return sum(event.self_device_time_total for event in events) / 1e6


def report(out: Path, rows: list[Row]) -> None:
    """Record the smallest share of the roofline; say whose it is."""
    counted = [row for row in rows if row["counts"]]
    if counted:
        least = min(counted, key=lambda row: row["roofline_frac"])
        print(f"furthest from the roofline: {least['kernel']}")
        record(out, SMALLEST, [least["roofline_frac"]], digits=3)


if __name__ == "__main__":
    app()
