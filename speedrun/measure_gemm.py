"""How fast a batch is multiplied by packed weights, beside cuBLAS in bf16 and Humming, in one run.

First results are compared with float64 at odd shapes. Then tiles are tuned, the largest shape
first, until half of the seconds are gone, and written to the device's table. Then every shape and
number of vectors is timed: a graph of calls, each with another copy of the weight so that no cache
holds it, the median of its replays.

python speedrun/measure_gemm.py --out runs/gemm --seconds 120
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import figures
import torch
from torch import Tensor
from torch.nn import functional as F

from qat.bench.kernels.tune import compiling_only, write_entries
from qat.kernels.lut_gemm import (
    FORMED,
    ROWS,
    WIDTHS,
    GemmTile,
    Part,
    lut_gemm,
    stages_for,
    tile_for,
    width_for,
)
from qat.kernels.tuned import forcing, table_path
from qat.quant.weight import encode, packed_width, round_to_e5m3

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
ODD = ((37, 320), (333, 2624), (1056, 1088))
COLD_BYTES = 160 * 2**20
"""Of the copies that take turns: more than two of the largest caches hold."""
BITS, GROUP = 2, 16


def main() -> None:
    """Check, tune, time, and write rows, figures and the device's table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--no-tune", action="store_true", help="use the device's table as it is")
    arguments = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(0)
    print(f"checked {check()} products against float64")
    if not arguments.no_tune:
        tune(start, start + arguments.seconds / 2)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (arguments.out / "gemm.jsonl").open("w", encoding="utf-8") as file:
        for name, shape in SHAPES.items():
            for row in timed(name, shape, start + arguments.seconds):
                file.write(json.dumps(row) + "\n")
                rows.append(row)
    report(arguments.out / "figures.jsonl", rows)


CHECKS = (
    (2, torch.bfloat16, 16, torch.uint8),
    (2, torch.float16, 64, torch.float16),
    (3, torch.bfloat16, 32, torch.float32),
    (3, torch.float16, 16, torch.uint8),
    (4, torch.bfloat16, 16, torch.uint8),
    (4, torch.float16, 32, torch.float16),
)
"""Bits, dtype of vectors, group, dtype of scales."""
CHECK_TILES = (GemmTile(16, 4, 3, 4), GemmTile(64, 2, 1, 3), GemmTile(128, 8, 2, 3))


def check() -> int:
    """Compare with float64 at odd shapes, three matrices in one; how many were compared."""
    with compiling_only():
        for case in CHECKS:
            for tile in CHECK_TILES:
                excess(ODD[0], case, 1, tile)
    count = 0
    for shape, case, M, tile in product(ODD, CHECKS, (1, 7, 33, 200), CHECK_TILES):
        found = excess(shape, case, M, tile)
        if not found <= 0:
            raise SystemExit(f"{shape}, {case}, {M} vectors, {tile}: errs by {found:.3g} too much")
        count += 1
    return count


def excess(
    shape: tuple[int, int], case: tuple[int, torch.dtype, int, torch.dtype], M: int, tile: GemmTile
) -> float:
    """How much more than allowed a product errs at most: of its sum, and of one rounding."""
    (O, I), (bits, dtype, group, scale) = shape, case
    parts = [random_part(size, I, bits, group=group, scale=scale) for size in (O, 64, 40)]
    weight = torch.cat([part.formed(dtype) for part in parts]).double()
    x = torch.randn(M, I, device="cuda").to(dtype)
    bias = torch.randn(len(weight), device="cuda")
    with forcing("lut_gemm", (len(weight), I, bits, width_for(M)), tile):
        found = lut_gemm(x, parts, bias).double()
    exact = F.linear(x.double(), weight, bias.double())
    # tensor cores cut off what a sum of float32 has no room for
    allowed = 0.51 * torch.finfo(dtype).eps * exact.abs() + 5e-5 * exact.abs().max()
    return ((found - exact).abs() - allowed).max().item()


