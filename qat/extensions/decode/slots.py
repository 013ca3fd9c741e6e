"""Continuous batching: continue many prompts at once, and replace each finished row by the next.

A row of the batch is a slot. Each slot has its own position, so a new prompt can start in the slot
of a finished row while all others continue. A step is captured once as a graph and replayed, and
the host checks for finished rows after each round of a few steps. Models with unsupported layers
use transformers' own loop instead, with prompts of equal length batched together.

A row's draws depend only on its own random stream. Its logits may differ in their last bits with
the rows that are computed beside it, so equal requests give equal tokens on the same device only as
the same list, from its first row on, and with the same number of slots.

Shapes: B slots, T tokens of prompts, N positions of a slot, M new tokens of a row, V words.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LogitsProcessor

from qat.backend.device import on
from qat.extensions.decode.kernels.add_norm import add_norm_
from qat.extensions.decode.kernels.cache import EVERY, Cache, Scoring
from qat.extensions.decode.kernels.draw_next import draw_next
from qat.extensions.decode.kernels.lut_gemm import Part, is_one_product, lut_gemm
from qat.extensions.decode.kernels.lut_rows import LutRows
from qat.extensions.decode.kernels.slot_attention import place_heads, slot_attention
from qat.extensions.decode.step import DecodeLayer, DecodeStep, FusedLinears, form_rows
from qat.generate.sampling import Sampling
from qat.generate.text import continue_rows, generation_config
from qat.kernels.glu import silu_mul
from qat.models.language_model import HALVES, LanguageModel
from qat.nn.activation import ActivationQuantizer, read
from qat.nn.step import form_weights
from qat.quant.kv import PackedHeads

STEPS, MANY_SLOTS = 4, 1024
"""The number of decoding steps between two checks for finished rows, and the number of slots from
which on it is doubled.

In a large batch some rows end in every round, and the host launches the prefill of the rows that
replace them kernel by kernel. Two profiles of 24 layers show about 15 and 50 ms for that; in the
second one other processes shared the cores. Four steps and a prefill keep an H200 busy for 38 ms at
1,536 slots. A slot is idle from the end of its row to the end of the next round: in a simulation of
rows of 205 tokens that is 2.6% of all steps in rounds of 4, and 5.3% in rounds of 8.
"""
PREFILL_TOKENS = 2**14
"""Maximum number of prompt tokens in one prefill."""
PREFILL_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's kernels that a prefill may use: all but cuDNN's, which plans every new shape.

A plan takes the host up to 0.1 s, and nearly every round has a prefill of another shape: planning
was about 25 of the first 160 s of a run.
"""
ROWS_AHEAD = 2**12
"""Number of waiting rows among which `Waves` looks for rows of equal lengths."""
UNIT = 16
"""Prompt lengths of one prefill are padded to a multiple of this."""
LEAST_WEIGHTS, WEIGHTS_A_SLOT, MOST_SLOTS = 2**23, 5 * 2**17, 48
"""Minimum numbers of weights in total and per slot, and maximum number of slots, for a linear to
stay packed: within them the 2-bit product is faster than the bfloat16 one on an H200 and an H100
(latest lut_gemm in speedrun/records)."""

Attend = Callable[[Tensor, Cache, Scoring], Tensor]
"""Attention of one layer: projections, cache and scoring to `(T, H D)`."""


class Request(NamedTuple):
    """A row to sample."""

    ids: list[int]
    """Token ids of the prompt, at least one."""
    limit: int
    """Maximum number of new tokens."""
    key: tuple[int, int]
    """Key of the row's random stream: a seed and the row number."""

    def uniforms(self) -> np.ndarray:
        """Return `(limit,)` float32 in [0, 1), one per new token, in order.

        They come from Philox, a counter-based generator (Salmon et al., SC 2011), in NumPy's
        implementation, keyed by the row.
        """
        bits = np.random.Philox(key=np.array(self.key, dtype=np.uint64))
        return np.random.Generator(bits).random(self.limit, dtype=np.float32)


