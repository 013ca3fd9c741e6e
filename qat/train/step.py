"""One optimizer step: form every weight once, run micro-batches, pull back, update.

`TrainingStep.__call__` is the entry: `qat.nn.step` forms the weights, `run_micro_step` runs the
student forward, computes the loss with `qat.losses` and calls backward, in which every linear pulls
its gradient back, and `qat.train.optim` updates the parameters. Also here: which sequences of a
step belong to a rank.

Nothing in this code waits for the device. On a GPU the first steps compile; then forward and
backward of a micro-batch are captured as one graph and replayed, if the micro-batch is small enough
to profit and the model's own code does not wait either (some mixtures of experts read on the host
how many tokens an expert got).
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from qat.backend import device as backends
from qat.backend.base import GIB
from qat.backend.tracing import CompileWatch
from qat.data.packing import Batch
from qat.kernels.attention import MAX_TILE
from qat.losses.config import OWN_WORDS, kinds_read
from qat.losses.formulas import Targets, WordsRead, to_targets, valid_rows
from qat.losses.from_hidden import loss_from_hidden
from qat.losses.from_teacher import OnlineTargets, loss_from_teacher
from qat.models.language_model import LanguageModel
from qat.models.precision import compute_in
from qat.models.regions import Regions, compile_facts, refusals, warn_uncompiled
from qat.models.step_memory import step_bytes
from qat.nn.lut_embedding import TableHead
from qat.nn.quant_weight import quant_weights
from qat.nn.step import form_moved_weights, release_weights
from qat.ranks import Ranks
from qat.train.finite import nan_if_not_finite
from qat.train.learnable import weights_in_scope
from qat.train.optim import Optimizer
from qat.train.step_config import StepConfig
from qat.train.step_graph import StepGraph

logger = logging.getLogger(__name__)

EAGER_STEPS = 2
"""Steps of one shape before capture, so that compiler and allocator have warmed up."""
GRAPH_TOKENS = 2**16
"""Largest micro-batch worth capturing: beyond, launch overhead is hidden by the work."""
HELD_SHARE = 2 / 3
"""Share of a device's memory for weights and optimizer beyond which weights are formed by layer;
activations need the rest."""

Draw = Callable[[int, int, int], np.ndarray]
"""Returns the sequences of a step from a seed, the step and how many: `TeacherCache.indices`."""


class OwnRows(NamedTuple):
    """The last rows of every micro-batch, with the student's own text (`--on-policy`)."""

    number: int
    losses: dict[str, float]
    """Losses on these rows, against the running teacher: weight by name."""
    reads_cache: bool
    """True if the other rows use the batch's targets although a teacher is running."""


class _Part(NamedTuple):
    """Rows of a micro-batch that share their losses."""

    rows: slice
    losses: dict[str, float]
    is_online: bool
    """True if targets come from the running teacher, false if from the batch."""
    prefix: str = ""
    """Prefix of these losses' names in a step's result."""


class StepResult(NamedTuple):
    """Results of one optimizer step; tensors stay on the device until they are logged."""

    sums: dict[str, Tensor]
    """Nats summed over valid tokens by loss, those of `OwnRows` as `own_...`, and the weighted sum
    of all as `loss`."""
    grad_norm: Tensor
    """Norm of the gradients before clipping."""
    valid_tokens: Tensor
    """Number of valid tokens over all ranks."""
    positions: int
    """Number of tokens over all ranks, valid or not."""


