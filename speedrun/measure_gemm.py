"""Measure the product of a batch with packed weights against cuBLAS in bf16 and Humming.

For Hopper. First tiles are tuned, of every shape at the widths of the goals first, until two thirds
of the seconds are gone, and written to the device's table, of which `--out` holds a copy; processes
compile meanwhile. tests/gpu compares the results with float64. Then every shape and
number of vectors is timed: a graph of calls, each with another copy of the weight so that no cache
holds it, the median of its replays. A row says which tile ran, and whether it is the default or
tuned.

python speedrun/measure_gemm.py --out runs/gemm --seconds 220
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import figures
import torch
from cyclopts import App
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels.lut_gemm import (
    FORMED,
    INPUTS,
    RESIDENT,
    RESIDENT_TOGETHER,
    ROWS,
    SMALL_TOGETHER,
    UNIT,
    WIDTHS,
    GemmTile,
    Part,
    lut_gemm,
    splits_for,
    stages_for,
    tile_for,
    units_ahead,
    width_for,
)
from qat.extensions.decode.kernels.lut_wgmma import STAGES
from qat.extensions.lab.kernels.tune import compiling_only, write_entries
from qat.kernels.tuned import forcing, named, table_path, used
from qat.quant.weight import encode, packed_width, round_to_byte

SQUARE = (8192, 8192)
SHAPES = {
    "8192 x 8192": SQUARE,
    "4B gate, up": (19456, 2560),
    "4B query, key, value": (6144, 2560),
    "4B down": (2560, 9728),
    "4B out": (2560, 4096),
    "0.6B gate, up": (6144, 1024),
    "0.6B query, key, value": (4096, 1024),
    "0.6B down": (1024, 3072),
    "0.6B out": (1024, 2048),
}
VECTORS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
GOALS = {1: 2.6, 16: 2.4, 64: 1.8, 128: 1.1}
"""Times faster than cuBLAS at 8192 x 8192; nowhere below `LEAST`."""
LEAST = 0.98
HUMMING_VECTORS = (1, 16, 64)
COLD_BYTES = 160 * 2**20
"""Total size of the copies that take turns: more than two of the largest caches hold."""
BITS, GROUP = 2, 16
CUTS = {
    8: ((8, 2, 1), (8, 4, 1)),
    16: ((16, 4, 1), (16, 4, 4)),
    32: ((32, 4, 1), (32, 8, 4)),
    48: ((48, 4, 1), (48, 8, 4)),
    64: ((64, 4, 4), (64, 8, 4), (64, 16, 4)),
    96: ((96, 4, 4), (96, 16, 4)),
    128: ((64, 4, 4), (128, 4, 4), (128, 16, 4)),
    192: ((64, 8, 4), (96, 16, 4), (192, 8, 4)),
    256: ((64, 8, 4), (128, 4, 4), (128, 16, 4), (256, 8, 4)),
}
"""Columns, warps and warps together to try by width; above, the last two of 256."""
OWN_WARPS = 8
"""Warps of programs that lay out their own vectors, in matrices below `SMALL_TOGETHER`."""
WORKERS = 8
"""Processes that compile: it takes seconds a kernel, many of them with a process's lock held."""


app = App(help=__doc__)


@app.default
def main(*, out: Path, seconds: float = 120.0, no_tune: bool = False) -> None:
    """Tune, time, and write rows, figures and the device's table.

    Args:
        seconds: two thirds of them are for tuning.
        no_tune: use the device's table as it is.
    """
    start = time.monotonic()
    measured = {"commit": figures.commit()}  # the table that tuning writes is a tracked file
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    first = [width_for(M) for M in GOALS]
    larger = [n for n in VECTORS if n > WIDTHS[-1] and n == width_for(n)]
    rest = [width for width in (*WIDTHS, *larger) if width not in first]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        widths = [] if no_tune else [*first, *rest]
        compiled = begin_to_compile(pool, widths)
        end = start + seconds * 2 / 3
        if not no_tune:
            tune(first, compiled, end, out)
        humming = humming_seconds()
        if not no_tune:
            tune(rest, compiled, end, out)
        pool.shutdown(wait=False, cancel_futures=True)
    print(f"tuned after {time.monotonic() - start:.0f} s")
    rows = []
    with (out / "gemm.jsonl").open("w", encoding="utf-8") as file:
        for name, shape in SHAPES.items():
            for row in timed(name, shape, humming if shape == SQUARE else {}):
                file.write(json.dumps(row) + "\n")
                file.flush()
                rows.append(row)
    report(out / "figures.jsonl", rows, measured)


