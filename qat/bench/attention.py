"""`qat bench attention`: dense and sparse attention in turns, over lengths and group sizes.

Shapes: B rows, H query heads, K key-value heads, S positions, D head width.
"""

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.config import AttentionConfig, parse_sizes
from qat.bench.measure import Clock, Row, kernel_dtype, times
from qat.bench.results import Results, environment
from qat.errors import ConfigError
from qat.kernels.nsa import decode, reference, router
from qat.kernels.nsa.config import PRESETS, NSAConfig
from qat.kernels.nsa.select import Inputs, pool
from qat.kernels.nsa.select import select as select_blocks
from qat.nsa.attention import NUM_BRANCHES, squashed

logger = logging.getLogger(__name__)

Pass = Literal["forward", "train", "decode"]


class Work(NamedTuple):
    """How much there is to attend to."""

    length: int
    """S; in decode the positions so far, the new one included."""
    group: int
    """H / K."""
    key_heads: int
    width: int
    batch: int

    @property
    def heads(self) -> int:
        """H."""
        return self.group * self.key_heads


class Layer(NamedTuple):
    """What a layer hands its attention."""

    query: Tensor
    """`(B, H, S, D)`, rotated; one position in decode."""
    key: Tensor
    """`(B, K, S, D)`, rotated."""
    value: Tensor
    """`(B, K, S, D)`."""
    raw_gates: Tensor
    """`(B, S, H, 3)`, before they are squashed."""


Attend = Callable[[Layer], Tensor]
"""To `(B, S, H, D)`."""


def layer_of(work: Work, which: Pass, *, device: torch.device, dtype: torch.dtype) -> Layer:
    """Random heads, laid out as projections give them."""
    generator = torch.Generator(device).manual_seed(0)
    queries = 1 if which == "decode" else work.length

    def drawn(length: int, *shape: int) -> Tensor:
        size = (work.batch, length, *shape)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    layer = Layer(
        drawn(queries, work.heads, work.width).transpose(1, 2),
        drawn(work.length, work.key_heads, work.width).transpose(1, 2),
        drawn(work.length, work.key_heads, work.width).transpose(1, 2),
        drawn(queries, work.heads, NUM_BRANCHES),
    )
    return Layer(*(tensor.requires_grad_(which == "train") for tensor in layer))


def inputs_of(layer: Layer, config: NSAConfig) -> Inputs:
    """With pooled keys and gates made."""
    pooled_value = gates = None
    if config.mode != "merged":
        pooled_value, gates = pool(layer.value, config), squashed(layer.raw_gates, config)
    pooled_key = pool(layer.key, config)
    scale = layer.query.shape[-1] ** -0.5
    return Inputs(layer.query, layer.key, layer.value, pooled_key, pooled_value, gates, None, scale)


def call_of(attend: Attend, layer: Layer, which: Pass) -> Callable[[], object]:
    """One call: without gradients, or forward and backward for gradients of the whole layer."""
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
BACKENDS = ("reference", "flex", "gather", "fla")


class Way(NamedTuple):
    """A way to attend, and what makes it ready for one layer."""

    name: str
    config: NSAConfig | None
    """What is computed; None: dense attention."""
    prepare: Callable[[Layer, Work], Attend]
    """Raises ConfigError or RuntimeError where it cannot."""

    @property
    def is_dense(self) -> bool:
        """Whether every key of the past is read."""
        return self.config is None


def ways_of(which: Pass, presets: tuple[str, ...]) -> Iterator[Way]:
    """Dense ones first, each by its own name: `dense cudnn`, ..., `nsa flex`, ..."""
    for name, kernel in DENSE.items():
        dense = partial(_dense, kernel=kernel, is_causal=which != "decode")
        yield Way(f"dense {name}", None, dense)
    for preset in presets:
        config = PRESETS[preset]
        if which == "decode":
            yield Way(f"{preset} decode", config, partial(_decoding, config=config))
            continue
        for backend in BACKENDS:
            by_backend = config.model_copy(update={"backend": backend})
            yield Way(f"{preset} {backend}", by_backend, partial(_sparse, config=by_backend))


