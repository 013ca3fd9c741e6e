"""On-policy training: the student continues prompts of the cache and learns from the teacher.

A share of each step's rows is of this kind. Every few steps a rollout generates the rows of all
steps until the next one, with the weights as formed for training, which are those of a checkpoint.
So at most one rollout is waiting to be used. The prompt of a row and its random numbers depend only
on the seed, the step and the row's number in the step.

Shapes: B sequences of a micro-batch, n of them the student's own, S positions.
"""

import copy
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend import device as backends
from qat.data.packing import NO_LABEL, Batch
from qat.data.reader import TeacherCache
from qat.extensions.decode.slots import Batch as Slotted
from qat.extensions.decode.slots import Request, Sampler, Slots, SlotStep, Waves, in_order
from qat.extensions.decode.step import DecodeStep, dense_linear
from qat.generate.sampling import Sampling
from qat.generate.text import closing_tokens, repeated_frac
from qat.models.decoding import ROLLOUTS
from qat.models.language_model import LanguageModel
from qat.nn.lut_embedding import (
    QuantEmbedding,
    QuantTable,
    TableHead,
    TiedLutHead,
    quant_tables,
)
from qat.nn.quant_linear import quant_linears
from qat.nn.quant_weight import QuantWeight
from qat.nn.step import form_moved_weights
from qat.ranks import ALONE, Ranks
from qat.train.config import ALMOST_WHOLE, RolloutConfig
from qat.train.step import rank_indices
from qat.train.step_config import StepConfig

logger = logging.getLogger(__name__)

MOST_POSITIONS = 2**16
"""Most positions over all rows generated at a time; the KV cache grows with it."""


class OwnRow(NamedTuple):
    """A prompt and the student's continuation."""

    ids: list[int]
    begin: int
    """Index of the first generated token."""