@dataclass(frozen=True)
class Batch:
    """Sizes and sampling parameters of a batch."""

    num_slots: int
    """Number of rows in flight."""
    num_positions: int
    """Maximum number of tokens of a row, including its prompt."""
    max_new_tokens: int
    """Maximum number of new tokens of a row."""
    sampling: Sampling
    ends: Collection[int]
    """Tokens that end a row."""


class Sampler(Protocol):
    """The protocol of samplers, which continue prompts."""

    def sample(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[int]]]:
        """Yield the rows as they end, each as its place in `requests` and its new tokens.

        The token that ends a row is one of them. `requests` is read as slots become free.
        """


def in_order(rows: Iterable[tuple[int, list[int]]]) -> list[list[int]]:
    """Return the new tokens of all rows that a sampler yields, in the order of their requests."""
    return [ids for _, ids in sorted(rows)]


def open_sampler(model: LanguageModel, batch: Batch) -> Sampler:
    """Return the fastest sampler that supports `model`, whose weights it modifies."""
    if not on(model.device).is_traced and DecodeStep.fits(model):
        return Slots(SlotStep(model, batch.num_slots), batch)
    form_weights(model.model, model.dtype)
    return Waves(model, batch)


class Dense(NamedTuple):
    """A linear layer with a dense weight in the compute dtype."""

    weight: Tensor
    bias: Tensor | None
    activation: ActivationQuantizer | None
    """Quantizer of the input."""

    @classmethod
    def of(cls, linears: FusedLinears, dtype: torch.dtype) -> Self:
        """Join linears with the same input into one with a formed weight."""
        members = [
            rows if isinstance(rows, Tensor)
            else form_rows(rows, rows.scales.new_empty(rows.shape, dtype=dtype))
            for rows in linears.rows
        ]  # fmt: skip
        weight = members[0] if len(members) == 1 else torch.cat(members)
        bias = None if linears.bias is None else linears.bias.to(dtype)
        return cls(weight, bias, linears.activation)

    @property
    def nbytes(self) -> int:
        """Size of the weight in bytes."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: `(T, I)` to `(T, O)`."""
        return F.linear(read(self, x), self.weight, self.bias)


