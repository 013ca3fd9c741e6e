"""Decoding with Native Sparse Attention against dense attention, at 65,536 positions, batch 1.

Bytes read are counted from the lists that the kernels read by; time is of whole layers' attention
with static caches, each token one recorded graph: the new key and value are written, and NSA also
pools and, once a tile, selects. Dense attention is the fastest of all ways to compute it. Before,
decoding is held against whole rows in float32, across every boundary.

python speedrun/research/measure_nsa_decode.py --figures FILE.jsonl
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from nsa_decode_bench import Bench, NSABench, Shape, seconds_of_tile
from research_records import record
from speed_case import Row, show
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.config import MeasureConfig
from qat.bench.student import random_model
from qat.kernels.dispatch import one_after_the_other
from qat.kernels.nsa.config import PRESETS, NSAConfig
from qat.kernels.nsa.decode import Past
from qat.kernels.nsa.reads import KeyReads, predicted
from qat.nn.swap import CACHE
from qat.nsa.swap import nsa_modules, swap_attention

READS_GOAL, SPEED_GOAL, DIFFERENCE_GOAL = 5.0, 2.0, 1e-5
HEADLINE = "nsa-shared"
CLOSE = 0.02
"""Farthest that two ways to compute the same in bfloat16 may be apart, of values of size 1."""
COLUMNS = (
    ("Attention", "case", "{}"),
    ("us a token", "token_us", "{:.2f}"),
    ("spread", "spread_us", "{:.2f}"),
    ("without choosing", "plain_us", "{}"),
    ("MB read", "mb", "{:.2f}"),
    ("GB/s", "gb_per_s", "{:,.0f}"),
    ("over dense", "over_dense", "{:.2f}"),
)
READ_COLUMNS = (
    ("Mode", "mode", "{}"),
    ("Keys read", "kind", "{}"),
    *((name, name, "{:,.1f}") for name in KeyReads._fields),
    ("Pairs", "pairs", "{:,.1f}"),
    ("Dense / NSA", "ratio", "{:.2f}"),
)
START = time.perf_counter()


def main() -> None:
    """Print the tables and record the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=2**16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="to try the script on a CPU")
    parser.add_argument("--figures", type=Path)
    asked = parser.parse_args()
    if asked.small:
        asked.length, asked.layers, asked.runs = 2048, 1, 2
    backend = select(asked.device)
    with torch.no_grad():
        difference = largest_difference(asked, backend)
        tell(f"decode_prefill_diff: {difference:.3g} (goal <= {DIFFERENCE_GOAL})")
        ratio, speedups = timed(asked, backend)
    speedup = statistics.median(speedups)
    tell(f"decode_reads_ratio_64k: {ratio:.2f} (goal >= {READS_GOAL})")
    tell(f"decode_speedup_64k: {speedup:.2f} (goal >= {SPEED_GOAL})")
    if asked.figures and not asked.small:
        to = asked.figures
        record(to, "decode_prefill_diff", difference, "logits", f"<= {DIFFERENCE_GOAL}")
        record(to, "decode_reads_ratio_64k", round(ratio, 3), "times", f">= {READS_GOAL}")
        record(
            to, "decode_speedup_64k", round(speedup, 3), "times", f">= {SPEED_GOAL}",
            runs=len(speedups), spread=round(statistics.stdev(speedups), 4),
        )  # fmt: skip


def tell(line: str) -> None:
    """Print with the time since the start."""
    print(f"[{time.perf_counter() - START:6.1f} s] {line}", flush=True)


def timed(asked: argparse.Namespace, backend: Backend) -> tuple[float, list[float]]:
    """How many times the bytes, and how many times the time, dense attention takes."""
    dtype = torch.bfloat16 if backend.records() else torch.float32
    shape = Shape(length=asked.length, layers=asked.layers, dtype=dtype)
    bench = Bench(shape, backend)
    seconds = {name: times(bench, run, asked) for name, run in dense_tokens(bench)}
    tell("dense attention is timed")
    rows = [row_of(name, found, shape.dense_bytes) for name, found in seconds.items()]
    best = min(seconds, key=lambda name: statistics.median(seconds[name]))
    ratios, speedups, reads = {}, {}, []
    for name in ("nsa-shared", "nsa-merged-shared"):
        sparse = NSABench(bench, PRESETS[name])
        compare(sparse)
        found, plain = sparse_times(sparse, asked)
        reads += read_rows(name, sparse)
        num_bytes = sparse.reads().num_bytes(shape.key_heads, shape.width, dtype.itemsize)
        row = row_of(name, found, num_bytes)
        rows.append({**row, "plain_us": f"{1e6 * statistics.median(plain):.2f}"})
        ratios[name] = shape.dense_bytes / num_bytes
        speedups[name] = [d / s for d, s in zip(seconds[best], found, strict=True)]
        tell(f"{name} is timed")
    for row in rows:
        row["over_dense"] = 1e6 * statistics.median(seconds[best]) / row["token_us"]
    show(reads, columns=READ_COLUMNS)
    show(rows, columns=COLUMNS)
    return ratios[HEADLINE], speedups[HEADLINE]