class TrainingStep:
    """The step of one student; calling it takes one step.

    The optimizer's ranks call it together, each with its own batches: gradients are divided by the
    valid tokens of all ranks and summed, as if one process had seen every batch.

    With a `teacher`, in the compute dtype, losses use that model's output; without one, the targets
    in the batches. If some rows are the student's `own` text, both may occur: the loss is the sum
    over the valid tokens of all rows, divided once by their number.
    """

    def __init__(
        self,
        student: LanguageModel,
        optimizer: Optimizer,
        config: StepConfig,
        teacher: LanguageModel | None = None,
        *,
        own: OwnRows | None = None,
    ) -> None:
        self.student = student
        self.teacher = teacher
        self._parts = _parts_of(config.losses, config.batch_size, own, teacher is not None)
        self.optimizer = optimizer
        self.config = config
        self.backend = backends.select(config.device)
        self.dtype = self.backend.dtype(config.dtype)
        self.fallback: str | None = None
        """Reason why layers that should be compiled run uncompiled; None if there is none."""
        is_auto = config.compile == "auto"
        self._is_compiled = self.backend.compiles if is_auto else config.compile == "on"
        every = config.checkpoint_every if config.gradient_checkpointing else None
        self.forms_by_layer = self._is_formed_by_layer(is_on_policy=own is not None)
        """True if weights are formed a layer at a time, not all at once."""
        self._regions = [
            Regions(
                student.model,
                is_compiled=self._is_compiled,
                recompute_every=every,
                forms_by_layer=self.forms_by_layer,
            )
        ]
        if teacher is not None:
            self._regions.append(
                Regions(teacher.model, is_compiled=self._is_compiled, recompute_every=None)
            )
        self._before = compile_facts()
        self._taken = 0
        self.nan_flag: Tensor | float = 0.0
        """NaN once a loss here or a gradient was not finite, else 0; stays on the device."""
        self._compiles = CompileWatch(self.backend.tracing)
        self._stops: deque[tuple[Tensor, Callable[[], None]]] = deque()
        """Numbers of ranks that wanted to stop in the latest steps, and waits for their copies."""
        self.is_stop_agreed = False
        """True if all ranks stop after this step; all ranks agree on it."""
        self._graph: StepGraph | None = None
        self._forming: Callable[[], None] | None = None
        """Replays the forming of all weights as a graph; None until it is captured."""
        self._ran: set[tuple[torch.Size, bool]] = set()
        """Shapes of micro-batches, and whether rows were packed, that the compiler has seen."""
        self._waits: list[str] | None = None
        """Source lines where the host waits for the device in a step; None until a step was
        checked."""
        self._end_precision = compute_in(student.model, self.dtype)
        for regions in self._regions:
            regions.install()

    def _is_formed_by_layer(self, *, is_on_policy: bool) -> bool:
        """Return whether to form by layer; `auto` compares the memory needed with the device's."""
        config, model, optimizer = self.config, self.student.model, self.optimizer
        if config.form == "whole" or self.backend.is_traced:
            return False
        if is_on_policy and optimizer.sharded:  # a rank generates at its own pace, without others
            return False
        learning = weights_in_scope(model, config.scope, config.kinds)
        parts = optimizer.ranks.size if optimizer.sharded else 1
        held = step_bytes(model, learning, config, self.dtype, parts=parts)
        room = (self.backend.memory_gib() or math.inf) * GIB
        by_layer = config.form == "layer" or held.total(by_layer=False) > HELD_SHARE * room
        if optimizer.sharded:  # ranks gather each layer together, so all must agree
            votes = torch.tensor(float(by_layer), device=self.student.device)
            optimizer.ranks.sum_([votes])
            by_layer = bool(votes)
        if not by_layer:
            return False
        logger.info(
            "weights are formed a layer at a time (--form): %.3g GiB are held beside activations, "
            "%.3g GiB if all were formed at once",
            held.total(by_layer=True) / GIB,
            held.total(by_layer=False) / GIB,
        )
        return True

    def __call__(self, batches: Sequence[Batch], step: int, stop: str | None = None) -> StepResult:
        """Take optimizer step number `step` over equally shaped micro-batches.

        The batches may be in pinned host memory or on the device. `stop` is this rank's reason to
        stop; None to continue.

        Raises:
            ConfigError: too many consecutive steps each compile a new graph.
        """
        with self._compiles.step(tuple(batches[0].mask.shape)):
            ranks = self.optimizer.ranks
            is_packed = any(has_documents(batch.position_ids) for batch in batches)
            batches = [
                Batch(*map(self.backend.tracing.divided, batch.to(self.student.device)))
                for batch in batches
            ]
            valid = torch.stack([batch.mask.sum() for batch in batches]).sum()
            if ranks.size > 1:
                shared = torch.stack([valid, torch.full_like(valid, stop is not None)])
                ranks.sum_([shared])
                valid = shared[0]
                self.is_stop_agreed = self._agree_on_stop(shared[1])
            else:
                self.is_stop_agreed = stop is not None
            self._note_words(batches)
            with self.backend.matmul_precision(self.config.dtype):
                self._form()
                sums = self._micro_steps(batches, valid.clamp(min=1), is_packed)
            norm = self.optimizer.step(step)
            self._taken += 1
            self.nan_flag = self.nan_flag + 0.0 * (norm + sums[-1])
            names = (*(part.prefix + name for part in self._parts for name in part.losses), "loss")
            by_name = dict(zip(names, sums.unbind(), strict=True))
            self.backend.step_end()
            positions = ranks.size * sum(batch.mask.numel() for batch in batches)
            return StepResult(by_name, norm, valid, positions)

    def _form(self) -> None:
        """Form the weights that moved; from the second recorded step on as a recorded graph."""
        if self._forming is not None:
            return self._forming()
        form, weights = self._regions[0].form, quant_weights(self.student.model).values()
        form(self.dtype)
        is_anew = not (self.forms_by_layer or self.optimizer.hosted)
        # the recorded step reads weights at the addresses that every forming writes to
        if self._graph is not None and is_anew and any(weight.learns() for weight in weights):
            self._forming, _ = self.backend.record(partial(form, self.dtype))
        return None

    def _note_words(self, batches: list[Batch]) -> None:
        """Note the words that batches of all ranks name, if a table learns from them alone."""
        head, is_online = self.student.head, any(part.is_online for part in self._parts)
        if is_online or not isinstance(head, TableHead) or not head.table.learns():
            return
        kinds = kinds_read(self._parts[0].losses)
        words = [WordsRead.of(valid_rows(to_targets(each)), kinds).ids() for each in batches]
        head.name_(torch.cat(words), self.optimizer.ranks)

    def _agree_on_stop(self, count: Tensor) -> bool:
        """Return whether any rank wanted to stop `decision_lag` steps ago.

        All ranks read the same step's `count`, so late that no host waits for its device.
        """
        self._stops.append((self.backend.to_host(count), self.backend.finished()))
        if len(self._stops) <= self.backend.decision_lag:
            return False
        decided, wait = self._stops.popleft()
        wait()
        return bool(decided)

    def warm_up(self, batches: Sequence[Batch], step: int) -> None:
        """Compile what steps over such batches run, without changing parameters or moments."""
        with self.backend.matmul_precision(self.config.dtype):
            form_moved_weights(self.student.model, self.dtype)
        self.nan_flag = none = torch.zeros((), device=self.student.device)
        with self.optimizer.rehearsing():
            for _ in range(EAGER_STEPS):
                result = self(batches, step)
            if self.optimizer.skip_bias_correction():
                result = self(batches, step)
        self.sum_over_ranks(result)
        self.nan_flag = none
        self.backend.synchronize()
        self._compiles.expect_none()

    def _micro_steps(self, batches: list[Batch], valid: Tensor, is_packed: bool) -> Tensor:
        kind = (batches[0].mask.shape, is_packed)
        is_known = kind in self._ran
        self._ran.add(kind)
        if self._taken == 0:
            return self._first(batches, valid, is_packed)
        is_small = batches[0].mask.numel() <= GRAPH_TOKENS
        # a captured graph would contain collectives
        is_whole = not (self.optimizer.sharded or self.optimizer.ranks.is_safe)
        is_worth = is_small and is_whole and self.fallback is None and self.backend.records
        if is_worth and is_known and self._graph is None:
            if self._waits is None:
                with self.backend.waits() as self._waits:
                    sums = self._run(batches, valid, is_packed)
                if self._waits:
                    logger.info("steps are not recorded: the host waits in %s", self._waits[0])
                return sums
            if not self._waits:
                self._graph = StepGraph(
                    self.run_micro_step,
                    batches[0],
                    valid,
                    is_packed=is_packed,
                    optimizer=self.optimizer,
                    backend=self.backend,
                )
        if self._graph is not None and self._graph.fits(batches, is_packed):
            return self._graph.run(batches, valid)
        return self._run(batches, valid, is_packed)

    def _run(self, batches: list[Batch], valid: Tensor, is_packed: bool) -> Tensor:
        return cast(Tensor, sum(self.run_micro_step(b, valid, is_packed) for b in batches))

    def _first(self, batches: list[Batch], valid: Tensor, is_packed: bool) -> Tensor:
        """Take the first step, which compiles; if compilation fails, run all layers uncompiled."""
        try:
            return self._run(batches, valid, is_packed)
        except refusals() as error:
            self.fallback = warn_uncompiled(error)
        self.optimizer.forget_gradients()
        self._is_compiled = False
        for regions in self._regions:
            regions.remove()
            regions.is_compiled = False
            regions.install()
        return self._run(batches, valid, is_packed)

    def run_micro_step(self, batch: Batch, valid: Tensor, is_packed: bool) -> Tensor:
        """Run forward and backward of one micro-batch; return each loss's sum and the total."""
        batches = [Batch(*(tensor[part.rows] for tensor in batch)) for part in self._parts]
        pairs = zip(self._parts, batches, strict=True)
        targets = [self._targets(part, rows, is_packed) for part, rows in pairs]
        with self.backend.autocast(self.dtype):
            hidden = self.student.hidden(batch.input_ids, batch.position_ids, is_packed=is_packed)
        head, temperature = self.student.head_in(self.dtype), self.config.temperature
        sums, total = [], None
        for part, taught in zip(self._parts, targets, strict=True):
            flat = hidden[part.rows].flatten(0, 1).to(self.dtype)
            if isinstance(taught, Targets):
                found = loss_from_hidden(flat, head, taught, part.losses, temperature=temperature)
            else:
                found = loss_from_teacher(flat, head, taught, part.losses, temperature=temperature)
            sums += [found[name].detach() for name in part.losses]
            total = found["loss"] if total is None else total + found["loss"]
        total = cast(Tensor, total)
        self.optimizer.scale_loss(total / valid).backward()
        return torch.stack([*sums, total.detach()])

    @torch.no_grad()
    def _targets(self, part: _Part, batch: Batch, is_packed: bool) -> Targets | OnlineTargets:
        """Return the batch's targets, or the teacher's hidden states for the batch."""
        if not part.is_online or self.teacher is None:
            return to_targets(batch)
        hidden = self.teacher.hidden(batch.input_ids, batch.position_ids, is_packed=is_packed)
        return OnlineTargets(
            batch.mask.flatten(),
            batch.labels.flatten(),
            hidden.flatten(0, 1),
            self.teacher.head_in(self.dtype),
        )

    def numbers(self) -> dict[str, Tensor]:
        """Return the student's tensors on this rank and the optimizer's, by name."""
        return {**self.student.model.state_dict(keep_vars=True), **self.optimizer.moving()}

    def sum_over_ranks(self, result: StepResult) -> tuple[StepResult, Tensor]:
        """Sum the losses over ranks; also return NaN if any rank ever saw NaN or infinity, else 0.

        All ranks call this together, and none waits for its device. It checks losses and gradients
        of every step so far, and the present `numbers`.
        """
        found = [
            *result.sums.values(),
            self.nan_flag + nan_if_not_finite(self.numbers(), self.student.device),
        ]
        if self.optimizer.ranks.size > 1:
            total = torch.stack(found)
            self.optimizer.ranks.sum_([total])
            found = list(total.unbind())
        self.backend.step_end()
        *sums, anywhere = found
        return result._replace(sums=dict(zip(result.sums, sums, strict=True))), anywhere

    def compile_facts(self) -> dict[str, object]:
        """Return whether layers are compiled, with counts of graphs and recompilations."""
        found = compile_facts()
        return {
            "compiled": self._is_compiled,
            "graphs": found.graphs - self._before.graphs + self._compiles.compiled,
            "kept_graphs": found.kept - self._before.kept,
            "recompiles": found.recompiles - self._before.recompiles + self._compiles.anew,
            "cuda_graph": self._graph is not None,
            "forms_by_layer": self.forms_by_layer,
            "fallback": self.fallback,
            **self._compiles.facts(),
        }

    def close(self) -> None:
        """Drop the captured graph and the formed weights; restore uncompiled layers."""
        self._graph = self._forming = None
        for regions in self._regions:
            regions.remove()
        self._end_precision()
        release_weights(self.student.model)


