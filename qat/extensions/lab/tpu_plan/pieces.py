"""The training step of a student, split at its repeated layers: one layer is traced for all.

Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws, L layers.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from qat.data.packing import Batch
from qat.errors import ConfigError, how_to_install
from qat.extensions.bench.batches import random_batch, random_source
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.student import Ours, quantized_model, without_learning
from qat.kernels import head as head_kernels
from qat.losses.formulas import Targets, to_targets
from qat.losses.from_hidden import loss_from_hidden
from qat.models.language_model import LanguageModel
from qat.models.regions import SLICE_TOKENS
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import decoder_layers
from qat.train.adamw import TorchAdamW

# Parts of our training step as graphs of plain operators, traced on tensors without values.

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
"""Operators that backward repeats instead of saving their results: they do no arithmetic."""


def check_installed() -> None:
    """Raise ConfigError if the extra for planning is not installed.

    Raises:
        ConfigError: naming the missing packages.
    """
    missing = [name for name in ("jax", "torchax", "libtpu") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"plan: {', '.join(missing)} not installed, expected the extra for planning TPUs; run: "
            f"{how_to_install('tpu-plan')}"
        )


@dataclass(frozen=True)
class Compiled:
    """The compiler's results for a step."""

    peak_gib: float | None
    """Peak memory; None if the step does not fit into the memory of the device."""
    needed_gib: float | None  # memory that the step needs; equal to the peak if it fits
    seconds: float  # seconds of the compiler alone


def used_gib(message: str) -> float | None:
    """Return the memory that a step needs from either form of the compiler's error message.

    `Used 48.66G of 15.75G hbm`, or `(16.34G) exceeds available HBM (14.40G)`.
    """
    size = r"([\d.]+)([KMGT])"
    found = re.search(rf"Used {size} of {size} hbm|\({size}\) exceeds available HBM", message)
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[5], found[6])
    return float(number) * 1024.0 ** ("KMGT".index(unit) - 2)


class AnyNumber(TorchDispatchMode):
    """Answers value queries that fake tensors cannot: every number is 1, all tensors are equal."""

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
    """Mark the place in a traced graph after which backward begins."""
    return hidden.clone()


@end_of_forward.register_fake
def _(hidden: Tensor) -> Tensor:
    return torch.empty_like(hidden)


@contextmanager
def tracing(fake: FakeTensorMode) -> Iterator[None]:
    """Use tensors without values in the block, and attention of plain matmuls and a softmax."""
    with fake, AnyNumber(), sdpa_kernel(SDPBackend.MATH):
        yield


