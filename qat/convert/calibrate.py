"""Block-by-block calibration: each linear is quantized against the inputs it will see.

Every block reads the output of the blocks already quantized (GPTQ's sequential order,
arXiv:2210.17323). Inside a block, linears that share an input are one stage, in the order of use. A
block runs once per stage, only as far as the stage's input. If memory allows, outputs of earlier
runs of a batch are cached, so that each linear multiplies its inputs once. If not, only the hidden
states between blocks are kept, and the block runs from its start for every stage: about 2.5 times
the arithmetic, and memory of 4 D numbers per token.

A teacher, if given, runs in step with the student, block by block and batch by batch.

Shapes: B sequences, S positions, D model width, I in_features.
"""

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat.backend.device import on
from qat.logs import duration
from qat.models.language_model import LanguageModel
from qat.models.streamed import (
    StateStore,
    as_checkpoint_error,
    fits_in_memory,
    output_of,
    patched_forwards,
    record_all_inputs,
)
from qat.nn.activation import read
from qat.nn.quant_linear import QuantLinear
from qat.nn.sites import Owner, StackedLinear, experts_of, is_plain, watching
from qat.nn.swap import decoder_layers

logger = logging.getLogger(__name__)

NEEDS = "which calibration needs; convert it without --calibration"
"""The end of an error about architectures whose layers cannot run one by one."""
FLOAT_BYTES = 4
"""Bytes per float32 number."""
CHUNK = 2048
"""Tokens whose products are summed in float32 before the sum joins a total in float64."""
MASSIVE = 16.0
"""A token is massive if its energy `|x|^2` exceeds this multiple of the median energy."""
ESTIMATED_BATCHES = 8
"""The least number of batches for which the time is estimated before quantization begins."""
ESTIMATED_S = 20.0
"""Estimates below this are not logged."""


class StageInputs(NamedTuple):
    """Statistics of the common input x of a stage's linears and of its gap to the teacher's x_f.

    `s` is the residual stream that the output of a linear is added to.
    """

    second_moment: Tensor
    """`mean(x x^T)`, `(I, I)` float64."""
    input_gap: Tensor | None = None
    """`mean((x_f - x) x^T)`, `(I, I)` float32; None without a teacher, or if tokens are not in
    order (the experts of a mixture)."""
    stream_gap: Tensor | None = None
    """`mean((s_f - s) x^T)`, `(D, I)`; also None if the output is not added to the stream
    directly."""


class StackInputs(NamedTuple):
    """Statistics of the inputs of E experts whose weights are one linear, float32."""

    second_moments: Tensor
    """`mean(x x^T)` of each expert, `(E, I, I)`; 0 for an expert without inputs."""
    counts: Tensor
    """Number of inputs of each expert, `(E,)`."""


class TokenBatch(NamedTuple):
    """Tokens to run a model on, `(B, S)` each."""

    input_ids: Tensor
    position_ids: Tensor


class LayerwiseRun:
    """The decoder layers of a model, and the hidden states of all batches before the next one."""

    @torch.no_grad()
    def __init__(self, model: LanguageModel, batches: Sequence[TokenBatch]) -> None:
        self.layers, self._model = decoder_layers(model.model), model
        self.device = model.device
        tokens = sum(batch.input_ids.numel() for batch in batches)
        sizes = [_bytes_a_token(layer) for layer in self.layers]
        states, whole = (tokens * max(each) for each in zip(*sizes, strict=True))
        self.caches_outputs = fits_in_memory(model, whole)
        """True if the outputs of a layer's modules are kept while its linears are quantized."""
        self.store = StateStore(model, whole if self.caches_outputs else states)
        self._calls: list[list[dict[str, Any]]] = []
        self._states: list[object] = []
        with as_checkpoint_error(model, NEEDS):
            for item in record_all_inputs(model, self.layers, batches):
                self._calls.append(item.kwargs)
                self._states.append(self.store.put(item.hidden))
        self._passed = 0

    def present(self) -> AbstractContextManager[None]:
        """Keep the next layer in memory inside the block, for a model that stays in its files."""
        return self._model.present(self.layers[self._passed])

    def block(self, num_batches: int | None = None) -> "_Block":
        """Return the next layer with its first `num_batches` inputs (all if None)."""
        calls = [kwargs[self._passed] for kwargs in self._calls[:num_batches]]
        states, layer = self._states[:num_batches], self.layers[self._passed]
        return _Block(layer, states, calls, self.store, caches_outputs=self.caches_outputs)

    def advance(self, outputs: list[Tensor]) -> None:
        """Move past the next layer, given its output for each batch."""
        self._states = outputs
        self._passed += 1

    def pass_layer(self, stages: Sequence["_Stage"]) -> list[Iterable["_Reading"]]:
        """Move past the next layer; return what each of `stages` reads there, batch by batch."""
        with self.present():
            block = self.block()
            if self.caches_outputs:
                readings, outputs = zip(*block.run_through(stages), strict=True)
                self.advance(list(outputs))
                return list(zip(*readings, strict=True))
            outputs = block.outputs()
            detached = block.detached()
        self.advance(outputs)
        return [detached.run_to(stage) for stage in stages]