class Rollouts:
    """The student's own rows of each step.

    All ranks use it together; each has rows of its own.
    """

    def __init__(
        self,
        student: LanguageModel,
        cache: TeacherCache,
        config: RolloutConfig,
        step: StepConfig,
        *,
        end: int | None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Set up rollouts; call it before the layers of the student are compiled.

        Args:
            step: the steps whose last rows these are.
            end: the tokenizer's end-of-text token, in addition to those that the model names.
        """
        self._cache, self._step, self._ranks = cache, step, ranks
        self._every = config.rollout_every
        self._own_rows = round(config.on_policy * step.batch_size)
        """Rows of a micro-batch that hold the student's own text."""
        S, places = cache.sequence_length, np.arange(step.batch_size + 1)
        # rounded down in the same way for every split into micro-batches: the split changes no row
        before = np.floor(places * config.on_policy + ALMOST_WHOLE)
        self._is_own = np.diff(before) > 0
        self.order = np.argsort(self._is_own, kind="stable")
        """`(B,)`: order of a micro-batch's sequences, those that only give a prompt last."""
        self.longest = config.rollout_tokens or max(1, 3 * S // 4)
        """Most tokens that the student generates in a row."""
        self.ends = frozenset(closing_tokens(student, end))
        """Tokens that end a row."""
        rows = self._own_rows * step.grad_accum_steps * self._every
        slotted = Slotted(
            num_slots=min(rows, max(1, MOST_POSITIONS // S)),
            num_positions=S,
            max_new_tokens=self.longest,
            sampling=Sampling(config.rollout_temperature),
            ends=self.ends,
        )
        self._sampler = RolloutSampler(student, slotted, step.dtype)
        self._begun = 0
        """The step whose weights generated the latest rollout."""
        self._waiting: dict[int, list[OwnRow]] = {}
        """This rank's rows by step, one micro-batch after the other."""
        self._now: tuple[int, list[OwnRow]] = (0, [])
        """The latest step used, and its rows."""
        self._has_warned = False

    def needed(self, step: int) -> bool:
        """Return whether `into` generates a rollout for this step."""
        return step not in self._waiting

    def into(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Return the micro-batches of a step, on the host, the student's rows being the last."""
        if self.needed(step):
            self._roll(step)
        rows, n = self._waiting.pop(step), self._own_rows
        self._now = step, rows
        parts = [rows[start : start + n] for start in range(0, len(rows), n)]
        return [laid_in(batch, part) for batch, part in zip(batches, parts, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the latest step's rows over all ranks; all ranks call this together.

        Tokens are counted where the student generated them, including the one that ends a row.
        """
        step, rows = self._now
        said = [row.ids[row.begin :] for row in rows]
        ended = sum(ids[-1] in self.ends for ids in said)
        repeated = sum(map(repeated_frac, said))
        found = [len(said), sum(map(len, said)), ended, repeated]
        total = torch.tensor(found, dtype=torch.float32, device=self._ranks.device)
        self._ranks.sum_([total])
        count, tokens, ended, repeated = total.tolist()
        return {
            "own_tokens": tokens,
            "own_length": tokens / count,
            "own_ended_frac": ended / count,
            "own_repeated_frac": repeated / count,
            "own_lag_steps": step - self._begun,
        }

    def state(self) -> dict[str, Tensor]:
        """Return all ranks' waiting rows for a checkpoint; all ranks call this together."""
        if not self._waiting:
            return {}
        S, n, (first, *_) = self._cache.sequence_length, self._own_rows, self._waiting
        mine = torch.zeros(len(self._waiting), len(self._waiting[first]), 1 + S, dtype=torch.int64)
        for of_step, rows in zip(mine, self._waiting.values(), strict=True):
            for stored, row in zip(of_step, rows, strict=True):
                stored[0] = row.begin
                stored[1 : 1 + len(row.ids)] = torch.tensor(row.ids) + 1  # 0 means no token
        mine = mine.unflatten(1, (-1, n))
        whole = mine.new_zeros(*mine.shape[:2], self._ranks.size, *mine.shape[2:])
        whole[:, :, self._ranks.rank] = mine
        self._ranks.sum_([whole])
        steps = torch.tensor([first, self._begun])
        return {f"{ROLLOUTS}rows": whole.flatten(1, 3), f"{ROLLOUTS}steps": steps}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a checkpoint's `state`, on any number of ranks."""
        if f"{ROLLOUTS}rows" not in state:
            return
        first, self._begun = state[f"{ROLLOUTS}steps"].tolist()
        parts = state[f"{ROLLOUTS}rows"].unflatten(1, (-1, self._ranks.size, self._own_rows))
        for step, rows in enumerate(parts[:, :, self._ranks.rank].flatten(1, 2).tolist(), first):
            self._waiting[step] = [
                OwnRow([token - 1 for token in ids if token], begin) for begin, *ids in rows
            ]

    def requests(self, step: int) -> list[Request]:
        """Return the generation requests for this rank's rows of a step, by micro-batch."""
        seed, ranks = self._step.seed, self._ranks
        count = self._step.sequences_per_step * ranks.size
        numbers = step * count + np.arange(count)
        numbers = numbers.reshape(-1, ranks.size, self._step.batch_size)[
            :, ranks.rank, self._is_own
        ]
        sequences = rank_indices(self._step, step, self._cache.indices, ranks)[:, self._is_own]
        batch = self._cache.batch(sequences.flatten(), targets=())
        S, found = self._cache.sequence_length, []
        for place, number in enumerate(numbers.flatten().tolist()):
            row = Batch(*(tensor[place] for tensor in batch))
            ids = prompt_of(row, number, S - self.longest)
            found.append(Request(ids, min(self.longest, S - len(ids)), (seed, number)))
        return found

    def _roll(self, step: int) -> None:
        """Generate the rows of this step and of all others until the next rollout."""
        steps = range(step, step - step % self._every + self._every)
        requests = [self.requests(each) for each in steps]
        said = iter(self._sampler.sample([request for each in requests for request in each]))
        self._begun = step
        self._waiting = {
            each: [OwnRow([*request.ids, *next(said)], len(request.ids)) for request in asked]
            for each, asked in zip(steps, requests, strict=True)
        }
        drawn = [row.ids[row.begin :] for rows in self._waiting.values() for row in rows]
        if not self._has_warned and all(ids[0] in self.ends for ids in drawn):
            self._has_warned = True
            logger.warning(
                "step %d: the student ends all %d rows of its own at once, expected words; it "
                "learns from that alone: begin with --on-policy 0, or look at the prompts' ends",
                step,
                len(drawn),
            )


def prompt_of(row: Batch, number: int, most: int) -> list[int]:
    """Return the prompt from one sequence of the cache, a `Batch` without its first dimension.

    `number` selects one of the sequence's documents in turn. If its targets start after its
    beginning (after a chat's question), the prompt is everything before them; otherwise its first
    half, at most `most` tokens.
    """
    starts = (row.position_ids == 0).nonzero()[:, 0].tolist()
    bounds = pairwise([*starts, len(row.input_ids)])
    documents = [(row.input_ids[a:b], row.mask[a:b].nonzero()[:, 0].tolist()) for a, b in bounds]
    learned = [(ids, places) for ids, places in documents if places]
    # an imported cache may have a sequence without targets
    ids, places = learned[number % len(learned)] if learned else (row.input_ids, [0])
    half = max(1, (places[-1] + 2) // 2)
    return ids[: places[0] + 1 if places[0] else min(half, most)].tolist()


def laid_in(batch: Batch, rows: Sequence[OwnRow]) -> Batch:
    """Overwrite the last rows of the batch with these; return the batch.

    Only predictions of the student's own tokens count in them.
    """
    B, S = batch.mask.shape
    for place, row in enumerate(rows, B - len(rows)):
        ids = torch.tensor(row.ids)
        inside = slice(row.begin - 1, len(ids) - 1)
        batch.input_ids[place] = 0
        batch.input_ids[place, : len(ids)] = ids
        batch.position_ids[place] = torch.arange(S)
        batch.position_ids[place, len(ids) :] -= len(ids)  # padding does not belong to the document
        batch.mask[place] = False
        batch.mask[place, inside] = True
        batch.labels[place] = NO_LABEL
        batch.labels[place, inside] = ids[row.begin :]
    return batch


class RolloutSampler:
    """Generates continuations with the student's weights as formed for the next step.

    If the layers are supported, it uses a dense copy of the student in the compute dtype, which is
    updated in place, so that captured graphs stay valid; otherwise the student itself.
    """

    def __init__(self, student: LanguageModel, slotted: Slotted, precision: str) -> None:
        self._student, self._precision = student, precision
        self._backend = backends.on(student.device)
        self._dtype = self._backend.dtype(precision)
        self._is_copied = DecodeStep.fits(student)
        self._formed: list[tuple[Tensor, QuantWeight]] = []
        """The dense copy's weights, each with the quantized one that it comes from."""
        self._learning: list[tuple[Tensor, nn.Parameter]] = []
        """The dense copy's other parameters that learn, each with the student's."""
        self._sampler: Sampler = Waves(student, slotted)
        if not self._is_copied:
            return
        with self._backend.matmul_precision(self._precision):
            dense = dense_copy(student.model, self._dtype)
            copied = LanguageModel(dense)
            copied.num_words = student.num_words
            self._sampler = Slots(SlotStep(copied, slotted.num_slots), slotted)
        tables = {n: table for n, table in quant_tables(student.model).items() if table.learns()}
        formed = {**quant_linears(student.model), **tables}
        self._formed = [
            (cast(Tensor, dense.get_submodule(name).weight), each) for name, each in formed.items()
        ]
        self._learning = [
            (dense.get_parameter(name), parameter)
            for name, parameter in student.model.named_parameters()
            if parameter.requires_grad and name.rpartition(".")[0] not in formed
        ]

    @torch.no_grad()
    def sample(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the new tokens of each row, including the one that ends it."""
        # the copy already computes in its own dtype
        casting = nullcontext() if self._is_copied else self._backend.autocast(self._dtype)
        with self._backend.matmul_precision(self._precision), casting:
            if self._is_copied:
                for weight, quantized in self._formed:
                    quantized.quantized_weight(self._dtype, out=weight)
            else:
                form_moved_weights(self._student.model, self._dtype)
            for copied, parameter in self._learning:
                copied.copy_(parameter)
            return in_order(self._sampler.sample(requests))


def dense_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy a model with plain linears that hold formed weights; in `dtype`, except norms.

    So do an embedding and a head that learn; others stay packed.
    """
    plain = {id(linear): dense_linear(linear, dtype) for linear in quant_linears(model).values()}
    rows = {}
    for module in model.modules():
        if isinstance(module, TableHead) and module.table.learns():
            plain[id(module)] = dense_linear(module, dtype)
        elif isinstance(module, QuantEmbedding) and module.learns():
            rows[id(module)] = nn.Embedding.from_pretrained(module.quantized_weight(dtype))
    for module in model.modules():
        if isinstance(module, TiedLutHead) and id(module.table) in rows:
            plain[id(module)].weight = rows[id(module.table)].weight
    # copies of the quantizers, shared among linears like the student's
    own = copy.deepcopy([linear.activation for linear in plain.values()])
    for linear, quantizer in zip(plain.values(), own, strict=True):
        linear.activation = quantizer
    dense = copy.deepcopy(model, plain | rows)
    for module in dense.modules():
        if isinstance(module, nn.Linear | nn.Embedding | QuantTable):
            module.to(dtype)
    return dense.requires_grad_(False).eval()
