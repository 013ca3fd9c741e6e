"""Traced graphs as jax functions, and steps made of them compiled for a TPU that is not there.

The one place where jax and torchax are imported; whoever imports this has the extra. jax computes
on the CPU; libtpu compiles for a TPU that is only described, and asks no network.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from qat.backend.before_torch import keep_libtpu_offline
from qat.bench.config import Topology
from qat.bench.tpu_plan.pieces import Traceable, aten
from qat.bench.tpu_plan.run import Compiled, check_installed, used_gib
from qat.data.packing import Batch
from qat.kernels.head import BLOCK_TOKENS
from qat.losses.formulas import Targets
from qat.process import GIB

check_installed()
keep_libtpu_offline()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchax's own
    import jax
    import torchax
    from jax import lax
    from jax import numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding
    from torchax import interop
    from torchax.ops import jaten  # noqa: F401  its operators first, or they replace ours
    from torchax.ops.ops_registry import register_torch_dispatch_op

jax.config.update("jax_platforms", "cpu")
# an eighth of the time, for a little more memory (docs/tpu.md, "How far to trust it")
jax.config.update("jax_optimization_level", "O0")

# Operators that torchax lacks, gets wrong, or lowers to what a TPU compiles for minutes.

SMALL_TABLE = 16
"""Entries of a codebook that are looked up by comparison: a gather or a sort costs a TPU more."""
DTYPES = {
    torch.float64: jnp.float32,
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.int64: jnp.int32,
    torch.int32: jnp.int32,
    torch.int16: jnp.int16,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
}
"""What a TPU holds a tensor in: 64 bits become 32."""


def take(table: jnp.ndarray, indices: jnp.ndarray) -> jnp.ndarray:
    """`table[indices]`, level by level."""
    found = jnp.broadcast_to(table[0], indices.shape)
    for level in range(1, table.shape[0]):
        found = jnp.where(indices == level, table[level], found)
    return found


def index_select(x: jnp.ndarray, dim: int, i: jnp.ndarray) -> jnp.ndarray:
    """`aten.index_select`."""
    return take(x, i) if _is_small(x) else jnp.take(x, i, axis=dim)


def index(x: jnp.ndarray, indices: Sequence[jnp.ndarray | None]) -> jnp.ndarray:
    """`aten.index`."""
    if _is_small(x) and len(indices) == 1:
        return take(x, indices[0])
    return x[tuple(slice(None) if i is None else i for i in indices)]


def bucketize(
    x: jnp.ndarray, edges: jnp.ndarray, *, out_int32: bool = False, right: bool = False
) -> jnp.ndarray:
    """`aten.bucketize`: how many edges lie below."""
    above = (x >= edge if right else x > edge for edge in edges)
    return sum((found.astype(jnp.int32) for found in above), jnp.zeros(x.shape, jnp.int32))


def sort(
    x: jnp.ndarray, *, stable: bool = True, dim: int = -1, descending: bool = False
) -> tuple[jnp.ndarray, jnp.ndarray]:
    """`aten.sort` of a codebook: every entry's rank, by comparison.

    Raises:
        NotImplementedError: it is no codebook.
    """
    if not _is_small(x) or descending:
        raise NotImplementedError("a sort of more than a codebook")
    i = jnp.arange(x.shape[0])
    before = (x[None] < x[:, None]) | ((x[None] == x[:, None]) & (i[None] < i[:, None]))
    is_here = before.sum(1)[None] == i[:, None]
    return jnp.where(is_here, x[None], 0).sum(1), jnp.where(is_here, i[None], 0).sum(1)


def scatter_add(x: jnp.ndarray, dim: int, i: jnp.ndarray, values: jnp.ndarray) -> jnp.ndarray:
    """`aten.scatter_add` along rows."""
    if x.shape[1] > SMALL_TABLE:
        return x.at[jnp.arange(x.shape[0])[:, None], i].add(values)
    parts = [jnp.where(i == level, values, 0).sum(1) for level in range(x.shape[1])]
    return x + jnp.stack(parts, 1)


def scatter_value(x: jnp.ndarray, dim: int, i: jnp.ndarray, value: float) -> jnp.ndarray:
    """`aten.scatter` of one value along rows, column after column of `i`."""
    places = jnp.arange(x.shape[1])[None]

    def mark(k: int, found: jnp.ndarray) -> jnp.ndarray:
        column = lax.dynamic_slice_in_dim(i, k, 1, axis=1)
        return jnp.where(places == column, jnp.asarray(value, x.dtype), found)

    return lax.fori_loop(0, i.shape[1], mark, x)


def bits_as(x: jnp.ndarray, dtype: torch.dtype) -> jnp.ndarray:
    """`aten.view` as another dtype of the same width."""
    return lax.bitcast_convert_type(x, DTYPES[dtype])


def teach_torchax() -> None:
    """Register all of these."""
    known = {
        torch.ops.qat.end_of_forward.default: lambda x: x,
        aten.bucketize.Tensor: bucketize,
        aten.index.Tensor: index,
        aten.index_select.default: index_select,
        aten.scatter.value: scatter_value,
        aten.scatter_add.default: scatter_add,
        aten.sort.stable: sort,
        aten.view.dtype: bits_as,
        aten.view_copy.dtype: bits_as,
        aten._foreach_mul.Tensor: lambda xs, factor: [x * factor for x in xs],
    }
    log = logging.getLogger()
    before, log.disabled = log.disabled, True  # it warns of names that it has already
    try:
        for operator, function in known.items():
            register_torch_dispatch_op(operator, function, is_jax_function=True)
    finally:
        log.disabled = before


def _is_small(table: jnp.ndarray) -> bool:
    return table.ndim == 1 and table.shape[0] <= SMALL_TABLE


teach_torchax()


def jax_function(graph: fx.GraphModule) -> Callable[[Sequence[object]], list[object]]:
    """A graph of `qat.bench.tpu_plan.pieces` as a function from jax arrays to jax arrays."""
    _prepare(graph)
    constants = {
        node.target: _value(getattr(graph, node.target))
        for node in graph.graph.nodes
        if node.op == "get_attr"
    }
    environment = torchax.default_env()

    def run(arrays: Sequence[object]) -> list[object]:
        with _narrowing(), environment:
            known = {name: interop.torch_view(jnp.asarray(v)) for name, v in constants.items()}
            inputs = [interop.torch_view(array) for array in arrays]
            found = _Interpreter(graph, known).run(*inputs)
            return [interop.jax_view(value) for value in found]

    return run


def shape_of(tensor: Tensor) -> jax.ShapeDtypeStruct:
    """What stands for a tensor while a step is compiled."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), DTYPES[tensor.dtype])