def dense_tokens(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    """What computes dense attention here, each checked against float32."""
    for name, attend in bench.dense_layers():
        bench.position.fill_(bench.shape.length - 1)
        try:
            found = attend(bench.caches[0])
        except RuntimeError as error:
            tell(f"{name}: {str(error).splitlines()[0]}")
            continue
        keys, values = bench.caches[0]
        exact = F.scaled_dot_product_attention(
            bench.query[:, :, None].float(), keys.float(), values.float(), enable_gqa=True
        )[:, :, 0]
        check(name, found, exact)
        yield name, bench.dense_token(attend)


def compare(sparse: NSABench) -> None:
    """The kernels against plain PyTorch in float64, on the same lists."""
    bench = sparse.bench
    bench.position.fill_(bench.shape.length - 1)
    found = sparse.attend(sparse.kept[0], is_leader=False)
    tensors = sparse.kept[0]
    wide = Past(*(t if t is None or t.dtype == torch.int32 else t.double() for t in tensors))
    check("nsa", found, sparse.read(bench.query.double(), wide))


def check(name: str, found: Tensor, exact: Tensor) -> None:
    """Nothing counts that computes something else."""
    error = (found.float() - exact.float()).abs().max().item()
    if error > CLOSE * exact.abs().max().item():
        raise SystemExit(f"{name} is off by {error:.3g}: no speed of its counts")


def times(
    bench: Bench,
    token: Callable[[], None],
    asked: argparse.Namespace,
    *,
    leader: Callable[[], None] | None = None,
) -> list[float]:
    """Seconds a token of every run; the first one is not counted."""
    count = 2 if asked.small else PRESETS[HEADLINE].select_tile
    return [seconds_of_tile(bench, token, count, leader) for _ in range(asked.runs + 1)][1:]


def sparse_times(sparse: NSABench, asked: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds a token with the choice of blocks once a tile, and without it."""
    token, leader = (sparse.token(is_leader=is_leader) for is_leader in (False, True))
    found = times(sparse.bench, token, asked, leader=leader)
    plain = times(sparse.bench, token, asked)
    with one_after_the_other():
        apart = times(sparse.bench, sparse.token(is_leader=False), asked)
    chosen = times(sparse.bench, leader, asked)
    tell(
        f"a token {1e6 * statistics.median(plain):.2f} us, without overlap of launches "
        f"{1e6 * statistics.median(apart):.2f} us, one that selects "
        f"{1e6 * statistics.median(chosen):.2f} us"
    )
    return found, plain


def row_of(name: str, seconds: list[float], num_bytes: float) -> Row:
    """One line of the table."""
    token_s = statistics.median(seconds)
    return {
        "case": name,
        "token_us": 1e6 * token_s,
        "spread_us": 1e6 * statistics.stdev(seconds),
        "plain_us": "",
        "mb": num_bytes / 1e6,
        "gb_per_s": num_bytes / token_s / 1e9,
    }


def read_rows(name: str, sparse: NSABench) -> Iterator[Row]:
    """Measured and predicted reads of the last token."""
    length = sparse.bench.shape.length
    both = {"measured": sparse.reads(), "predicted": predicted(length - 1, sparse.config)}
    for kind, reads in both.items():
        yield {
            "mode": name,
            "kind": kind,
            **reads._asdict(),
            "pairs": reads.pairs,
            "ratio": length / reads.pairs,
        }


def largest_difference(asked: argparse.Namespace, backend: Backend) -> float:
    """Of float32 logits token by token from those of whole rows, over all definitions."""
    found = 0.0
    for config, length in definitions(asked):
        model = random_model("tiny", MeasureConfig(device=str(backend.device))).float()
        swap_attention(model, config)
        for module in nsa_modules(model).values():  # attention that tells keys and branches apart
            for name, parameter in module.named_parameters():
                if "norm" not in name:
                    torch.nn.init.normal_(parameter, std=0.5 if "nsa" in name else 0.2)
        found = max(found, difference(model, config, length))
    return found


def definitions(asked: argparse.Namespace) -> Iterator[tuple[NSAConfig, int]]:
    """Configurations, and lengths beyond all their boundaries; kernels may round rows to TF32."""
    sizes = {"compress_block": 8, "compress_stride": 4, "select_block": 16, "num_selected": 4}
    sizes["backend"] = "reference"
    for mode in ("residual", "sigmoid", "merged"):
        for tile in (1, 16, 32):
            yield NSAConfig(**sizes, window=24, mode=mode, select_tile=tile), 150
    yield NSAConfig(**sizes, window=24, cmp_rope="pre", pooling="weighted", select_tile=16), 150
    if not asked.small:
        for name in ("nsa-shared", "nsa-merged-shared"):
            config = PRESETS[name].model_copy(update={"backend": "reference"})
            yield config, config.reach + 200


def difference(model: PreTrainedModel, config: NSAConfig, length: int) -> float:
    """Largest between logits of `length` tokens at once and of pieces that end at boundaries."""
    ids = torch.randint(500, (1, length), device=model.device)
    whole = model(ids).logits
    sizes = (
        config.compress_block, config.compress_stride, config.select_block, config.select_tile,
        config.window, config.reach,
    )  # fmt: skip
    found = 0.0
    for begin in sorted({1, *(size + by for size in sizes for by in (-1, 0))} - {0}):
        ends = [0, begin, *range(begin + 1, begin + 4)]
        if begin == 1:
            ends = [0, *range(1, length + 1)]
        cache = DynamicCache(config=model.config)
        pieces = [
            model(ids[:, start:end], **{CACHE: cache}).logits for start, end in pairwise(ends)
        ]
        told = torch.cat(pieces, 1)
        found = max(found, (told - whole[:, : told.shape[1]]).abs().max().item())
    return found


if __name__ == "__main__":
    main()