class Packed(NamedTuple):
    """A linear layer whose weight stays packed and is dequantized inside the matmul."""

    parts: list[Part]
    bias: Tensor | None
    activation: ActivationQuantizer | None
    """Quantizer of the input."""

    @property
    def nbytes(self) -> int:
        """Size of indices and scales in bytes."""
        return sum(part.octets.nbytes + part.scales.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: `(T, I)` to `(T, O)`."""
        return lut_gemm(read(self, x), self.parts, self.bias)


def linear_of(linears: FusedLinears, dtype: torch.dtype, num_slots: int) -> Dense | Packed:
    """Join linears with the same input into one, packed where that is faster."""
    rows = linears.rows[0]
    if len(linears.rows) == 1 and isinstance(rows, LutRows):
        parts, weights = Part.of(rows), rows.shape.numel()
        is_large = weights >= max(LEAST_WEIGHTS, num_slots * WEIGHTS_A_SLOT)
        if is_large and num_slots <= MOST_SLOTS and is_one_product(parts, dtype):
            return Packed(parts, linears.bias, linears.activation)
    return Dense.of(linears, dtype)


class SlotLayer(NamedTuple):
    """The linears, norms and scoring of one layer."""

    qkv: Dense | Packed
    heads: Scoring
    out: Dense | Packed
    gate_up: Dense | Packed
    down: Dense | Packed
    before: Tensor
    """Gain of the norm before the attention, `(D,)` float32."""
    between: Tensor
    """Gain of the norm before the gated unit, `(D,)` float32."""

    @classmethod
    def of(cls, layer: DecodeLayer, dtype: torch.dtype, num_slots: int) -> Self:
        """Build the layer for this number of slots."""
        members = (
            linear_of(part, dtype, num_slots) if isinstance(part, FusedLinears) else part
            for part in layer
        )
        return cls(*members)


class SlotStep:
    """Computes one token of every slot; `prefill` processes the prompts.

    The result equals the model's up to summation order and rounding between layers, of which there
    is less here: the residual stream is float32. The model's packed weights are formed once, except
    those that are faster packed at this number of slots; the model is modified.
    """

    def __init__(self, model: LanguageModel, num_slots: int) -> None:
        self._step, self._num_slots = DecodeStep(model), num_slots
        self.device, self.dtype = model.device, model.dtype
        self._layers = [SlotLayer.of(block, model.dtype, num_slots) for block in self._step.blocks]
        self._head = model.head_in(model.dtype)

    def read_bytes(self) -> int:
        """Return the bytes of weights that one step reads: the embedding table is not counted."""
        linears = [p for layer in self._layers for p in layer if isinstance(p, Dense | Packed)]
        return self._head.weight.nbytes + sum(linear.nbytes for linear in linears)

    def new_caches(self, num_positions: int) -> list[Cache]:
        """Allocate empty caches of all layers, and compute the rotary angles of their positions."""
        self._angles = self._step.angles(num_positions)
        return self._step.new_caches(self._num_slots, num_positions)

    @torch.no_grad()
    def logits(self, ids: Tensor, positions: Tensor, caches: Sequence[Cache]) -> Tensor:
        """Return logits `(B, V)` float32 after the tokens `ids` `(B,)` at `positions` `(B,)`.

        Writes keys and values into `caches`. Does not synchronize with a GPU, so that it can be
        captured.
        """

        def attend(qkv: Tensor, cache: Cache, heads: Scoring) -> Tensor:
            query = place_heads(qkv, cache, None, positions, self._angles, heads)
            return slot_attention(query, cache, positions, heads.scaling)

        hidden = read(self._step.head, self._hidden(ids, caches, attend))
        is_half = self.dtype in HALVES
        return self._head.exact_logits(hidden) if is_half else self._head.logits(hidden)

    @torch.no_grad()
    def prefill(self, ids: Tensor, slots: Tensor, caches: Sequence[Cache]) -> None:
        """Write keys and values of `ids` `(B, T)` into `slots` `(B,)`, from position 0 on.

        Prompts may be padded at the end: the padding's entries are overwritten before they are
        read.
        """
        B, T = ids.shape
        of_tokens = slots.repeat_interleave(T)
        positions = torch.arange(T, device=self.device).repeat(B)

        def attend(qkv: Tensor, cache: Cache, heads: Scoring) -> Tensor:
            facts = of_tokens, positions, self._angles, heads
            placed = place_heads(qkv, cache, *facts, has_keys=True)
            _, J, _, D = cache.shape
            H = placed.shape[1] - J
            query, keys = placed.view(B, T, H + J, D).transpose(1, 2).split([H, J], 1)
            values = qkv.view(B, T, -1, D).transpose(1, 2)[:, H + J :]
            if isinstance(cache.keys, PackedHeads):  # the steps read rounded ones, and so do these
                keys, values = cache.at(slots, EVERY, slice(T))
            said = F.scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=heads.scaling, enable_gqa=True
            )
            return said.transpose(1, 2).reshape(B * T, -1)

        with sdpa_kernel(PREFILL_ATTENTION):
            self._hidden(ids.flatten(), caches, attend)

    def _hidden(self, ids: Tensor, caches: Sequence[Cache], attend: Attend) -> Tensor:
        """Return the last hidden states `(T, D)` of the tokens `ids` `(T,)`."""
        residual = self._step.embedding(ids[:, None])[:, 0].float()
        eps, delta = self._step.eps, None
        for layer, cache in zip(self._layers, caches, strict=True):
            x = add_norm_(residual, delta, layer.before, eps, self.dtype)
            delta = layer.out(attend(layer.qkv(x), cache, layer.heads))
            x = add_norm_(residual, delta, layer.between, eps, self.dtype)
            delta = layer.down(silu_mul(layer.gate_up(x)))
        return add_norm_(residual, delta, self._step.last_gain, eps, self.dtype)


class SlotSnapshot(NamedTuple):
    """A snapshot of the slots on the host, taken after a round of steps."""

    turn: int
    state: Tensor
    """A row `(2 + steps)` for each of the B slots: the number of new tokens that remain, the number
    that were drawn, and the last `steps` new tokens; fewer are preceded by copies of the first."""
    wait: Callable[[], None]
    """Waits for the copy; call it before reading `state`."""


class Slots:
    """A batch of independent slots on top of `SlotStep`.

    On a GPU the next round of steps is launched before the host reads which rows finished in the
    last one, so the GPU stays busy while new rows are prepared.
    """

    def __init__(self, step: SlotStep, batch: Batch) -> None:
        self._step, self._batch = step, batch
        B, M, device = batch.num_slots, batch.max_new_tokens, step.device
        self._lag = 1 if on(device).decision_lag else 0
        # of the batch alone: which rows are computed beside each other must not depend on speed
        self._steps = STEPS if B < MANY_SLOTS else 2 * STEPS
        N = -(-batch.num_positions // UNIT) * UNIT
        self._caches = step.new_caches(N)
        self._ends = torch.tensor(sorted(batch.ends), dtype=torch.int64, device=device)
        self._token = torch.zeros(B, dtype=torch.int64, device=device)
        self._position, self._count, self._left = (self._token.clone() for _ in range(3))
        # column M absorbs the writes of idle slots
        self._said = self._token.new_zeros(B, M + 1)
        self._uniforms = torch.zeros(B, M + 1, device=device)
        self._latest = torch.arange(-self._steps, 0, device=device)
        self._advance: Callable[[], None] = self._step_all
        if on(device).records:
            self._step_all()  # a warm-up while all slots are idle
            self._advance, _ = on(device).record(self._step_all)

    def sample(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[int]]]:
        """Sample rows in order, each in the first free slot; see `Sampler`."""
        B, M, steps = self._batch.num_slots, self._batch.max_new_tokens, self._steps
        waiting = enumerate(requests)
        # of each slot: the number of its row, -1 if it is free, and the round in which it began
        numbers, begins = np.full(B, -1), np.zeros(B, dtype=np.int64)
        # token n of a row stands in column steps + n
        said = np.zeros((B, steps + M), dtype=np.int32)
        columns = np.arange(steps)
        snapshots: deque[SlotSnapshot] = deque()
        for turn in itertools.count():
            free = np.flatnonzero(numbers < 0)
            begun = list(islice(waiting, len(free)))
            if begun:
                slots = free[: len(begun)]
                numbers[slots], begins[slots] = [number for number, _ in begun], turn
                self._begin(slots, [request for _, request in begun])
            elif len(free) == B:
                return
            for _ in range(steps):
                self._advance()
            snapshots.append(self._snapshot(turn))
            if len(snapshots) <= self._lag:
                continue
            snapshot = snapshots.popleft()
            snapshot.wait()
            state = snapshot.state.numpy()
            left, counts = state[:, 0], state[:, 1]
            np.put_along_axis(said, counts[:, None] + columns, state[:, 2:], axis=1)
            # skip rows that began after this snapshot of their slot
            ended = np.flatnonzero((left == 0) & (numbers >= 0) & (begins <= snapshot.turn))
            rows, numbers[ended] = numbers[ended].tolist(), -1
            for number, slot in zip(rows, ended, strict=True):
                yield number, said[slot, steps : steps + counts[slot]].tolist()

    def _begin(self, slots: np.ndarray, requests: Sequence[Request]) -> None:
        """Start rows in idle slots, without a GPU sync."""
        to_device = on(self._step.device).to_device
        uniforms = torch.zeros(len(slots), self._uniforms.shape[1])
        for row, request in zip(uniforms, requests, strict=True):
            row[: request.limit] = torch.from_numpy(request.uniforms())
        facts = [(r.ids[-1], len(r.ids) - 1, 0, r.limit) for r in requests]
        places, values = to_device(torch.from_numpy(slots)), to_device(torch.tensor(facts))
        self._uniforms[places] = to_device(uniforms)
        state = (self._token, self._position, self._count, self._left)
        for tensor, value in zip(state, values.unbind(1), strict=True):
            tensor[places] = value
        for ids, rows in _filled([request.ids[:-1] for request in requests]):
            self._step.prefill(to_device(ids), places[to_device(rows)], self._caches)

    @torch.no_grad()
    def _step_all(self) -> None:
        """Draw one more token in every busy slot."""
        logits = self._step.logits(self._token, self._position, self._caches)
        count = self._count[:, None]
        sampling = self._batch.sampling
        token = draw_next(
            logits,
            self._uniforms.gather(1, count)[:, 0],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        self._said.scatter_(1, count, token[:, None])
        is_busy = self._left > 0
        is_last = (token[:, None] == self._ends).any(1) | (self._left == 1)
        self._token.copy_(token)
        self._count += is_busy
        self._left.copy_((self._left - 1) * (is_busy & ~is_last))
        # an idle slot stays at position 0, so that it attends to one position only
        self._position.copy_((self._position + 1) * (self._left > 0))

    def _snapshot(self, turn: int) -> SlotSnapshot:
        """Start copying the state of the slots to the host, without a GPU sync."""
        backend = on(self._step.device)
        latest = (self._count[:, None] + self._latest).clamp_min(0)
        counts = torch.stack([self._left, self._count], 1)
        state = torch.cat([counts, self._said.gather(1, latest)], 1)
        return SlotSnapshot(turn, backend.to_host(state), backend.finished())


class Waves:
    """Batches of prompts with equal lengths and limits, continued by the model's own loop.

    A batch runs until all its rows ended. Works for any causal language model, with its own KV
    cache.
    """

    def __init__(self, model: LanguageModel, batch: Batch) -> None:
        self._model, self._batch = model, batch

    def sample(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[int]]]:
        """Sample the oldest of the waiting rows together with those like it; see `Sampler`."""
        numbered = enumerate(requests)
        waiting = list(islice(numbered, ROWS_AHEAD))
        while waiting:
            shape = _lengths(waiting[0][1])
            like = [row for row in waiting if _lengths(row[1]) == shape]
            wave = dict(like[: self._batch.num_slots])
            yield from zip(wave, self._wave([*wave.values()], shape[1]), strict=True)
            waiting = [row for row in waiting if row[0] not in wave]
            waiting += islice(numbered, ROWS_AHEAD - len(waiting))

    def _wave(self, requests: Sequence[Request], limit: int) -> list[list[int]]:
        ids = torch.tensor([request.ids for request in requests])
        uniforms = torch.from_numpy(np.stack([request.uniforms() for request in requests]))
        # the processor draws, so that the most likely token is the drawn one
        config = generation_config(sorted(self._batch.ends), limit, temperature=0, top_p=1)
        drawing = _Drawing(uniforms, ids.shape[1], self._batch.sampling, self._model.num_words)
        return continue_rows(self._model, ids, config, processor=drawing)


def _lengths(request: Request) -> tuple[int, int]:
    """Return the lengths that are equal in all rows of a wave."""
    return len(request.ids), request.limit


class _Drawing(LogitsProcessor):
    """A logits processor that draws each row's token and masks all others."""

    def __init__(self, uniforms: Tensor, length: int, sampling: Sampling, num_words: int) -> None:
        self._uniforms, self._length, self._sampling = uniforms, length, sampling
        self._num_words = num_words

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `(B, V)` logits: 0 for the drawn token, -inf for all others."""
        uniforms = self._uniforms[:, input_ids.shape[1] - self._length].to(scores.device)
        sampling = self._sampling
        drawn = draw_next(
            scores[:, : self._num_words].float(),
            uniforms,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)


def _filled(prompts: Sequence[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield prompts of similar lengths as `(B, T)`, padded at the end, with their row numbers.

    Empty prompts are skipped. Each batch has at most `PREFILL_TOKENS` tokens, or one prompt.
    """
    order = sorted((row for row, ids in enumerate(prompts) if ids), key=lambda n: len(prompts[n]))
    while order:
        length = -(-len(prompts[order[0]]) // UNIT) * UNIT
        # shortest first; stop when padding all to the longest would exceed PREFILL_TOKENS
        taken = 1
        while taken < len(order):
            longer = -(-len(prompts[order[taken]]) // UNIT) * UNIT
            if (taken + 1) * longer > PREFILL_TOKENS:
                break
            length, taken = longer, taken + 1
        rows, order = order[:taken], order[taken:]
        filled = [prompts[row] + [0] * (length - len(prompts[row])) for row in rows]
        yield torch.tensor(filled), torch.tensor(rows)