def _parts_of(
    losses: dict[str, float], batch_size: int, own: OwnRows | None, has_teacher: bool
) -> list[_Part]:
    """Return the parts of a micro-batch by their losses, in row order."""
    if own is None:
        return [_Part(slice(None), losses, has_teacher)]
    cached = _Part(slice(0, batch_size - own.number), losses, not own.reads_cache)
    mine = _Part(slice(cached.rows.stop, None), own.losses, True, OWN_WORDS)
    return [cached, mine] if cached.rows.stop else [mine]


def has_documents(position_ids: Tensor) -> bool:
    """Return whether a row has several documents; true where a check would wait for the device."""
    if position_ids.shape[1] <= MAX_TILE or position_ids.device.type != "cpu":
        return True
    return bool((position_ids[:, 1:] == 0).any())


def rank_indices(config: StepConfig, step: int, draw: Draw, ranks: Ranks) -> np.ndarray:
    """Return the sequences of a step for this rank: `(grad_accum_steps, batch_size)` int64.

    All ranks together see the same sequences as one rank with proportionally more micro-batches, so
    a run may be resumed with another number of ranks at the same global batch.
    """
    count = config.sequences_per_step * ranks.size
    indices = draw(config.seed, step, count)
    return indices.reshape(-1, ranks.size, config.batch_size)[:, ranks.rank]