def _bytes_a_token(layer: nn.Module) -> tuple[int, int]:
    """Return bytes per token held while a layer is quantized: states alone, and everything.

    States are those of two models before and after the layer; everything includes the inputs and
    outputs of each linear.
    """
    linears = [m for m in layer.modules() if is_plain(m) and not isinstance(m, StackedLinear)]
    widths = [linear.in_features for linear in linears]
    states = 4 * widths[0] if widths else 0
    whole = states + sum(widths) + sum(linear.out_features for linear in linears)
    return FLOAT_BYTES * states, FLOAT_BYTES * whole


@torch.no_grad()
def stages_in_order(
    student: LanguageModel,
    batches: Sequence[TokenBatch],
    names: list[str],
    *,
    teacher: LayerwiseRun | None = None,
    heartbeat: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[list[str], StageInputs | StackInputs | None]]:
    """Run the decoder layers one by one; yield the `names` and inputs of each stage in turn.

    The caller may replace the linears of a stage before it takes the next stage. Linears that no
    batch reaches are yielded without inputs, after the stages of their layer.

    `teacher` runs the same batches. It may run the student's own layers: it passes each layer
    before the linears of that layer are replaced. `heartbeat` is called with a description of the
    current batch.
    """
    run = LayerwiseRun(student, batches)
    module_names = {module: name for name, module in student.model.named_modules()}
    plans: dict[tuple, list[_Stage]] = {}
    for layer in run.layers:
        prefix = module_names[layer] + "."
        mine = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        with run.present():
            block, kind = run.block(), (type(layer), mine)
            if kind not in plans:
                with as_checkpoint_error(student, NEEDS):
                    plans[kind] = block.stages(mine)
                if len(plans) == 1 and len(batches) >= ESTIMATED_BATCHES:
                    seconds = _seconds_a_batch(run, teacher, plans[kind])
                    _announce(seconds * len(batches) * len(run.layers), batches)
            targets: Sequence[Iterable[_Reading] | None] = [None] * len(plans[kind])
            if teacher:
                targets = teacher.pass_layer(plans[kind])
            for stage, target in zip(plans[kind], targets, strict=True):
                read = _with_heartbeat(block.run_to(stage), prefix + stage.names[0], heartbeat)
                is_stack = stage.stack is not None
                inputs = _stack_inputs(read) if is_stack else _stage_inputs(read, target, run.store)
                yield [prefix + name for name in stage.names], inputs
            seen = {name for stage in plans[kind] for name in stage.names}
            if unseen := [prefix + name for name in mine if name not in seen]:
                yield unseen, None
            run.advance(block.outputs())


@torch.no_grad()
def head_second_moment(model: LanguageModel, batches: Sequence[TokenBatch]) -> Tensor | None:
    """Return `mean(h h^T)` of the hidden states that the head reads, `(D, D)` float64.

    None without tokens. It runs the whole model over all `batches`.
    """
    total = _MeanOuter()
    there = (TokenBatch(*(ids.to(model.device) for ids in batch)) for batch in batches)
    with as_checkpoint_error(model, NEEDS):
        for hidden in model.hidden_of(there):
            total.add(hidden, _Rows(hidden))
    return total.mean()


def _with_heartbeat(
    readings: Iterable["_Reading"], name: str, heartbeat: Callable[[str], None]
) -> Iterator["_Reading"]:
    for number, reading in enumerate(readings, 1):
        heartbeat(f"{name}, batch {number:,}")
        yield reading


