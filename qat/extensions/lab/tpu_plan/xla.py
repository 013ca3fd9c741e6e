"""The whole optimizer step in jax, built from traced graphs and compiled for an absent TPU.

This is the only module that imports jax and torchax, so importing it requires the extra. jax
computes on the CPU; libtpu compiles for a TPU described by its topology, without network access.

Shapes: B sequences, S positions, T = B * S tokens, L layers.
"""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from qat.data.packing import Batch
from qat.extensions.lab.tpu_plan.pieces import Compiled, Traceable, aten, check_installed, used_gib
from qat.extensions.lab.tpu_plan.topologies import Topology
from qat.kernels.head import BLOCK_TOKENS
from qat.losses.formulas import Targets
from qat.process import GIB

check_installed()
# keep libtpu from looking for a TPU when it loads: no metadata server, no lock on a chip
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # several plans may run at the same time
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchax's own warnings
    import jax
    import torchax
    from jax import lax
    from jax import numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding
    from torchax import interop
    from torchax.ops import jaten  # noqa: F401  its operators first, or they would replace ours
    from torchax.ops.ops_registry import register_torch_dispatch_op

jax.config.update("jax_platforms", "cpu")
# an eighth of the compile time, for slightly more memory (qat/extensions/xla/README.md, "How far to
# trust it")
jax.config.update("jax_optimization_level", "O0")

# Operators that torchax lacks, gets wrong, or lowers to code that compiles for minutes on a TPU.

SMALL_TABLE = 16
"""Largest codebook that is looked up by comparison: a gather or a sort is slower on a TPU."""
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
"""The dtype that a TPU stores for each tensor dtype: 64 bits become 32."""


def _is_small(table: jax.Array) -> bool:
    return table.ndim == 1 and table.shape[0] <= SMALL_TABLE


