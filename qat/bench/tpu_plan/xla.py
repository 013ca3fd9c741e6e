"""Traced graphs as jax functions, and steps made of them compiled for a TPU that is not there."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from qat.bench.tpu_plan.libraries import (
    SingleDeviceSharding,
    interop,
    jax,
    jnp,
    topologies,
    torchax,
)
from qat.bench.tpu_plan.operators import DTYPES, aten, teach_torchax
from qat.bench.tpu_plan.topologies import Compiled, Topology, used_gib
from qat.process import GIB

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