def recorded(attend: Attend, layer: Layer, backend: Backend) -> Attend:
    """`attend` of `layer` as one graph, as a generating model runs it; itself without a GPU."""
    if not backend.records():
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


def _sparse(layer: Layer, work: Work, *, config: NSAConfig) -> Attend:
    device = layer.query.device
    route = router.choose(
        config, length=work.length, group=work.group, head_dim=work.width, device=device
    )

    def attend(layer: Layer) -> Tensor:
        return router.attend(inputs_of(layer, config), config, route)

    if route.backend not in ("flex", "gather"):
        return attend
    return torch.compile(attend, fullgraph=True, dynamic=False)


def _decoding(layer: Layer, work: Work, *, config: NSAConfig) -> Attend:
    """A step inside a tile, or one that is a tile: it keeps its key and value, and attends."""
    kept = decode.Past.empty(layer.key, work.length, config)
    inputs = inputs_of(layer._replace(query=layer.key.repeat_interleave(work.group, 1)), config)
    decode.fill(kept, inputs, select_blocks(inputs, config), config)
    position = torch.full((work.batch,), work.length - 1, device=layer.key.device)
    key, value = layer.key[:, :, -1], layer.value[:, :, -1]
    gates = None if inputs.gates is None else inputs.gates[:, 0]

    def attend(layer: Layer) -> Tensor:
        decode.append(kept, key, value, position, config=config)
        query, how = layer.query[:, :, 0], {"config": config, "scale": inputs.scale}
        if config.select_tile == 1:
            decode.choose(query, kept, position, **how)
        return decode.attend(query, kept, position, gates=gates, **how)[:, None]

    return attend


# Whether what is timed is sparse attention: a corner of it against the reference.
#
# The past alone counts, and heads do not meet, so that the reference need not see all of either.

BEYOND, KEY_HEADS = 512, 2
"""Positions behind the reach of the selection, and key-value heads, that are compared."""
CLOSE = 0.05
"""Farthest that a head's output may be from the reference's, of its norm, in any dtype."""
MOST_WITHIN, MOST_BEYOND = 0.01, 0.5
"""Shares that may be further away: within the reach of the selection, and beyond it, where near
ties may be rounded apart and another block change the output of a tile."""


def problem(attend: Attend, layer: Layer, config: NSAConfig) -> str | None:
    """What `attend` computes instead; None: `config`, as far as the first positions tell.

    Call it as the way is timed, with gradients or without: what is compiled depends on that.
    """
    found = attend(layer).detach()
    with torch.no_grad():
        expected = _corner(layer, config)
        _, length, heads, _ = expected.shape
        distance = (found[:, :length, :heads].float() - expected).norm(dim=-1)
        far = (distance / expected.norm(dim=-1)).nan_to_num(nan=torch.inf) > CLOSE
    for part, most, where in (
        (far[:, : config.reach], MOST_WITHIN, f"the first {config.reach} positions"),
        (far[:, config.reach :], MOST_BEYOND, f"those up to {far.shape[1]}"),
    ):
        share = part.float().mean().item() if part.numel() else 0.0
        if share > most:
            return (
                f"computes something else: {share:.0%} of {where} are far from what the reference "
                "says; nothing of it is timed"
            )
    return None