def take(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Return `table[indices]`, computed level by level."""
    found = jnp.broadcast_to(table[0], indices.shape)
    for level in range(1, table.shape[0]):
        found = jnp.where(indices == level, table[level], found)
    return found


def index_select(x: jax.Array, dim: int, i: jax.Array) -> jax.Array:
    """Implement `aten.index_select`."""
    return take(x, i) if _is_small(x) else jnp.take(x, i, axis=dim)


def index(x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    """Implement `aten.index`."""
    if _is_small(x) and len(indices) == 1:
        return take(x, indices[0])
    return x[tuple(slice(None) if i is None else i for i in indices)]


def bucketize(
    x: jax.Array, edges: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    """Implement `aten.bucketize`: count the edges below."""
    above = (x >= edge if right else x > edge for edge in edges)
    return sum((found.astype(jnp.int32) for found in above), jnp.zeros(x.shape, jnp.int32))


def sort(
    x: jax.Array, *, stable: bool = True, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Implement `aten.sort` for a codebook: compute every entry's rank by comparison.

    Raises:
        NotImplementedError: it is not a codebook.
    """
    if not _is_small(x) or descending:
        raise NotImplementedError("a sort of more than a codebook")
    i = jnp.arange(x.shape[0])
    before = (x[None] < x[:, None]) | ((x[None] == x[:, None]) & (i[None] < i[:, None]))
    is_here = before.sum(1)[None] == i[:, None]
    return jnp.where(is_here, x[None], 0).sum(1), jnp.where(is_here, i[None], 0).sum(1)


def scatter_add(x: jax.Array, dim: int, i: jax.Array, values: jax.Array) -> jax.Array:
    """Implement `aten.scatter_add` along rows."""
    if x.shape[1] > SMALL_TABLE:
        return x.at[jnp.arange(x.shape[0])[:, None], i].add(values)
    parts = [jnp.where(i == level, values, 0).sum(1) for level in range(x.shape[1])]
    return x + jnp.stack(parts, 1)


def scatter_value(x: jax.Array, dim: int, i: jax.Array, value: float) -> jax.Array:
    """Implement `aten.scatter` of one value along rows, one column of `i` after the other."""
    places = jnp.arange(x.shape[1])[None]

    def mark(k: int, found: jax.Array) -> jax.Array:
        column = lax.dynamic_slice_in_dim(i, k, 1, axis=1)
        return jnp.where(places == column, jnp.asarray(value, x.dtype), found)

    return lax.fori_loop(0, i.shape[1], mark, x)


OPERATORS = {
    torch.ops.qat.end_of_forward.default: lambda x: x,
    aten.bucketize.Tensor: bucketize,
    aten.index.Tensor: index,
    aten.index_select.default: index_select,
    aten.scatter.value: scatter_value,
    aten.scatter_add.default: scatter_add,
    aten.sort.stable: sort,
    # a view as another dtype of the same width
    aten.view.dtype: lambda x, dtype: lax.bitcast_convert_type(x, DTYPES[dtype]),
    aten.view_copy.dtype: lambda x, dtype: lax.bitcast_convert_type(x, DTYPES[dtype]),
    aten._foreach_mul.Tensor: lambda xs, factor: [x * factor for x in xs],
}
log = logging.getLogger()
was_disabled, log.disabled = log.disabled, True  # torchax warns of known names
try:
    for operator, function in OPERATORS.items():
        register_torch_dispatch_op(operator, function, is_jax_function=True)
finally:
    log.disabled = was_disabled


def jax_function(graph: fx.GraphModule) -> Callable[[Sequence[object]], list[object]]:
    """Return a graph of `qat.extensions.lab.tpu_plan.pieces` as a function of jax arrays."""
    _prepare(graph)
    constants = {
        node.target: _value(getattr(graph, node.target))
        for node in graph.graph.nodes
        if node.op == "get_attr"
    }
    environment = torchax.default_env()

    def run(arrays: Sequence[object]) -> list[object]:
        with warnings.catch_warnings(), environment:
            # jax warns each time that 64 bits become 32
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
            known = {name: interop.torch_view(jnp.asarray(v)) for name, v in constants.items()}
            inputs = [interop.torch_view(array) for array in arrays]
            found = _Interpreter(graph, known).run(*inputs)
            return [interop.jax_view(value) for value in found]

    return run


class _Interpreter(fx.Interpreter):
    """Runs a graph operator by operator, with `constants` in place of its attributes."""

    def __init__(self, graph: fx.GraphModule, constants: dict[str, Tensor]) -> None:
        super().__init__(graph)
        self._constants = constants

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> Tensor:
        return self._constants[target]


def _value(constant: Tensor) -> object:
    """Return the value of a traced constant; 1 if it has no value (it is a step count)."""
    return 1.0 if isinstance(constant, FakeTensor) else constant.tolist()


def _prepare(graph: fx.GraphModule) -> None:
    """Leave device placement to torchax, and replace operators that modify their inputs."""
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


Run = dict[str, Callable[[list], list]]  # the pieces as jax functions, by name


def compile_step(
    student: Traceable, batch_size: int, topology: Topology, memory_gib: float
) -> Compiled:
    """Compile the whole step at `batch_size` for one chip of a TPU.

    The compiler may use `memory_gib`; near that limit it trades speed for memory, as it does on a
    chip of that size.
    """
    step, L = build(student, batch_size), len(student.layers)
    bounds = topology.host_bounds
    chips = {} if bounds is None else {"chips_per_host_bounds": bounds}
    described = topologies.get_topology_desc(topology.described, platform="tpu", **chips)
    place = SingleDeviceSharding(described.devices[0])

    def shape_of(tensor: Tensor, *stacked: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*stacked, *tensor.shape), DTYPES[tensor.dtype], sharding=place)

    arguments = (
        [shape_of(tensor, L) for tensor in student.tensors],
        [shape_of(tensor, L) for tensor in student.learned for _ in range(2)],
        [shape_of(tensor) for tensor in student.outside],
        [shape_of(tensor) for tensor in student.batch(batch_size)],
    )
    # donate layers and moments, whose buffers the results reuse
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments)
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


