"""Parts of our training step as graphs of plain operators, traced on tensors without values."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
VIEWS = {
    aten.view_copy.default,
    aten.permute_copy.default,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice_copy.Tensor,
    aten.alias.default,
    aten.clone.default,
}
"""What backward does again rather than keep: it moves no numbers."""


class AnyNumber(TorchDispatchMode):
    """Answers questions about values, which fake tensors lack: every number is 1, all are equal."""

    def __torch_dispatch__(  # noqa: D105
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is aten._local_scalar_dense.default:
            return 1.0
        if func is aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("qat::end_of_forward", mutates_args=())
def end_of_forward(hidden: Tensor) -> Tensor:
    """Marks the place in a traced graph behind which backward begins."""
    return hidden.clone()


@end_of_forward.register_fake
def _(hidden: Tensor) -> Tensor:
    return torch.empty_like(hidden)


@contextmanager
def tracing(fake: FakeTensorMode) -> Iterator[None]:
    """Inside, tensors have no values, and attention is plain matmuls and a softmax."""
    with fake, AnyNumber(), sdpa_kernel(SDPBackend.MATH):
        yield


def trace(
    run: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], fake: FakeTensorMode
) -> fx.GraphModule:
    """What `run` does with `inputs`, fake tensors that it reads by itself, changing none of them.

    The graph takes as many tensors as `inputs` has, and gives what `run` gives.
    """
    table = core_aten_decompositions()
    make = {"tracing_mode": "real", "decomposition_table": table}

    def traced(*_: Tensor) -> list[Tensor]:
        with AnyNumber(), sdpa_kernel(SDPBackend.MATH):
            return list(run())

    with fake:
        written = make_fx(traced, **make)(*inputs)
        plain = [torch.empty_like(tensor, requires_grad=False) for tensor in inputs]
        functional = torch.func.functionalize(written, remove="mutations_and_views")
        with torch.no_grad():
            graph = make_fx(functional, **make)(*plain)
    _drop_profiler(graph)
    return graph


def split(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A graph of forward and backward cut at `end_of_forward`, its first output.

    Forward takes the same inputs and gives that output, then what backward reads of it; backward
    takes the same inputs, then those, and gives the other outputs.
    """
    nodes = list(joint.graph.nodes)
    end = next(n for n in nodes if n.target is torch.ops.qat.end_of_forward.default)
    place = nodes.index(end)
    early = {node for node in nodes[: place + 1] if node.op == "call_function"}
    saved: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node not in early:
            return
        if node.target in VIEWS or not node.all_input_nodes:
            for source in node.all_input_nodes:
                need(source)
        else:
            saved[node] = None

    results = joint.graph.output_node().args[0]
    for node in nodes[place + 1 :]:
        readers = node.all_input_nodes if node.op == "call_function" else results[1:]
        for source in readers:
            if isinstance(source, fx.Node):
                need(source)
    forward = _copied(joint, nodes[: place + 1], [], [results[0], *saved])
    backward = _copied(joint, nodes, list(saved), list(results[1:]))
    return forward, backward


def _copied(
    joint: fx.GraphModule, nodes: list[fx.Node], given: list[fx.Node], results: list[fx.Node]
) -> fx.GraphModule:
    """The nodes as a graph of their own, in which `given` are inputs; what nobody reads is left."""
    graph, known = fx.Graph(), {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            known[node] = graph.placeholder(node.name)
    for number, node in enumerate(given):
        known[node] = graph.placeholder(f"saved_{number}")
        known[node].meta = dict(node.meta)
    for node in nodes:
        if node.op in ("call_function", "get_attr") and node not in known:
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output([known[node] if isinstance(node, fx.Node) else node for node in results])
    graph.eliminate_dead_code()
    return fx.GraphModule(joint, graph)


def _drop_profiler(graph: fx.GraphModule) -> None:
    for node in reversed(list(graph.graph.nodes)):
        if "profiler" in str(node.target):
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