def trace(
    run: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], fake: FakeTensorMode
) -> fx.GraphModule:
    """Trace `run`, which reads the fake tensors `inputs` by closure and does not change them.

    The graph takes the tensors of `inputs` and returns what `run` returns.
    """

    def graph_of(function: Callable, given: Sequence[Tensor]) -> fx.GraphModule:
        table = core_aten_decompositions()
        return make_fx(function, tracing_mode="real", decomposition_table=table)(*given)

    def traced(*_: Tensor) -> list[Tensor]:
        with AnyNumber(), sdpa_kernel(SDPBackend.MATH):
            return list(run())

    with fake:
        written = graph_of(traced, inputs)
        plain = [torch.empty_like(tensor, requires_grad=False) for tensor in inputs]
        functional = torch.func.functionalize(written, remove="mutations_and_views")
        with torch.no_grad():
            graph = graph_of(functional, plain)
    for node in reversed(list(graph.graph.nodes)):
        if "profiler" in str(node.target):
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def split(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph of forward and backward at `end_of_forward`, its first output.

    Forward takes the same inputs and returns that output and the tensors saved for backward.
    Backward takes the same inputs and then the saved tensors, and returns the other outputs.
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
    """Copy the nodes to a new graph with `given` as additional inputs, without unused nodes."""
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


LR = 1e-4  # a nonzero learning rate, so that no compiler drops the update


class _FirstLayerInputs(Exception):
    """Carries the inputs of the first layer out of the model."""


@dataclass(frozen=True)
class Pieces:
    """Graphs on flat lists of tensors: `layer` has those of one layer, `outside` all others."""

    prelude: fx.GraphModule
    """`(*outside, ids, positions)` to the first layer's hidden state and the context shared by
    layers."""
    form: fx.GraphModule  # `(*layer)` to the formed weights
    layer: fx.GraphModule
    """`(hidden, *context, *formed, *layer, g_out)` to the hidden state after the layer, and the
    gradients of the hidden state before it, of the formed weights that learn, and of the layer's
    other learned parameters."""
    forward: fx.GraphModule
    """The forward part of `layer`: to its first output and the tensors saved for backward."""
    backward: fx.GraphModule  # the backward part of `layer`
    pull_back: fx.GraphModule
    """`(*layer, *g_formed)` to the gradients of the learned parts of the formed weights."""
    head: fx.GraphModule
    """`(*outside, hidden, *targets, valid)` to the losses and the gradient of some tokens."""
    move: fx.GraphModule
    """`(*learned, *moments, *gradients, factor)` to the new `learned` and `moments`."""


class Traceable:
    """A student whose step can be planned; its tensors have shapes but no values."""

    def __init__(self, config: BenchConfig, source: str) -> None:
        self.config = config
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = _with_fakes(quantized_model(source, config, "meta"), self.fake)
        with tracing(self.fake):
            ours = Ours(LanguageModel(model), config)
            self.step = ours.subject()
        self.student, self.dtype = ours.student, self.step.dtype
        self._source = random_source(config, self.student.config.vocab_size)
        self.settings = without_learning(config)
        self._traced: dict[tuple[str, int], object] = {}
        self.learners = [
            learner for mover in ours.optimizer._movers for learner in mover._learners.values()
        ]
        self.layers = list(decoder_layers(model))
        check_alike(self.layers)
        self.layer = self.layers[0]
        self.tensors = list(_tensors(self.layer).values())
        inside = {id(t) for layer in self.layers for t in _tensors(layer).values()}
        self.outside = [t for t in _tensors(model).values() if id(t) not in inside]
        self.linears = list(quant_linears(self.layer).values())
        of_linears = {id(p) for linear in self.linears for p in linear.weight_parameters().values()}
        learned = [tensor for tensor in self.tensors if tensor.requires_grad]
        self.learned_formed = [t for t in learned if id(t) in of_linears]
        self.learned_plain = [t for t in learned if id(t) not in of_linears]
        self.learned = [*self.learned_formed, *self.learned_plain]
        """The learned tensors of a layer: first the parts of formed weights, then the rest."""
        place = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self.learned_places = [place[id(tensor)] for tensor in self.learned]
        """Indices of `learned` in `tensors`."""
        if any(tensor.requires_grad for tensor in self.outside):
            raise ConfigError(
                "plan: something outside the layers learns, which is not planned for a TPU; drop "
                "norms from --learn"
            )

    def batch(self, batch_size: int) -> Batch:
        """Return a batch without values."""
        with self.fake:
            return random_batch(self._source, batch_size, torch.Generator())

    def rows(self, batch_size: int) -> int:
        """Return the number of sequences that a recomputed layer takes at a time."""
        if not self.config.gradient_checkpointing:
            return batch_size
        return min(batch_size, max(1, SLICE_TOKENS // self._source.seq_len))

    def pieces(self, batch_size: int) -> Pieces:
        """Return the step at one batch size; pieces shared with other sizes are traced once."""
        rows = self.rows(batch_size)
        tokens = min(head_kernels.BLOCK_TOKENS, self.batch(batch_size).mask.numel())
        layer = self._once("layer", rows, lambda: self._layer(self.batch(rows)))
        forward, backward = self._once("halves", rows, lambda: split(layer))
        return Pieces(
            prelude=self._prelude(self.batch(batch_size)),
            form=self._once("form", 0, self._form),
            layer=layer,
            forward=forward,
            backward=backward,
            pull_back=self._once("pull_back", 0, self._pull_back),
            head=self._once("head", tokens, lambda: self._head(tokens)),
            move=self._once("move", 0, self._move),
        )

    def _once(self, name: str, size: int, make: Callable) -> Any:
        if (name, size) not in self._traced:
            self._traced[name, size] = make()
        return self._traced[name, size]

    def _trace(self, run: object, inputs: Sequence[Tensor]) -> fx.GraphModule:
        return trace(run, inputs, self.fake)

    def _form(self) -> fx.GraphModule:
        def run() -> list[Tensor]:
            return [linear.quantized_weight(self.dtype) for linear in self.linears]

        return self._trace(run, self.tensors)

    def _reach(self, batch: Batch) -> tuple[tuple, dict]:

        def stop(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            raise _FirstLayerInputs(args, kwargs)

        hook = self.layer.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad(), self.step.backend.autocast(self.dtype):
                self.student.hidden(batch.input_ids, batch.position_ids)
        except _FirstLayerInputs as reached:
            return reached.args
        finally:
            hook.remove()
        raise ConfigError("plan: the student's layers cannot be told apart; choose another shape")

    def _prelude(self, batch: Batch) -> fx.GraphModule:
        def run() -> list[Tensor]:
            leaves = pytree.tree_leaves(self._reach(batch))
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        return self._trace(run, [*self.outside, batch.input_ids, batch.position_ids])

    def _layer(self, batch: Batch) -> fx.GraphModule:
        with tracing(self.fake):
            (hidden, *rest), kwargs = self._reach(batch)
            leaves, form = pytree.tree_flatten((rest, kwargs))
            context = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            hidden = torch.empty_like(hidden).requires_grad_()
            g_out = torch.empty_like(hidden)
            for linear in self.linears:
                shape = linear.out_features, linear.in_features
                linear.formed = torch.empty(shape, dtype=self.dtype, requires_grad=linear.learns())
        formed = [linear.formed for linear in self.linears]
        wanted = [hidden, *(W for W in formed if W.requires_grad), *self.learned_plain]

        def run() -> list[Tensor]:
            rest, kwargs = pytree.tree_unflatten(leaves, form)
            with self.step.backend.autocast(self.dtype):
                out = self.layer(hidden, *rest, **kwargs)
            end = end_of_forward(out.detach())
            return [end, *torch.autograd.grad(out, wanted, g_out)]

        found = self._trace(run, [hidden, *context, *formed, *self.tensors, g_out])
        for linear in self.linears:
            linear.release_()
        return found

    def _pull_back(self) -> fx.GraphModule:
        learning = [linear for linear in self.linears if linear.learns()]
        with self.fake:
            gradients = [
                torch.empty(m.out_features, m.in_features, dtype=self.dtype) for m in learning
            ]

        def run() -> list[Tensor]:
            found = {}
            for linear, dW in zip(learning, gradients, strict=True):
                wanted = {n: p for n, p in linear.weight_parameters().items() if p.requires_grad}
                for name, gradient in linear.pulled_back(dW, wanted.keys()).items():
                    found[id(wanted[name])] = gradient.to(wanted[name].dtype)
            return [found[id(parameter)] for parameter in self.learned_formed]

        return self._trace(run, [*self.tensors, *gradients])

    def _head(self, tokens: int) -> fx.GraphModule:
        config, norm = self.config, self.student.model.base_model.norm
        batch = self.batch(1)
        with tracing(self.fake):
            stream = self._reach(batch)[0][0]
        with self.fake:
            width = self.student.config.hidden_size
            hidden = torch.empty(1, tokens, width, dtype=stream.dtype).requires_grad_()
            valid = torch.empty((), dtype=torch.int64)
            targets = Targets(*(t.new_empty(tokens, *t.shape[1:]) for t in to_targets(batch)))

        def run() -> list[Tensor]:
            with self.step.backend.autocast(self.dtype):
                last = norm(hidden)
            parts = loss_from_hidden(
                last.flatten(0, 1).to(self.dtype),
                self.student.head_in(self.dtype),
                targets,
                config.losses,
                temperature=config.temperature,
            )
            (g_hidden,) = torch.autograd.grad(parts["loss"] / valid, [hidden])
            return [*(part.detach() for part in parts.values()), g_hidden]

        # run the second matmul over the whole vocabulary: TPUs do not need smaller tiles
        before, head_kernels.BLOCK_WORDS = head_kernels.BLOCK_WORDS, self.student.config.vocab_size
        try:
            return self._trace(run, [*self.outside, hidden, *targets, valid])
        finally:
            head_kernels.BLOCK_WORDS = before

    def _move(self) -> fx.GraphModule:
        """Trace AdamW on each tensor stacked over all layers: the update is elementwise."""
        L, by_id = len(self.layers), {id(x.parameter): x for x in self.learners}
        with tracing(self.fake):
            stacks = [nn.Parameter(t.detach().new_empty(L, *t.shape)) for t in self.learned]
            gradients = [torch.empty_like(stack, requires_grad=False) for stack in stacks]
            moments = [torch.empty_like(g) for g in gradients for _ in range(2)]
            factor = torch.empty(())
            learners = {
                str(i): by_id[id(t)]._replace(parameter=stack, lr=LR)
                for i, (t, stack) in enumerate(zip(self.learned, stacks, strict=True))
            }
            mover = TorchAdamW(learners, self.settings.beta2, is_fused=False)
            state = {f"step.{i}": torch.zeros(()) for i in learners}
            for i in range(len(stacks)):
                state |= {f"exp_avg.{i}": moments[2 * i], f"exp_avg_sq.{i}": moments[2 * i + 1]}
            mover.load(state)
        # the mover holds the tensors of `moments`, which the trace replaces

        def run() -> list[Tensor]:
            for stack, gradient in zip(stacks, gradients, strict=True):
                stack.grad = gradient
            mover.move(0, 1.0, factor)
            return [*(stack.detach() for stack in stacks), *moments]

        return self._trace(run, [*stacks, *moments, *gradients, factor])


def check_alike(layers: Sequence[nn.Module]) -> None:
    """Raise ConfigError for the first layer that differs from layer 0 in more than its values."""
    for number, layer in enumerate(layers):
        if _kind(layer) != _kind(layers[0]):
            raise ConfigError(
                f"plan: layer {number} differs from layer 0 in shapes or formats, expected equal "
                "layers for a TPU; choose a shape or preset that treats all alike"
            )


def _kind(layer: nn.Module) -> tuple:
    tensors = [(n, t.shape, t.dtype, t.requires_grad) for n, t in _tensors(layer).items()]
    kinds = [getattr(m, "attention_type", None) for m in layer.modules()]
    return tensors, [linear.spec for linear in quant_linears(layer).values()], kinds


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def _with_fakes(model: PreTrainedModel, fake: FakeTensorMode) -> PreTrainedModel:
    """Replace every tensor of the model by a fake one; tied tensors stay tied."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            made[id(tensor)] = new, tensor  # keep the original, so that its id is not reused
        return made[id(tensor)][0]

    with fake, AnyNumber():
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                store.update({n: replaced(t) for n, t in store.items() if t is not None})
    return model