def _corner(layer: Layer, config: NSAConfig) -> Tensor:
    """`(B, length, heads, D)` float32: the reference's first positions and heads, of the blocks
    that the layer's own dtype selects."""
    length = config.reach + BEYOND
    key, value = (tensor[:, :KEY_HEADS, :length] for tensor in (layer.key, layer.value))
    heads = key.shape[1] * (layer.query.shape[1] // layer.key.shape[1])
    query, gates = layer.query[:, :heads, :length], layer.raw_gates[:, :length, :heads]
    inputs = inputs_of(Layer(query, key, value, gates), config)
    selection = select_blocks(inputs, config)
    names = ("query", "key", "value", "pooled_key", "pooled_value", "gates")
    wide = {n: t.float() for n in names if (t := getattr(inputs, n)) is not None}
    return reference.attend(inputs._replace(**wide), selection, config)


SAMPLE_S = 40e-3
MOST_CALLS = 32
"""A sample is of so many calls in a row that the host's launches do not show."""


class Ready(NamedTuple):
    """A way that ran once."""

    row: Row
    sample: Callable[[], None]
    """As many calls as the row says."""


@dataclass(frozen=True)
class AttentionReport:
    """What was measured, for whoever shows it."""

    path: Path
    rows: list[Row]
    crossovers: list[Row]


def run_attention(config: AttentionConfig, out: Path | None) -> AttentionReport:
    """Time every way on every shape; what cannot run has a row that says why.

    Raises:
        ConfigError: no such device or preset.
    """
    backend = select(config.device)
    clock = Clock(backend, config.repeats, config.limit_s)
    rows: list[Row] = []
    with Results(out, environment(backend, config)) as results:
        groups, lengths = parse_sizes(config.groups), parse_sizes(config.lengths)
        for group, length, which in product(groups, lengths, config.passes.split(",")):
            work = Work(length, group, config.key_heads, config.head_dim, config.batch_size)
            ways = ways_of(which, tuple(config.attention.split(",")))
            for row in measured(ways, work, which, clock=clock):
                results.add(**row)
                rows.append(row)
        found = crossovers(rows)
        results.finish(crossovers=found)
    return AttentionReport(results.path, rows, found)


def measured(ways: Iterator[Way], work: Work, which: Pass, *, clock: Clock) -> list[Row]:
    """A row for each way, those that can run in turns; `over_dense` against the best dense one."""
    logger.info("%s, S=%d, %d/%d heads", which, work.length, work.heads, work.key_heads)
    tried = [ready(way, work, which, clock.backend) for way in ways]
    able = [each for each in tried if isinstance(each, Ready)]
    turns = clock.turns([each.sample for each in able])
    for each, seconds in zip(able, turns, strict=True):
        each.row.update(times([second / each.row["calls"] for second in seconds]))
    dense = [each.row["p50_s"] for each in able if each.row["is_dense"]]
    for each in able:
        each.row["over_dense"] = min(dense) / each.row["p50_s"] if dense else None
    return [each.row if isinstance(each, Ready) else each for each in tried]


def ready(way: Way, work: Work, which: Pass, backend: Backend) -> Ready | Row:
    """A way after its first calls, whose compiling and memory the row tells; or why not."""
    row: Row = {
        "kind": "attention",
        "case": f"{way.name}, {which}, S={work.length}, {work.heads}/{work.key_heads}",
        "way": way.name,
        "is_dense": way.is_dense,
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
        attend = way.prepare(layer, work)
        if which == "decode":
            attend = recorded(attend, layer, backend)
        call = call_of(attend, layer, which)
        call()
        backend.synchronize()
        row["compile_s"] = time.perf_counter() - began
        row["peak_gib"] = _added_gib(call, backend)
        seconds = statistics.median(backend.seconds_of(call) for _ in range(3))
        if way.config is not None and which != "decode":
            with torch.set_grad_enabled(which == "train"):
                wrong = problem(attend, layer, way.config)
            if wrong is not None:
                return {**row, "status": "WRONG", "reason": wrong}
    except (ConfigError, RuntimeError) as error:
        status = "OOM" if backend.is_out_of_memory(error) else "UNSUPPORTED"
        reason = " ".join(str(error).split())
        return {**row, "status": status, "reason": reason[:200]}
    calls = max(1, min(MOST_CALLS, round(SAMPLE_S / seconds)))

    def sample() -> None:
        for _ in range(calls):
            call()

    return Ready({**row, "status": "OK", "calls": calls}, sample)


def crossovers(rows: Sequence[Row]) -> list[Row]:
    """For each sparse way the least length from which on it beats every dense one; None: never."""
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


def _added_gib(call: Callable[[], object], backend: Backend) -> float | None:
    """What one call holds at most beyond what is held before it."""
    backend.reset_peak_memory()
    before = backend.held_memory_gib()
    call()
    backend.synchronize()
    peak = backend.peak_memory_gib()
    return None if peak is None or before is None else max(0.0, peak - before)
