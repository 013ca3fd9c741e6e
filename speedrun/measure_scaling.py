"""Tokens/s of the training step against batch, sequence length and model size, as one figure.

Frozen codes, exact loss, nothing recomputed; every point is compiled anew, as a run of its shape
would be. The cost per token should not depend on the batch once the device is busy.

python speedrun/measure_scaling.py --out runs/scaling
python speedrun/measure_scaling.py --out runs/scaling_batch --panels batch
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App
from plot_scaling import draw, read_rows
from speed_case import (
    EXACT,
    FROZEN,
    SPEED_COLUMNS,
    Figure,
    Row,
    record,
    results_in,
    settled,
    show,
    timed_row,
    varied,
)

from qat.backend.device import select
from qat.bench.measure import Timing
from qat.bench.results import ROWS, Results
from qat.bench.run import Setting, prepare, time_ours
from qat.bench.student import Ours
from qat.logs import configure
from qat.models.language_model import LanguageModel

app = App(help=__doc__)
LENGTH = 64
LENGTHS = (64, 128, 512, 1024, 4096)
LENGTH_TOKENS, SIZE_TOKENS = 2**15, 2**14
"""Tokens of a step, against length and against size."""
BUSY_TOKENS = 2**14
"""From so many tokens a step on, the device counts as saturated."""
FLATNESS = Figure("flatness_percent", "% between dearest and cheapest token", "<= 10")


@dataclass(frozen=True)
class Point:
    """One measurement."""

    shape: str
    seq_len: int
    batch_size: int


@app.default
def measure(
    *,
    out: Path,
    shapes: str = "qwen3-0.6b,qwen3-1.7b,qwen3-4b",
    device: str = "auto",
    panels: str = "batch,length,size",
    largest: int = 4096,
    tokens_divisor: int = 1,
    steps: int = 10,
) -> None:
    """Write rows, a figure of three panels and `flatness_percent` to OUT.

    Parameters
    ----------
    shapes
        The first one is measured against batch and length, all against size.
    largest
        Batch that the first panel ends at, if it fits.
    tokens_divisor
        Divides the tokens of every step, for a small device.
    """
    configure()
    names = shapes.split(",")
    wanted = points(names, panels.split(","), largest, tokens_divisor)
    config = settled(device=device, steps=steps, seq_len=LENGTH, **FROZEN, **EXACT)
    with results_in(out, config) as results:
        rows = []
        for shape in names:
            of_shape = {point: wanted[point] for point in wanted if point.shape == shape}
            if of_shape:
                rows += measure_shape(*prepare(config, shape), of_shape, results)
                select(device).free_memory()
        results.finish()
    show(rows, ("Student", "student", "{}"), ("L", "seq_len", "{}"), columns=SPEED_COLUMNS)
    draw_both(out)
    report(out, rows, BUSY_TOKENS // tokens_divisor)


def points(
    shapes: Sequence[str], panels: Sequence[str], largest: int, divisor: int
) -> dict[Point, list[str]]:
    """What to measure, each once, and the panels that it belongs to."""
    found: dict[Point, list[str]] = defaultdict(list)
    first = shapes[0]
    if "batch" in panels:
        for power in range(0, largest.bit_length(), 2):
            found[Point(first, LENGTH, 2**power)].append("batch")
    if "length" in panels:
        for length in LENGTHS:
            batch = LENGTH_TOKENS // divisor // length
            if batch:
                found[Point(first, length, batch)].append("length")
    if "size" in panels:
        for shape in shapes:
            found[Point(shape, LENGTH, SIZE_TOKENS // divisor // LENGTH)].append("size")
    return dict(found)


def measure_shape(
    setting: Setting, student: LanguageModel, wanted: dict[Point, list[str]], results: Results
) -> list[Row]:
    """The points of one student; larger batches than one that does not fit are left out."""
    ours = Ours(student, setting.config)
    rows, full = [], float("inf")
    for point, panels in wanted.items():
        if point.batch_size * point.seq_len >= full:
            continue
        sizes = {"seq_len": point.seq_len, "batch_size": point.batch_size}
        here = varied(setting, student, **sizes)
        timing: Timing | None = time_ours(here, ours, point.batch_size)
        if timing is None:
            full = point.batch_size * point.seq_len
        rows.append(timed_row(here, "ours", timing, panels=panels))
        results.add(**rows[-1])
    return rows


def draw_both(out: Path) -> None:
    """The figure, for pages and for eyes."""
    rows = read_rows(out / ROWS)
    for suffix in ("svg", "png"):
        draw(rows, out / f"scaling.{suffix}")


def report(out: Path, rows: Sequence[Row], busy_tokens: int) -> None:
    """Record how flat the cost per token is over saturated batches; print it by length."""
    cost = {
        (row["seq_len"], row["batch_size"]): 1e6 / row["tokens_per_s"]
        for row in rows
        if "tokens_per_s" in row and {"batch", "length"} & set(row["panels"])
    }
    by_batch = {
        key: us for key, us in cost.items() if key[0] == LENGTH and LENGTH * key[1] >= busy_tokens
    }
    if len(by_batch) > 1:
        spread = 100 * (max(by_batch.values()) / min(by_batch.values()) - 1)
        batches = ", ".join(f"{key[1]}: {us:.3f}" for key, us in by_batch.items())
        print(f"microseconds a token at L = {LENGTH}, by batch: {batches}")
        record(out, FLATNESS, [spread], digits=2)
    lengths = {row["seq_len"]: row for row in rows if "length" in row["panels"]}
    for length, row in lengths.items():
        if "tokens_per_s" in row:
            flops = row["flops_per_token_attention"] / row["flops_per_token_linears"]
            print(
                f"L = {length}: {1e6 / row['tokens_per_s']:.3f} us a token; attention's FLOPs are "
                f"{flops:.1%} of the linears'"
            )


if __name__ == "__main__":
    app()
