"""`qat bench attention`: dense and sparse attention in turns, over lengths and group sizes."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.config import AttentionConfig, parse_sizes
from qat.bench.measure import Clock, Row, times
from qat.bench.results import Results, environment
from qat.errors import ConfigError
from qat.kernels.nsa import decode, reference, router
from qat.kernels.nsa.config import PRESETS, NSAConfig
from qat.kernels.nsa.select import Inputs, pool
from qat.kernels.nsa.select import select as select_blocks
from qat.nsa.attention import NUM_BRANCHES, squashed

# The ways to attend that are timed against one another: PyTorch's dense ones, and sparse ones.

# One layer's attention as it is timed: tensors as a model has them, and one call of each kind.
#
# Shapes: B rows, H query heads, K key-value heads, S positions, D head width.

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
        yield Way(f"dense {name}", None, _dense(kernel, is_causal=which != "decode"))
    for preset in presets:
        if which == "decode":
            yield Way(f"{preset} decode", PRESETS[preset], _decoding(PRESETS[preset]))
            continue
        for backend in BACKENDS:
            config = PRESETS[preset].model_copy(update={"backend": backend})
            yield Way(f"{preset} {backend}", config, _sparse(config))


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


def _dense(kernel: SDPBackend, *, is_causal: bool) -> Callable[[Layer, Work], Attend]:
    def prepare(layer: Layer, work: Work) -> Attend:
        def attend(layer: Layer) -> Tensor:
            with sdpa_kernel(kernel):
                out = scaled_dot_product_attention(
                    *layer[:3], is_causal=is_causal, enable_gqa=work.group > 1
                )
            return out.transpose(1, 2)

        return attend

    return prepare


def _sparse(config: NSAConfig) -> Callable[[Layer, Work], Attend]:
    def prepare(layer: Layer, work: Work) -> Attend:
        device = layer.query.device
        route = router.choose(
            config, length=work.length, group=work.group, head_dim=work.width, device=device
        )

        def attend(layer: Layer) -> Tensor:
            return router.attend(inputs_of(layer, config), config, route)

        if route.backend not in ("flex", "gather"):
            return attend
        return torch.compile(attend, fullgraph=True, dynamic=False)

    return prepare


def _decoding(config: NSAConfig) -> Callable[[Layer, Work], Attend]:
    """A step inside a tile, or one that is a tile: it keeps its key and value, and attends."""

    def prepare(layer: Layer, work: Work) -> Attend:
        kept = decode.Past.empty(layer.key, work.length, config)
        whole = layer._replace(query=layer.key.repeat_interleave(work.group, 1))
        inputs = inputs_of(whole, config)
        decode.fill(kept, inputs, select_blocks(inputs, config), config)
        position = torch.full((work.batch,), work.length - 1, device=layer.key.device)
        key, value = layer.key[:, :, -1], layer.value[:, :, -1]
        gates = None if inputs.gates is None else inputs.gates[:, 0]

        def attend(layer: Layer) -> Tensor:
            decode.append(kept, key, value, position, config=config)
            if config.select_tile == 1:
                query = layer.query[:, :, 0]
                decode.choose(query, kept, position, config=config, scale=inputs.scale)
            out = decode.attend(
                layer.query[:, :, 0],
                kept,
                position,
                gates=gates,
                config=config,
                scale=inputs.scale,
            )
            return out[:, None]

        return attend

    return prepare


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
        far = _distance(found[:, :length, :heads].float(), expected) > CLOSE
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


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """`(B, S, H)`, of the norm of what is expected; NaN counts as far away."""
    distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return distance.nan_to_num(nan=torch.inf)


logger = logging.getLogger(__name__)

SAMPLE_S = 40e-3
MOST_CALLS = 32
"""A sample is of so many calls in a row that the host's launches do not show."""


class Ready(NamedTuple):
    """A way that ran once."""

    row: Row
    call: Callable[[], object]
    calls: int
    """In one sample."""


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
        for work, which in cases_of(config):
            ways = ways_of(which, tuple(config.attention.split(",")))
            for row in measured(ways, work, which, clock=clock):
                results.add(**row)
                rows.append(row)
        found = crossovers(rows)
        results.finish(crossovers=found)
    return AttentionReport(results.path, rows, found)


def cases_of(config: AttentionConfig) -> Iterator[tuple[Work, Pass]]:
    """Every shape in every pass."""
    for group in parse_sizes(config.groups):
        for length in parse_sizes(config.lengths):
            work = Work(length, group, config.key_heads, config.head_dim, config.batch_size)
            for which in config.passes.split(","):
                yield work, which


def measured(ways: Iterator[Way], work: Work, which: Pass, *, clock: Clock) -> list[Row]:
    """A row for each way, those that can run in turns; `over_dense` against the best dense one."""
    logger.info("%s, S=%d, %d/%d heads", which, work.length, work.heads, work.key_heads)
    tried = [ready(way, work, which, clock.backend) for way in ways]
    able = [each for each in tried if isinstance(each, Ready)]
    turns = clock.turns([_repeated(each) for each in able])
    for each, seconds in zip(able, turns, strict=True):
        each.row.update(times([second / each.calls for second in seconds]))
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
        "dtype": dtype_on(backend),
    }
    backend.free_memory()
    dtype = backend.dtype(dtype_on(backend))
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
        seconds = _seconds(call, backend)
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
    return Ready({**row, "status": "OK", "calls": calls}, call, calls)


def crossovers(rows: Sequence[Row]) -> list[Row]:
    """For each sparse way the least length from which on it beats every dense one; None: never."""
    found = []
    timed = [row for row in rows if row["status"] == "OK" and not row["is_dense"]]
    kinds = dict.fromkeys(
        (row["way"], row["pass"], row["heads"], row["key_heads"]) for row in timed
    )
    for kind in kinds:
        way, which, heads, key_heads = kind
        of_kind = [
            row
            for row in timed
            if (row["way"], row["pass"], row["heads"], row["key_heads"]) == kind
        ]
        length = None
        for row in sorted(of_kind, key=lambda row: -row["length"]):
            if row["over_dense"] is None or row["over_dense"] <= 1:
                break
            length = row["length"]
        found.append(
            {"way": way, "pass": which, "heads": heads, "key_heads": key_heads, "length": length}
        )
    return found


def dtype_on(backend: Backend) -> str:
    """bf16 on a GPU, fp32 elsewhere."""
    return "bf16" if backend.records() else "fp32"


def _repeated(each: Ready) -> Callable[[], None]:
    def run() -> None:
        for _ in range(each.calls):
            each.call()

    return run


def _seconds(call: Callable[[], object], backend: Backend) -> float:
    """Seconds of one call: the median of three."""
    found = []
    for _ in range(3):
        first = backend.mark()
        call()
        found.append(backend.seconds_between(first, backend.mark()))
    return statistics.median(found)


def _added_gib(call: Callable[[], object], backend: Backend) -> float | None:
    """What one call holds at most beyond what is held before it."""
    backend.reset_peak_memory()
    before = backend.held_memory_gib()
    call()
    backend.synchronize()
    peak = backend.peak_memory_gib()
    return None if peak is None or before is None else max(0.0, peak - before)