def compile_for(
    topology: Topology,
    step: Callable,
    shapes: tuple,
    *,
    donated: tuple[int, ...],
    memory_gib: float,
) -> Compiled:
    """Compile `step` for one chip of a TPU.

    Args:
        topology: what to compile for.
        step: takes trees of arrays.
        shapes: for each of its arguments a tree of `shape_of`.
        donated: numbers of the arguments whose memory the results may take.
        memory_gib: what the compiler may use; near it, it gives up speed for memory, as it does on
            a chip of that size.
    """
    bounds = topology.host_bounds
    chips = {} if bounds is None else {"chips_per_host_bounds": bounds}
    described = topologies.get_topology_desc(topology.described, platform="tpu", **chips)
    place = SingleDeviceSharding(described.devices[0])

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    lowered = jax.jit(step, donate_argnums=donated).lower(*jax.tree.map(placed, shapes))
    options = {"xla_tpu_max_hbm_size_mib": int(memory_gib * 1024)}
    began = perf_counter()
    try:
        memory = lowered.compile(compiler_options=options).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(None, used_gib(str(error)), perf_counter() - began)
    peak = memory.peak_memory_in_bytes / GIB
    return Compiled(peak, peak, perf_counter() - began)


class _Interpreter(fx.Interpreter):
    """Runs a graph operator by operator, with `constants` in the place of its attributes."""

    def __init__(self, graph: fx.GraphModule, constants: dict[str, Tensor]) -> None:
        super().__init__(graph)
        self._constants = constants

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> Tensor:
        return self._constants[target]


def _value(constant: Tensor) -> object:
    """A constant of the traced step; without values (it is a step count) it is 1."""
    return 1.0 if isinstance(constant, FakeTensor) else constant.tolist()