def _seconds_a_batch(
    run: LayerwiseRun, teacher: LayerwiseRun | None, stages: Sequence["_Stage"]
) -> float:
    """Time one batch through the next layer, including the statistics of its stages."""
    seconds = 0.0
    for _ in range(2):  # the first run is a warm-up
        block, began = run.block(1), time.perf_counter()
        with nullcontext() if teacher is None else teacher.present():
            teacher_block = None if teacher is None else teacher.block(1)
            for stage in stages:
                if stage.stack is None:
                    target = None if teacher_block is None else teacher_block.run_to(stage)
                    _stage_inputs(block.run_to(stage), target, run.store)
                else:
                    _stack_inputs(block.run_to(stage))
            for each in filter(None, (block, teacher_block)):
                each.outputs()
        on(run.device).synchronize()
        seconds = time.perf_counter() - began
    return seconds


def _announce(seconds: float, batches: Sequence[TokenBatch]) -> None:
    if seconds < ESTIMATED_S:
        return
    logger.info(
        "calibration runs %s tokens through every layer: about %s, and fitting comes on top",
        f"{sum(batch.input_ids.numel() for batch in batches):,}",
        duration(seconds),
    )


class _Stage(NamedTuple):
    """Linears that read the same tensor, or one stack of experts."""

    names: list[str]
    stream: str | None
    """The child of the layer that reads the residual stream to which the output is added unchanged;
    None if there is none."""
    stack: str | None = None
    """The module that computes with the linear, if the linear holds the weights of experts."""


@dataclass
class _Reading:
    """The input of the linears of one stage in one batch, and the stream before their output."""

    x: Tensor | None = None
    """The common input; None if the batch does not reach the linears."""
    stream: Tensor | None = None
    by_expert: dict[int, list[Tensor]] = field(default_factory=dict)
    """Inputs of each expert, if the stage is a stack of experts."""
    experts: int = 0


Call = tuple[str, int]
"""A module's name and the number of its earlier calls in the same run."""


class _Reached(Exception):
    """Stops a run at the module whose input was wanted."""