def compile_one(tile: GemmTile) -> None:
    """Leave the compiled kernel in Triton's cache on disk; nothing runs."""
    # so many inputs that a program's own slices have as many stages
    O, I = 64, tile.stages // units_ahead(BITS) * 4 * UNIT * units_ahead(BITS) * tile.splits
    I = I if tile.own else 1024
    part, x = random_part(O, I), torch.empty(1, I, dtype=torch.bfloat16, device="cuda")
    with compiling_only(), forcing("lut_gemm", (O, I, BITS, width_for(1)), tile):
        lut_gemm(x, [part], None)


def begin_to_compile(pool: ProcessPoolExecutor, widths: list[int]) -> dict[GemmTile, Future]:
    """Every kernel that tuning tries, in its order, by `kernel_of`."""
    compiled: dict[GemmTile, Future] = {}
    for width, (O, I) in product(widths, SHAPES.values()):
        for tile in map(kernel_of, candidates(O, I, width)):
            if tile.columns and tile not in compiled:
                compiled[tile] = pool.submit(compile_one, tile)
    return compiled


def kernel_of(tile: GemmTile) -> GemmTile:
    """Return the tile that stands for all tiles with the same compiled kernel."""
    return tile if tile.columns == 1 else tile._replace(splits=min(tile.splits, 2))