def _prepare(graph: fx.GraphModule) -> None:
    """Let torchax decide where things lie, and leave nothing that changes an input."""
    out_of_place = {aten.add_.Tensor: aten.add.Tensor, aten.copy_.default: aten.copy.default}
    for node in graph.graph.nodes:
        node.target = out_of_place.get(node.target, node.target)
        kept = {k: v for k, v in node.kwargs.items() if k not in ("pin_memory", "layout")}
        if "device" in kept:
            kept["device"] = torch.device("jax")
            if node.target is aten._to_copy.default:
                del kept["device"]
        node.kwargs = kept
    graph.graph.eliminate_dead_code()
    graph.recompile()


@contextmanager
def _narrowing() -> Iterator[None]:
    """Inside, jax says nothing when 64 bits become 32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
        yield


# The whole optimizer step in jax, from traced pieces: the layers are a loop, as is the head.
#
# Shapes: B sequences, S positions, T = B * S tokens, L layers.

Run = dict[str, Callable[[list], list]]
"""The pieces as jax functions, by name."""


@dataclass(frozen=True)
class Arguments:
    """What a step is called with, by argument: lists of tensors without values."""

    layers: list[Tensor]
    """Every tensor of a layer, for all layers: `(L, ...)`."""
    moments: list[Tensor]
    """Two of each tensor that learns, `(L, ...)`."""
    outside: list[Tensor]
    """Everything else of the model."""
    batch: list[Tensor]


class Inside(NamedTuple):
    """What a layer reads beside its hidden state."""

    context: list
    """What all layers share: mask and rotary tables."""
    formed: list
    tensors: list


def arguments(student: Traceable, batch_size: int) -> Arguments:
    """Arguments of a compiled step at `batch_size`."""
    L = len(student.layers)
    with student.fake:
        stacks = [t.detach().new_empty(L, *t.shape) for t in student.tensors]
        moments = [t.detach().new_empty(L, *t.shape) for t in student.learned for _ in range(2)]
    return Arguments(stacks, moments, student.outside, list(student.batch(batch_size)))


def build(student: Traceable, batch_size: int) -> Callable:
    """`step(layers, moments, outside, batch) -> losses, norm, layers, moments`, over jax arrays."""
    pieces = student.pieces(batch_size)
    run = {name: jax_function(graph) for name, graph in vars(pieces).items()}
    rows = student.rows(batch_size)
    recomputes = student.config.gradient_checkpointing
    layer = _Recomputing(run, rows, batch_size) if recomputes else _Keeping(run)
    num_formed = sum(linear.learns() for linear in student.linears)

    def gradients(layers: list, outside: list, batch: Batch) -> tuple[list, list]:
        formed = lax.map(run["form"], layers)
        ids, positions = batch.input_ids, batch.position_ids
        hidden, *context = run["prelude"]([*outside, ids, positions])

        def upwards(hidden: jax.Array, this: tuple) -> tuple:
            return layer.forward(hidden, Inside(context, *this))

        hidden, kept = lax.scan(upwards, hidden, (formed, layers))
        losses, g_hidden = _head(run["head"], outside, hidden, batch)

        def downwards(g_out: jax.Array, this: tuple) -> tuple:
            kept, formed, tensors = this
            inside = Inside(context, formed, tensors)
            g_hidden, *found = layer.backward(g_out, inside, kept)
            g_formed, g_plain = found[:num_formed], found[num_formed:]
            return g_hidden, [*run["pull_back"]([*tensors, *g_formed]), *g_plain]

        _, found = lax.scan(downwards, g_hidden, (kept, formed, layers), reverse=True)
        return losses, found

    def step(layers: list, moments: list, outside: list, batch: list) -> tuple:
        losses, found = gradients(layers, outside, Batch(*batch))
        norm, factor = _clip(found, student.settings.clip_grad_norm)
        places = student.learned_places
        moved = run["move"]([*(layers[n] for n in places), *moments, *found, factor])
        new = dict(zip(places, moved, strict=False))
        layers = [new.get(number, tensor) for number, tensor in enumerate(layers)]
        return losses, norm, layers, moved[len(places) :]

    return step


class _Keeping:
    """A layer that keeps what its backward reads."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def forward(self, hidden: jax.Array, inside: Inside) -> tuple:
        """The next hidden state, and what `backward` needs."""
        unread = jnp.zeros_like(hidden)
        out, *kept = self._run["forward"]([hidden, *_flat(inside), unread])
        return out, (hidden, kept)

    def backward(self, g_out: jax.Array, inside: Inside, kept: tuple) -> list:
        """The gradients of the hidden state, then of what learns."""
        hidden, saved = kept
        return self._run["backward"]([hidden, *_flat(inside), g_out, *saved])