class _Block:
    """One decoder layer with its inputs for all batches, and a cache of module outputs."""

    def __init__(
        self,
        layer: nn.Module,
        states: Sequence[Tensor],
        calls: Sequence[dict[str, Any]],
        store: StateStore,
        *,
        caches_outputs: bool,
    ) -> None:
        self._layer, self._store, self._caches_outputs = layer, store, caches_outputs
        self._runs = list(zip(states, calls, strict=True))
        self._made: list[dict[Call, object]] = [{} for _ in self._runs]
        """The cached outputs per batch, by call of a linear or of a direct child of the layer."""
        self._formed: dict[str, Tensor] = {}
        """Formed weights of quantized linears that ran, by name."""

    def detached(self) -> "_Block":
        """Return a block that shares all tensors but no module, so it survives replaced linears.

        It never caches outputs.
        """
        tensors = chain(self._layer.parameters(), self._layer.buffers())
        layer = copy.deepcopy(self._layer, {id(tensor): tensor for tensor in tensors})
        # a layer that stays in its files has a wrapper here, bound to the original
        vars(layer).pop("forward", None)
        states, calls = zip(*self._runs, strict=True)
        return _Block(layer, states, calls, self._store, caches_outputs=False)

    def stages(self, names: Sequence[str]) -> list[_Stage]:
        """Return the linears called `names` in order of use, grouped by the tensor they read."""
        read: dict[int, list[str]] = {}
        gave: dict[str, Tensor] = {}
        alive = []  # keep every input alive, so that no address is reused
        streams: list[tuple[str, Tensor]] = []

        def note_linear(name: str, _module: nn.Module, args: tuple, output: Tensor) -> None:
            alive.append(args[0])
            if name in gave:  # called again: the first call decides
                return
            read.setdefault(id(args[0]), []).append(name)
            gave[name] = output

        def note_child(name: str, _module: nn.Module, args: tuple) -> None:
            if args and isinstance(args[0], Tensor):
                streams.append((name, args[0]))

        linears = {self._layer.get_submodule(name): partial(note_linear, name) for name in names}
        children = {child: partial(note_child, n) for n, child in self._layer.named_children()}
        owners = {name: o for name, o in self._layer.named_modules() if isinstance(o, Owner)}
        stacks: dict[str, str] = {}

        def note_stack(owner: str, key: str, _expert: int, _x: Tensor) -> None:
            name = f"{owner}.{key}" if owner else key
            if name in names and name not in stacks:
                stacks[name] = owner
                read[-len(stacks)] = [name]  # a negative key cannot clash with an address

        hidden, call = self._call(0)
        with _hooked(children.items(), linears.items()), ExitStack() as watched:
            for owner, module in owners.items():
                watched.enter_context(watching(module, partial(note_stack, owner)))
            streams.append(("", output_of(self._layer(hidden, **call))))
        return [
            _Stage(group, None, stacks[group[0]])
            if group[0] in stacks
            else _Stage(group, _stream_before(gave[group[0]], streams) if len(group) == 1 else None)
            for group in read.values()
        ]

    def run_to(self, stage: _Stage) -> Iterator[_Reading]:
        """Yield what `stage` reads in each batch; its linears themselves do not run."""
        for batch in range(len(self._runs)):
            reading = _Reading()
            if stage.stack is not None:
                self._read_stack(stage, reading, batch)
            else:
                with _hooked(self._recording(stage, reading, stops=True)), suppress(_Reached):
                    self._run(batch)
            yield reading

    def _read_stack(self, stage: _Stage, reading: _Reading, batch: int) -> None:
        """Run the batch through the experts of `stage`, and record what each read."""
        owner, key = self._layer.get_submodule(stage.stack), stage.names[0].rpartition(".")[2]
        reading.experts = experts_of(owner, key)

        def note(name: str, expert: int, x: Tensor) -> None:
            if name == key:
                reading.by_expert.setdefault(expert, []).append(x)

        def stop(*_: object) -> None:
            raise _Reached

        with watching(owner, note), _hooked([], [(owner, stop)]), suppress(_Reached):
            self._run(batch)

    def run_through(self, stages: Sequence[_Stage]) -> Iterator[tuple[list[_Reading], Tensor]]:
        """Yield what all of `stages` read in each batch, and the layer's output."""
        for batch in range(len(self._runs)):
            hidden, call = self._call(batch)
            readings = [_Reading() for _ in stages]
            pairs = zip(stages, readings, strict=True)
            hooks = [hook for pair in pairs for hook in self._recording(*pair, stops=False)]
            with _hooked(hooks):
                output = output_of(self._layer(hidden, **call))
            for reading in readings:
                reading.x = self._store.put(reading.x)
                reading.stream = self._store.put(reading.stream)
            yield readings, self._store.put(output)

    def _recording(self, stage: _Stage, reading: _Reading, *, stops: bool) -> list[tuple]:
        """Return hooks that fill `reading`, and that stop the run at its input if `stops`."""
        if stage.stack is not None:
            return []

        def note_input(_module: nn.Module, args: tuple) -> None:
            if reading.x is None:
                reading.x = args[0]
            if stops:
                raise _Reached

        def note_stream(_module: nn.Module, args: tuple) -> None:
            reading.stream = args[0]

        hooks = [(self._layer.get_submodule(stage.names[0]), note_input)]
        if stage.stream is not None:
            hooks.append((self._layer.get_submodule(stage.stream), note_stream))
        return hooks

    def outputs(self) -> list[Tensor]:
        """Return the layer's output for each batch."""
        return [self._store.put(self._run(batch)) for batch in range(len(self._runs))]

    def _call(self, batch: int) -> tuple[Tensor, dict[str, Any]]:
        hidden, call = self._runs[batch]
        return self._store.get(hidden), call

    def _run(self, batch: int) -> Tensor:
        hidden, call = self._call(batch)
        made, counts = self._made[batch], Counter()

        def once(name: str, module: nn.Module) -> Callable:
            compute = module.forward
            if is_plain(module):

                def compute(x: Tensor) -> Tensor:
                    weight = self._weight(name, module)
                    return nn.functional.linear(read(module, x), weight, module.bias)

            def forward(*args: object, **named: object) -> object:
                key = name, counts[name]
                counts[name] += 1
                if key in made:
                    return self._store.get(made[key])
                value = compute(*args, **named)
                if not self._caches_outputs:
                    return value
                made[key] = self._store.put(value)
                for inner in [k for k in made if k[0].startswith(name + ".")]:
                    del made[inner]
                return value

            return forward

        kept = {
            module: once(name, module)
            for name, module in self._layer.named_modules()
            if ((name and "." not in name) or is_plain(module)) and not isinstance(module, Owner)
        }
        with patched_forwards(kept):
            return output_of(self._layer(hidden, **call))

    def _weight(self, name: str, linear: nn.Module) -> Tensor:
        if not isinstance(linear, QuantLinear):
            return linear.weight
        if name not in self._formed:
            self._formed[name] = linear.quantized_weight()
        return self._formed[name]


