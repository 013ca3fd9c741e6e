"""The whole optimizer step in jax, from traced pieces: the layers are a loop, as is the head.

Shapes: B sequences, S positions, T = B * S tokens, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from qat.bench.tpu_plan import xla
from qat.bench.tpu_plan.pieces import Traceable
from qat.bench.tpu_plan.xla import jax, jnp, lax
from qat.data.packing import Batch
from qat.kernels.head import BLOCK_TOKENS
from qat.losses.targets import Targets

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
    run = {name: xla.jax_function(graph) for name, graph in vars(pieces).items()}
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
        norm, factor = _clip(found, student.clip_grad_norm)
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