class _Recomputing:
    """A layer that keeps its input alone, and goes through it `rows` sequences at a time."""

    def __init__(self, run: Run, rows: int, batch_size: int) -> None:
        self._run = run
        self._rows = rows
        self._batch = batch_size
        self._count = -(-batch_size // rows)

    def forward(self, hidden: jax.Array, inside: Inside) -> tuple:
        """The next hidden state, and what `backward` needs."""
        slices = self._slices((hidden, *inside.context))

        def one(this: tuple) -> jax.Array:
            part, *context = this
            here = _flat(inside._replace(context=self._whole(inside.context, context)))
            return self._run["forward"]([part, *here, jnp.zeros_like(part)])[0]

        return self._joined(lax.map(one, slices)), hidden

    def backward(self, g_out: jax.Array, inside: Inside, hidden: jax.Array) -> list:
        """The gradients of the hidden state, then of what learns."""
        slices = self._slices((hidden, g_out, *inside.context))

        def one(this: tuple) -> list:
            part, g_part, *context = this
            here = _flat(inside._replace(context=self._whole(inside.context, context)))
            # nothing of forward may be taken for this, nor this begin before the gradient is there
            given = lax.optimization_barrier([part, *here, g_part])
            return self._run["layer"](given)[1:]

        def add(total: list, this: tuple) -> tuple:
            g_hidden, *found = one(this)
            return [a + b for a, b in zip(total, found, strict=True)], g_hidden

        _, *shapes = jax.eval_shape(one, [x[0] for x in slices])
        zeros = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        total, g_hidden = lax.scan(add, zeros, slices)
        return [self._joined(g_hidden), *total]

    def _is_cut(self, x: jax.Array) -> bool:
        return x.ndim > 1 and x.shape[0] == self._batch

    def _slices(self, tensors: tuple) -> list:
        """Each tensor with a row a sequence as `(count, rows, ...)`, filled up with zeros."""
        missing = self._count * self._rows - self._batch
        found = []
        for x in filter(self._is_cut, tensors):
            padded = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
            found.append(padded.reshape(self._count, self._rows, *x.shape[1:]))
        return found

    def _whole(self, context: list, part: list) -> list:
        """The context of one slice."""
        left = iter(part)
        return [next(left) if self._is_cut(x) else x for x in context]

    def _joined(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])[: self._batch]


def _flat(inside: Inside) -> list:
    return [*inside.context, *inside.formed, *inside.tensors]


def _clip(gradients: list, most: float) -> tuple:
    """The norm of all gradients and what to multiply them by, as `Optimizer.step` has it."""
    norm = jnp.sqrt(sum(jnp.square(g.astype(jnp.float32)).sum() for g in gradients))
    factor = jnp.minimum(most / (norm + 1e-6), 1.0)
    return norm, jnp.where(jnp.isfinite(norm), factor, jnp.nan)


def _head(head: Callable, outside: list, hidden: jax.Array, batch: Batch) -> tuple:
    """The losses and the gradient of the last hidden state, a block of tokens at a time."""
    T, D = batch.mask.size, hidden.shape[-1]
    tokens = min(BLOCK_TOKENS, T)
    count = -(-T // tokens)
    valid = jnp.maximum(batch.mask.sum(), 1)

    def blocks(x: jax.Array) -> jax.Array:
        flat = x.reshape(T, *x.shape[2:])
        padded = jnp.pad(flat, [(0, count * tokens - T)] + [(0, 0)] * (flat.ndim - 1))
        return padded.reshape(count, tokens, *flat.shape[1:])

    def one(this: tuple) -> tuple:
        part, targets = this
        *losses, g_hidden = head([*outside, part[None], *targets, valid])
        return losses, g_hidden[0]

    targets = [blocks(getattr(batch, name)) for name in Targets._fields]
    losses, g_hidden = lax.map(one, (blocks(hidden), targets))
    return [part.sum() for part in losses], g_hidden.reshape(-1, D)[:T].reshape(hidden.shape)