def random_part(
    O: int, I: int, bits: int, *, group: int = GROUP, scale: torch.dtype = torch.uint8
) -> Part:
    """A packed weight of random indices and scales."""
    octets = torch.randint(0, 256, (O, packed_width(I, bits)), dtype=torch.uint8, device="cuda")
    scales = 0.01 + 0.03 * torch.rand(O, I // group, device="cuda")
    codebook = torch.sort(torch.randn(2**bits, device="cuda")).values
    stored = encode(round_to_e5m3(scales)) if scale == torch.uint8 else scales.to(scale)
    return Part(octets, stored, codebook, bits)


def candidates(O: int, I: int, width: int) -> list[GemmTile]:
    """Tiles to try: the default, a formed weight, and programs that fill the device."""
    columns = (width,) if width < 128 else (64, 128)
    found = [tile_for(O, I, BITS, width), FORMED]
    if width > 128:
        found += [FORMED._replace(splits=slabs) for slabs in (2, 4, 8)]
    for each, warps in product(columns, (2, 4, 8) if width <= 16 else (4, 8)):
        spans, blocks = -(-I // 256), -(-O // (ROWS * warps)) * -(-width // each)
        splits = [s for s in range(1, min(spans, 16) + 1) if s == 1 or 96 <= blocks * s <= 560]
        # those that fill the last round of programs best
        rounds = {s: blocks * s / 132 / -(-blocks * s // 132) for s in splits}
        best = sorted(splits, key=rounds.__getitem__, reverse=True)[:4]
        for registers, split in product(caps(each), best):
            found.append(GemmTile(each, warps, split, stages_for(each), registers))
    return list(dict.fromkeys(found))


def caps(columns: int) -> tuple[int, ...]:
    """Limits of a thread's registers that are worth a try."""
    return {8: (0, 128), 16: (0, 128), 32: (0, 128), 64: (0, 168)}.get(columns, (0,))


def tune(start: float, end: float) -> None:
    """Write the fastest tile of each shape and width to the device's table, until `end`."""
    widths = [*WIDTHS, *(n for n in VECTORS if n > WIDTHS[-1] and n == width_for(n))]
    small, shape = random_part(256, 4096, BITS), (256, 4096, BITS)
    with compiling_only():
        for width in WIDTHS:
            x = torch.randn(width, 4096, device="cuda").bfloat16()
            for tile, splits in product(candidates(*SQUARE, width), (1, 2)):
                with forcing("lut_gemm", (*shape, width), tile._replace(splits=splits)):
                    lut_gemm(x, [small])
    print(f"compiled after {time.monotonic() - start:.0f} s")
    chosen: dict[tuple[str, tuple[int, ...]], tuple | None] = {}
    for O, I in SHAPES.values():
        parts = copies(lambda: random_part(O, I, BITS), O * I * 5 // 16)  # noqa: B023
        for width in widths:
            if time.monotonic() > end:
                break
            key = (O, I, BITS, width)
            x = torch.randn(width, I, device="cuda").bfloat16()
            exact = x.float() @ parts[0].formed(torch.float32).T
            times = {}
            for tile in candidates(O, I, width):
                with forcing("lut_gemm", key, tile):
                    found = lut_gemm(x, parts[:1]).float()
                    if not (found - exact).abs().max() <= 0.01 * exact.abs().max():
                        raise SystemExit(f"{key}: {tile} gives other results than float32")
                    times[tile] = seconds([lambda p=p: lut_gemm(x, [p]) for p in parts], 3)  # noqa: B023
            best = min(times, key=times.__getitem__)
            chosen["lut_gemm", key] = None if best == tile_for(*key) else best
            print(f"{key} {1e6 * times[best]:.1f} us {best}", flush=True)
    facts = {
        "device": torch.cuda.get_device_name(),
        "commit": figures.commit(),
        "torch": torch.__version__.partition("+")[0],
    }
    path = table_path(torch.cuda.get_device_name())
    write_entries(path, chosen, facts)
    print(f"tuned {len(chosen)} products after {time.monotonic() - start:.0f} s: {path}")


def copies(made: Callable[[], Any], num_bytes: int) -> list[Any]:
    """Enough of them that no cache holds all."""
    return [made() for _ in range(max(2, -(-COLD_BYTES // num_bytes)))]


def seconds(calls: Sequence[Callable[[], Tensor]], replays: int) -> float:
    """Of one call, the median over replays of a graph of all."""
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


def timed(name: str, shape: tuple[int, int], end: float) -> Iterator[dict[str, object]]:
    """A row for each number of vectors."""
    O, I = shape
    parts = copies(lambda: random_part(O, I, BITS), O * I * 5 // 16)
    dense = copies(lambda: torch.randn(O, I, device="cuda", dtype=torch.bfloat16), 2 * O * I)
    others = humming_layers(O, I) if shape == SQUARE else []
    for M in VECTORS:
        x = torch.randn(M, I, device="cuda").bfloat16()
        ours = seconds([lambda p=p: lut_gemm(x, [p]) for p in parts], 9)  # noqa: B023
        bf16 = seconds([lambda w=w: F.linear(x, w) for w in dense], 9)  # noqa: B023
        row = {"shape": name, "O": O, "I": I, "M": M, "ours_s": ours, "bf16_s": bf16}
        row["over_bf16"] = bf16 / ours
        if others and M in HUMMING_VECTORS and time.monotonic() < end:
            try:
                row["humming_s"] = seconds([lambda a=a: a(x) for a in others], 9)  # noqa: B023
            except (RuntimeError, OSError, AssertionError, ValueError) as error:
                print(f"humming does not run: {type(error).__name__}: {error}"[:500])
                others = []
            else:
                row["over_humming"] = row["humming_s"] / ours
        shown = {k: f"{1e6 * v:.1f} us" if k.endswith("_s") else v for k, v in row.items()}
        print("  ".join(f"{k} {v:.2f}" if type(v) is float else f"{v}" for k, v in shown.items()))
        yield row


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

    try:
        return copies(layer, O * I // 4)
    except (RuntimeError, OSError, AssertionError, ValueError) as error:
        print(f"humming does not run: {type(error).__name__}: {error}"[:500])
        return []


def report(path: Path, rows: list[dict[str, object]]) -> None:
    """The figures: each goal at 8192 x 8192, and the least of all."""
    square = {row["M"]: row for row in rows if (row["O"], row["I"]) == SQUARE}
    for M, goal in GOALS.items():
        put(path, f"lut_gemm_over_bf16_m{M}", square[M]["over_bf16"], f">= {goal}")
    put(path, "lut_gemm_over_bf16", min(row["over_bf16"] for row in rows), f">= {LEAST}")
    found = {M: row["over_humming"] for M, row in square.items() if "over_humming" in row}
    for M, value in found.items():
        put(path, f"lut_gemm_over_humming_m{M}", value, ">= 1.0")
    if found:
        put(path, "lut_gemm_over_humming", min(found.values()), ">= 1.0")


def put(path: Path, name: str, value: float, goal: str) -> None:
    """Append a figure and print it."""
    figures.record(path, name, round(value, 3), "x", goal, runs=9)
    print(f"{name}: {value:.3f} x (goal {goal})")


if __name__ == "__main__":
    main()