def _stage_inputs(
    student: Iterable[_Reading], teacher: Iterable[_Reading] | None, store: StateStore
) -> StageInputs:
    second, gap, drift = _MeanOuter(), _MeanOuter(torch.float32), _MeanOuter(torch.float32)
    is_taught = teacher is not None
    aims = repeat(None) if teacher is None else teacher
    for seen, aim in zip(student, aims):  # noqa: B905 (without a teacher `aims` is endless)
        if seen.x is None:
            continue
        inputs = _Rows(seen.x)
        second.add(seen.x, inputs)
        # a gap needs both sides to hold all tokens in order, `(B, S, I)`: experts read subsets
        is_taught = (
            aim is not None
            and aim.x is not None
            and seen.x.dim() == 3
            and aim.x.shape == seen.x.shape
        )
        if is_taught:
            gap.add(store.get(aim.x) - seen.x, inputs)
            if seen.stream is not None:
                drift.add(store.get(aim.stream) - seen.stream, inputs)
    return StageInputs(second.mean(), *((gap.mean(), drift.mean()) if is_taught else ()))


def _stack_inputs(readings: Iterable[_Reading]) -> StackInputs:
    means: dict[int, _MeanOuter] = {}
    experts = 0
    for seen in readings:
        experts = max(experts, seen.experts)
        for expert, rows in seen.by_expert.items():
            for x in rows:
                means.setdefault(expert, _MeanOuter()).add(x, _Rows(x))
    some = next(mean for each in means.values() if (mean := each.mean()) is not None)
    moments = torch.zeros(experts, *some.shape, device=some.device)
    counts = moments.new_zeros(experts)
    for expert, each in means.items():
        if each.count:
            moments[expert], counts[expert] = each.mean(), each.count
    return StackInputs(moments, counts)


class _Rows:
    """The tokens of one batch, `(N, I)` float32, with the massive ones apart.

    Real models have massive activations (arXiv:2402.17762): a few channels of a few tokens are 10^4
    times as large as the rest, and collinear. The rounding error of a float32 sum over thousands of
    tokens then exceeds the difference between such channels, and the second moment is not positive
    definite: in layer 3 of Qwen2.5-Coder-0.5B the least eigenvalue came out as -0.0004 of the mean
    diagonal, and is 0.0025. So these tokens are multiplied in float64, all others `CHUNK` at a time
    in the precision of `matmul_precision`.
    """

    def __init__(self, x: Tensor) -> None:
        x = x.flatten(0, -2).float()
        energy = x.square().sum(1)
        is_massive = energy > MASSIVE * energy.median()
        self.count = len(x)
        self._places = is_massive.nonzero()[:, 0]
        self._massive = x[self._places].double()
        self._usual = x.masked_fill(is_massive[:, None], 0.0)

    def products(self, left: Tensor) -> Iterator[Tensor]:
        """Yield the parts of `left^T x`, `(O, I)`, for `left` `(..., O)` of the same tokens."""
        left = left.flatten(0, -2).float()
        yield left[self._places].double().T @ self._massive
        for some, others in zip(left.split(CHUNK), self._usual.split(CHUNK), strict=True):
            yield some.T @ others


class _MeanOuter:
    """Accumulates the mean over tokens of `left right^T`, summed and returned in `dtype`.

    Second moments need float64 (see `_Rows`). A gap need not be definite, so float32 is enough.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._total: Tensor | None = None
        self._dtype = dtype
        self.count = 0

    def add(self, left: Tensor, right: _Rows) -> None:
        """Add the products of tokens `(..., O)` and `(..., I)`."""
        for part in right.products(left):
            if self._total is None:
                self._total = torch.zeros_like(part, dtype=self._dtype)
            self._total += part
        self.count += right.count

    def mean(self) -> Tensor | None:
        """Return the mean `(O, I)`, or None without tokens."""
        return None if self._total is None or not self.count else self._total / self.count


def _stream_before(output: Tensor, streams: list[tuple[str, Tensor]]) -> str | None:
    """Return the name of the module whose input plus `output` equals a later one of the `streams`.

    Sums are compared bit by bit: a norm or a factor in between gives no match.
    """
    for number, (name, before) in enumerate(streams):
        if before.shape == output.shape:
            after = before + output
            if any(torch.equal(after, stream) for _, stream in streams[number + 1 :]):
                return name
    return None


@contextmanager
def _hooked(
    before: Iterable[tuple[nn.Module, Callable]], after: Iterable[tuple[nn.Module, Callable]] = ()
) -> Iterator[None]:
    with ExitStack() as handles:
        for module, hook in before:
            handles.enter_context(module.register_forward_pre_hook(hook))
        for module, hook in after:
            handles.enter_context(module.register_forward_hook(hook))
        yield
