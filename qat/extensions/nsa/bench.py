"""`qat bench attention`: dense and sparse attention in turns, over lengths and group sizes.

Shapes: B rows, H query heads, K key-value heads, S positions, D head width.
"""

import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product, takewhile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from qat.backend.base import Backend
from qat.backend.device import select
from qat.errors import ConfigError
from qat.extensions.bench.config import AttentionConfig, parse_sizes
from qat.extensions.bench.measure import Clock, Row, kernel_dtype, times
from qat.extensions.bench.results import Results, environment
from qat.extensions.nsa.kernels.config import PRESETS
from qat.extensions.nsa.kernels.router import TABLE, Threshold, threshold_key
from qat.extensions.nsa.variants import (
    Attend,
    Layer,
    Pass,
    Variant,
    Work,
    layer_of,
    sparse_variants,
)
from qat.kernels import tuned
from qat.process import is_out_of_memory

logger = logging.getLogger(__name__)


def call_of(attend: Attend, layer: Layer, which: Pass) -> Callable[[], object]:
    """Return one call: forward without gradients, or forward and backward of the whole layer."""
    if which != "train":

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(layer)

        return forward
    learned = [tensor for tensor in layer if tensor.requires_grad]
    slope = torch.randn_like(layer.query).transpose(1, 2)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(layer), learned, slope, allow_unused=True)

    return train


DENSE = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


def variants_of(which: Pass, presets: tuple[str, ...]) -> Iterator[Variant]:
    """Yield the dense variants, then the sparse ones: `dense cudnn`, ..., `nsa flex`, ..."""
    for name, kernel in DENSE.items():
        yield Variant(f"dense {name}", partial(_dense, kernel=kernel, is_causal=which != "decode"))
    yield from sparse_variants(which, presets)


def recorded(attend: Attend, layer: Layer, backend: Backend) -> Attend:
    """Capture `attend` of `layer` as a graph, as in generation; return it as is without a GPU."""
    if not backend.records:
        return attend
    with torch.no_grad():
        attend(layer)
        replay, out = backend.record(lambda: attend(layer))

    def run(_: Layer) -> Tensor:
        replay()
        return out

    return run


def _dense(layer: Layer, work: Work, *, kernel: SDPBackend, is_causal: bool) -> Attend:
    def attend(layer: Layer) -> Tensor:
        with sdpa_kernel(kernel):
            out = scaled_dot_product_attention(
                *layer[:3], is_causal=is_causal, enable_gqa=work.group > 1
            )
        return out.transpose(1, 2)

    return attend


SAMPLE_S = 40e-3
MOST_CALLS = 32
"""Seconds and most calls of one sample: enough calls in a row to hide the launch overhead."""


def run_attention(config: AttentionConfig, out: Path | None) -> tuple[Path, list[Row], list[Row]]:
    """Time every variant on every shape; a variant that cannot run has a row with the reason.

    Returns:
        The file of the results, the rows, and the `crossovers`.

    Raises:
        ConfigError: there is no such device or preset.
    """
    presets = tuple(config.attention.split(","))
    unknown = [name for name in presets if name not in PRESETS]
    if unknown:
        raise ConfigError(f"attention: {unknown[0]!r} is unknown; use any of {','.join(PRESETS)}")
    backend = select(config.device)
    clock = Clock(backend, config.repeats, config.limit_s)
    rows: list[Row] = []
    with Results(out, environment(backend, config)) as results:
        groups, lengths = parse_sizes(config.groups), parse_sizes(config.lengths)
        for group, length, which in product(groups, lengths, config.passes.split(",")):
            work = Work(length, group, config.key_heads, config.head_dim, config.batch_size)
            variants = variants_of(which, presets)
            for row in measured(variants, work, which, clock=clock):
                results.add(**row)
                rows.append(row)
        found = crossovers(rows)
        results.finish(crossovers=found)
        if config.tune:
            write_thresholds(rows, backend, results.environment)
    return results.path, rows, found


def measured(variants: Iterator[Variant], work: Work, which: Pass, *, clock: Clock) -> list[Row]:
    """Return a row per variant, timed in turns; `over_dense`: speedup over the best dense one."""
    logger.info("%s, S=%d, %d/%d heads", which, work.length, work.heads, work.key_heads)
    tried = [ready(variant, work, which, clock.backend) for variant in variants]
    able = [(row, sample) for row, sample in tried if sample is not None]
    turns = clock.turns([sample for _, sample in able])
    for (row, _), seconds in zip(able, turns, strict=True):
        row.update(times([second / row["calls"] for second in seconds]))
    dense = [row["p50_s"] for row, _ in able if row["is_dense"]]
    for row, _ in able:
        row["over_dense"] = min(dense) / row["p50_s"] if dense else None
    return [row for row, _ in tried]