def random_part(O: int, I: int) -> Part:
    """A packed weight of random indices and scales."""
    octets = torch.randint(0, 256, (O, packed_width(I, BITS)), dtype=torch.uint8, device="cuda")
    scales = 0.01 + 0.03 * torch.rand(O, I // GROUP, device="cuda")
    codebook = torch.sort(torch.randn(2**BITS, device="cuda")).values
    return Part(octets, encode(round_to_byte(scales)), codebook, BITS)


def candidates(O: int, I: int, width: int) -> list[GemmTile]:
    """Tiles to try: the default, a formed weight, and of each cut the splits that seem best."""
    found = [tile_for(O, I, BITS, width, has_groups=True), FORMED]
    if width > WIDTHS[-1]:
        found += [FORMED._replace(splits=slabs) for slabs in (2, 4)]
    spans = -(-I // (4 * UNIT * units_ahead(BITS)))
    cuts = CUTS.get(max(width, 8), CUTS[WIDTHS[-1]][-2:])
    for columns, warps, together in cuts:
        blocks = -(-O // (ROWS[together] * warps)) * -(-width // columns)
        if together == 1:
            resident = RESIDENT.get(columns, 2) * 4 // warps
            tile = GemmTile(columns, warps, 1, stages_for(columns))
        else:
            resident = max(RESIDENT_TOGETHER.get(columns, 1) * 4 // warps, 1)
            tile = GemmTile(columns, warps, 1, STAGES, 0, together)
        every = splits_for(blocks, I, BITS, 132 * resident)
        found += [tile._replace(splits=splits) for splits in every[: 3 if together == 1 else 2]]
        if warps == OWN_WARPS and together > 1 and O * I < SMALL_TOGETHER:
            # as many stages as declared memory holds, and one span a program where it holds none
            stages = units_ahead(BITS) * max(2**15 // (2 * INPUTS * columns) // 4, 1)
            fitting = [s for s in every if -(-spans // s) * units_ahead(BITS) <= stages]
            found += [tile._replace(splits=s, stages=stages, own=1) for s in fitting[:1]]
    return list(dict.fromkeys(found))


def tune(widths: list[int], compiled: dict[GemmTile, Future], end: float, out: Path) -> None:
    """Write the fastest tile of each width and shape to the device's table, until `end`."""
    chosen: dict[tuple[str, tuple[int, ...]], tuple | None] = {}
    for width, (O, I) in product(widths, SHAPES.values()):
        tiles = candidates(O, I, width)
        needed = [compiled[kernel_of(tile)] for tile in tiles if tile.columns]
        left = end - time.monotonic()
        if left < 0 or wait(needed, left).not_done:
            break
        key = (O, I, BITS, width)
        parts = copies(lambda: random_part(O, I), O * I * 5 // 16)  # noqa: B023
        x = torch.randn(width, I, device="cuda").bfloat16()
        exact = x.float() @ parts[0].formed(torch.float32).T
        times = {}
        for tile in tiles:
            with forcing("lut_gemm", key, tile):
                found = lut_gemm(x, parts[:1]).float()
                if not (found - exact).abs().max() <= 0.01 * exact.abs().max():
                    raise SystemExit(f"{key}: {tile} gives other results than float32")
                times[tile] = seconds([lambda p=p: lut_gemm(x, [p]) for p in parts], 3)  # noqa: B023
        best = min(times, key=times.__getitem__)
        default = tile_for(*key, has_groups=True)
        chosen["lut_gemm", key] = None if best == default else best
        shown = f"{1e6 * times[best]:.1f} us {best}, default {1e6 * times[default]:.1f} us"
        print(f"{key} {shown}", flush=True)
    name = torch.cuda.get_device_name()
    torch_version = torch.__version__.partition("+")[0]
    facts = {"device": name, "commit": figures.commit(), "torch": torch_version}
    path = table_path(name)
    write_entries(path, chosen, facts)
    shutil.copy(path, out)
    print(f"tuned {len(chosen)} of {len(widths) * len(SHAPES)} products: {path}")


def copies(made: Callable[[], Any], num_bytes: int) -> list[Any]:
    """Return enough copies that no cache holds all of them."""
    return [made() for _ in range(max(2, -(-COLD_BYTES // num_bytes)))]


def seconds(calls: Sequence[Callable[[], Tensor]], replays: int) -> float:
    """Return the seconds of one call, the median over replays of a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    passed = [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    return statistics.median(passed) / 1e3 / len(calls)


def timed(name: str, shape: tuple[int, int], humming: dict[int, float]) -> Iterator[dict[str, Any]]:
    """A row for each number of vectors."""
    O, I = shape
    parts = copies(lambda: random_part(O, I), O * I * 5 // 16)
    dense = copies(lambda: torch.randn(O, I, device="cuda", dtype=torch.bfloat16), 2 * O * I)
    for M in VECTORS:
        x = torch.randn(M, I, device="cuda").bfloat16()
        ours = seconds([lambda p=p: lut_gemm(x, [p]) for p in parts], 9)  # noqa: B023
        bf16 = seconds([lambda w=w: F.linear(x, w) for w in dense], 9)  # noqa: B023
        row = {"shape": name, "O": O, "I": I, "M": M, "ours_s": ours, "bf16_s": bf16}
        row["over_bf16"] = bf16 / ours
        if M in humming:
            row |= {"humming_s": humming[M], "over_humming": humming[M] / ours}
        shown = {k: f"{1e6 * v:.1f} us" if k.endswith("_s") else v for k, v in row.items()}
        ran = used()[f"lut_gemm {named((O, I, BITS, width_for(M)))}"]
        row |= {"tile": ran["effective"], "is_tuned": ran["source"] == "table"}
        print("  ".join(f"{k} {v:.2f}" if type(v) is float else f"{v}" for k, v in shown.items()))
        yield row


def humming_seconds() -> dict[int, float]:
    """Return the seconds of Humming's product at 8192 x 8192 by number of vectors.

    The result is empty where Humming does not run.
    """
    found: dict[int, float] = {}
    try:
        layers = humming_layers(*SQUARE)
        for M in HUMMING_VECTORS if layers else ():
            x = torch.randn(M, SQUARE[1], device="cuda").bfloat16()
            found[M] = seconds([lambda a=a: a(x) for a in layers], 9)  # noqa: B023
    except (RuntimeError, OSError, AssertionError, ValueError) as error:
        print(f"humming does not run: {type(error).__name__}: {error}"[:500])
    return found


def humming_layers(O: int, I: int) -> list[torch.nn.Module]:
    """Layers of 2-bit integers, a scale for each row, which is the fewest bytes."""
    try:
        from humming.layer import HummingLayer
    except ImportError as error:
        print(f"humming-kernels is not there ({error}): pip install humming-kernels==0.1.19")
        return []

    def layer() -> torch.nn.Module:
        made = HummingLayer(
            shape_n=O, shape_k=I, weight_config={"dtype": "int2"}, torch_dtype=torch.bfloat16
        ).cuda()
        made.load_from_unquantized(torch.randn(O, I, device="cuda", dtype=torch.bfloat16))
        made.transform()
        return made

    return copies(layer, O * I // 4)


def report(path: Path, rows: list[dict[str, object]], measured: dict[str, str]) -> None:
    """The figures: each goal at 8192 x 8192, and the least of all."""

    def put(name: str, value: float, goal: str) -> None:
        figures.record(path, name, round(value, 3), "x", goal, runs=9, measured=measured)
        print(f"{name}: {value:.3f} x (goal {goal})")

    square = {row["M"]: row for row in rows if (row["O"], row["I"]) == SQUARE}
    for M, goal in GOALS.items():
        put(f"lut_gemm_over_bf16_m{M}", square[M]["over_bf16"], f">= {goal}")
    put("lut_gemm_over_bf16", min(row["over_bf16"] for row in rows), f">= {LEAST}")
    found = {M: row["over_humming"] for M, row in square.items() if "over_humming" in row}
    for M, value in found.items():
        put(f"lut_gemm_over_humming_m{M}", value, ">= 1.0")
    if found:
        put("lut_gemm_over_humming", min(found.values()), ">= 1.0")


if __name__ == "__main__":
    app()
