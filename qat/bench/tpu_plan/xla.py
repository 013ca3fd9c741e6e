"""Traced graphs as jax functions, and steps made of them compiled for a TPU that is not there.

The one place where jax and torchax are imported; whoever imports this has the extra. jax computes
on the CPU; libtpu compiles for a TPU that is only described, and asks no network.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from qat.backend.before_torch import keep_libtpu_offline
from qat.bench.tpu_plan.pieces import aten
from qat.bench.tpu_plan.topologies import Compiled, Topology, check_installed, used_gib
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