def ready(
    variant: Variant, work: Work, which: Pass, backend: Backend
) -> tuple[Row, Callable[[], None] | None]:
    """Compile a variant and measure its memory.

    Returns:
        Its row, and a function that makes `row["calls"]` calls; None if the row says why not.
    """
    row: Row = {
        "kind": "attention",
        "case": f"{variant.name}, {which}, S={work.length}, {work.heads}/{work.key_heads}",
        "way": variant.name,
        "is_dense": variant.is_dense,
        "pass": which,
        "length": work.length,
        "heads": work.heads,
        "key_heads": work.key_heads,
        "width": work.width,
        "batch_size": work.batch,
        "dtype": kernel_dtype(backend),
    }
    backend.free_memory()
    dtype = backend.dtype(kernel_dtype(backend))
    try:
        began = time.perf_counter()
        layer = layer_of(work, which, device=backend.device, dtype=dtype)
        attend = variant.prepare(layer, work)
        if which == "decode":
            attend = recorded(attend, layer, backend)
        call = call_of(attend, layer, which)
        call()
        backend.synchronize()
        row["compile_s"] = time.perf_counter() - began
        row["peak_gib"] = _added_gib(call, backend)
        seconds = statistics.median(backend.seconds_of(call) for _ in range(3))
        if variant.problem is not None and which != "decode":
            with torch.set_grad_enabled(which == "train"):
                wrong = variant.problem(attend, layer)
            if wrong is not None:
                return {**row, "status": "WRONG", "reason": wrong}, None
    except (ConfigError, RuntimeError) as error:
        status = "OOM" if is_out_of_memory(error) else "UNSUPPORTED"
        reason = " ".join(str(error).split())
        return {**row, "status": status, "reason": reason[:200]}, None
    calls = max(1, min(MOST_CALLS, round(SAMPLE_S / seconds)))

    def sample() -> None:
        for _ in range(calls):
            call()

    return {**row, "status": "OK", "calls": calls}, sample


def crossovers(rows: Sequence[Row]) -> list[Row]:
    """Return the least length from which each sparse variant beats all dense ones, or None."""
    kinds: dict[tuple, list[Row]] = defaultdict(list)
    names = ("way", "pass", "heads", "key_heads")
    for row in rows:
        if row["status"] == "OK" and not row["is_dense"]:
            kinds[tuple(row[name] for name in names)].append(row)
    found = []
    for kind, timed in kinds.items():
        longest_first = sorted(timed, key=lambda row: -row["length"])
        paying = takewhile(lambda row: (row["over_dense"] or 0) > 1, longest_first)
        length = min((row["length"] for row in paying), default=None)
        found.append({**dict(zip(names, kind, strict=True)), "length": length})
    return found


def write_thresholds(rows: Sequence[Row], backend: Backend, facts: Row) -> None:
    """Write what `thresholds` finds into the device's table.

    Raises:
        ConfigError: no sparse kernel ran.
    """
    from qat.extensions.lab.kernels.run import TABLE_FACTS
    from qat.extensions.lab.kernels.tune import write_entries

    found = thresholds(rows)
    if not found:
        raise ConfigError(
            f"tune=True on {backend.name()}, where no sparse kernel ran with passes of train, "
            "expected a GPU; leave --tune out"
        )
    table = tuned.table_path(backend.name())
    write_entries(table, found, {name: facts[name] for name in TABLE_FACTS})


def thresholds(rows: Sequence[Row]) -> dict[tuple[str, tuned.Key], Threshold]:
    """Return by kernel and key up to which lengths dense attention, and `flex`, train fastest."""
    speeds: dict[tuned.Key, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        preset, _, way = row["way"].partition(" ")
        if way in {"flex", "gather"} and row["status"] == "OK" and row["pass"] == "train":
            key = threshold_key(PRESETS[preset], row["heads"] // row["key_heads"], row["width"])
            # without a dense kernel that runs, nothing is faster
            speeds[key][row["length"]][way] = row["over_dense"] or math.inf
    found = {}
    for key, by_length in speeds.items():
        dense = [length for length, ways in by_length.items() if max(ways.values()) <= 1]
        gathers = [n for n, way in by_length.items() if way.get("flex", 0) < way.get("gather", 0)]
        flex = [length for length in by_length if length < min(gathers, default=math.inf)]
        found[TABLE, key] = Threshold(max(dense, default=0), max(flex, default=0))
    return found


def _added_gib(call: Callable[[], object], backend: Backend) -> float | None:
    backend.reset_peak_memory()
    before = backend.memory_use().held_gib
    call()
    backend.synchronize()
    peak = backend.memory_use().peak_gib
    return None if peak is None or before is None else max(0.0, peak - before)