def build(student: Traceable, batch_size: int) -> Callable:
    """Return `step(layers, moments, outside, batch) -> losses, norm, layers, moments` in jax.

    `layers` are the tensors of a layer, stacked over layers `(L, ...)`; `moments` two for each
    learned tensor, `(L, ...)`; `outside` all other tensors of the model.
    """
    run = {name: jax_function(graph) for name, graph in vars(student.pieces(batch_size)).items()}
    recomputes = student.config.gradient_checkpointing
    rows = student.rows(batch_size)
    layer = _RecomputingLayer(run, rows, batch_size) if recomputes else _SavingLayer(run)
    num_formed = sum(linear.learns() for linear in student.linears)

    def gradients(layers: list, outside: list, batch: Batch) -> tuple[list, list]:
        formed = lax.map(run["form"], layers)
        ids, positions = batch.input_ids, batch.position_ids
        hidden, *context = run["prelude"]([*outside, ids, positions])

        def upwards(hidden: jax.Array, this: tuple) -> tuple:
            formed, tensors = this
            return layer.forward(hidden, context, [*formed, *tensors])

        hidden, kept = lax.scan(upwards, hidden, (formed, layers))
        losses, g_hidden = _head(run["head"], outside, hidden, batch)

        def downwards(g_out: jax.Array, this: tuple) -> tuple:
            kept, formed, tensors = this
            g_hidden, *found = layer.backward(g_out, context, [*formed, *tensors], kept)
            g_formed, g_plain = found[:num_formed], found[num_formed:]
            return g_hidden, [*run["pull_back"]([*tensors, *g_formed]), *g_plain]

        _, found = lax.scan(downwards, g_hidden, (kept, formed, layers), reverse=True)
        return losses, found

    def step(layers: list, moments: list, outside: list, batch: list) -> tuple:
        losses, found = gradients(layers, outside, Batch(*batch))
        # the norm of all gradients and their clipping factor, as in `Optimizer.step`
        norm = jnp.sqrt(sum(jnp.square(g.astype(jnp.float32)).sum() for g in found))
        factor = jnp.minimum(student.settings.clip_grad_norm / (norm + 1e-6), 1.0)
        factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
        places = student.learned_places
        moved = run["move"]([*(layers[n] for n in places), *moments, *found, factor])
        new = dict(zip(places, moved, strict=False))
        layers = [new.get(number, tensor) for number, tensor in enumerate(layers)]
        return losses, norm, layers, moved[len(places) :]

    return step


class _SavingLayer:
    """A layer that saves the activations that its backward reads.

    `context` is shared by all layers: mask and rotary tables. `own` holds the layer's formed
    weights, then its tensors.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def forward(self, hidden: jax.Array, context: list, own: list) -> tuple:
        """Return the next hidden state and what `backward` needs."""
        unread = jnp.zeros_like(hidden)
        out, *kept = self._run["forward"]([hidden, *context, *own, unread])
        return out, (hidden, kept)

    def backward(self, g_out: jax.Array, context: list, own: list, kept: tuple) -> list:
        """Return the gradients of the hidden state and then of the learned tensors."""
        hidden, saved = kept
        return self._run["backward"]([hidden, *context, *own, g_out, *saved])


class _RecomputingLayer:
    """A layer that saves only its input and recomputes the rest, `rows` sequences at a time."""

    def __init__(self, run: Run, rows: int, batch_size: int) -> None:
        self._run = run
        self._rows = rows
        self._batch = batch_size
        self._count = -(-batch_size // rows)

    def forward(self, hidden: jax.Array, context: list, own: list) -> tuple:

        def one(this: tuple) -> jax.Array:
            part, *cut = this
            here = [*self._whole(context, cut), *own]
            return self._run["forward"]([part, *here, jnp.zeros_like(part)])[0]

        return self._joined(lax.map(one, self._slices((hidden, *context)))), hidden

    def backward(self, g_out: jax.Array, context: list, own: list, hidden: jax.Array) -> list:
        slices = self._slices((hidden, g_out, *context))

        def one(this: tuple) -> list:
            part, g_part, *cut = this
            here = [*self._whole(context, cut), *own]
            # keep XLA from reusing the forward pass, and from starting before the gradient is
            # available
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
        """Return tensors with a row per sequence as `(count, rows, ...)`, padded with zeros."""
        return [_blocks(x, self._count, self._rows) for x in filter(self._is_cut, tensors)]

    def _whole(self, context: list, cut: list) -> list:
        left = iter(cut)
        return [next(left) if self._is_cut(x) else x for x in context]

    def _joined(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])[: self._batch]


def _blocks(x: jax.Array, count: int, size: int) -> jax.Array:
    """Return the rows of `x` as `(count, size, ...)`, padded with zeros."""
    padded = jnp.pad(x, [(0, count * size - len(x))] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(count, size, *x.shape[1:])


def _head(head: Callable, outside: list, hidden: jax.Array, batch: Batch) -> tuple:
    """Return the losses and the gradient of the last hidden state, computed in blocks of tokens."""
    T, D = batch.mask.size, hidden.shape[-1]
    tokens = min(BLOCK_TOKENS, T)
    valid = jnp.maximum(batch.mask.sum(), 1)

    def one(this: tuple) -> tuple:
        part, targets = this
        *losses, g_hidden = head([*outside, part[None], *targets, valid])
        return losses, g_hidden[0]

    of_tokens = [hidden, *(getattr(batch, name) for name in Targets._fields)]
    blocks = [_blocks(x.reshape(T, *x.shape[2:]), -(-T // tokens), tokens) for x in of_tokens]
    losses, g_hidden = lax.map(one, (blocks[0], blocks[1:]))
    return [part.sum() for part in losses], g_hidden.reshape(-1, D)[:T].reshape(hidden.shape)
