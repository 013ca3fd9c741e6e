"""Implementations of sparse attention for a given layer, and the check that they compute it.

Shapes: B rows, H query heads, K key-value heads, S positions, D head width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qat.extensions.nsa.attention import NUM_BRANCHES, activate_gates
from qat.extensions.nsa.kernels import decode, reference, router
from qat.extensions.nsa.kernels.config import PRESETS, NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, pool
from qat.extensions.nsa.kernels.select import select as select_blocks

BACKENDS = ("reference", "flex", "gather", "fla")
Pass = Literal["forward", "train", "decode"]


class Work(NamedTuple):
    """The sizes of an attention call."""

    length: int
    """S; in decode the positions so far, including the new one."""
    group: int
    """Query heads per key-value head, H / K."""
    key_heads: int
    width: int
    batch: int

    @property
    def heads(self) -> int:
        """Query heads, H."""
        return self.group * self.key_heads


class Layer(NamedTuple):
    """The inputs of a layer's attention."""

    query: Tensor
    """`(B, H, S, D)`, rotated; one position in decode."""
    key: Tensor
    """`(B, K, S, D)`, rotated."""
    value: Tensor
    """`(B, K, S, D)`."""
    raw_gates: Tensor
    """`(B, S, H, 3)`, before squashing."""


Attend = Callable[[Layer], Tensor]
"""A function from a layer to its attention `(B, S, H, D)`."""


def layer_of(work: Work, which: Pass, *, device: torch.device, dtype: torch.dtype) -> Layer:
    """Return random heads in the memory layout of projections."""
    generator = torch.Generator(device).manual_seed(0)
    queries = 1 if which == "decode" else work.length

    def drawn(length: int, *shape: int) -> Tensor:
        size = (work.batch, length, *shape)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    layer = Layer(
        drawn(queries, work.heads, work.width).transpose(1, 2),
        drawn(work.length, work.key_heads, work.width).transpose(1, 2),
        drawn(work.length, work.key_heads, work.width).transpose(1, 2),
        drawn(queries, work.heads, NUM_BRANCHES),
    )
    return Layer(*(tensor.requires_grad_(which == "train") for tensor in layer))


def inputs_of(layer: Layer, config: NSAConfig) -> Inputs:
    """Return a backend's inputs, with pooled keys and gates computed."""
    pooled_value = gates = None
    if config.mode != "merged":
        pooled_value, gates = pool(layer.value, config), activate_gates(layer.raw_gates, config)
    pooled_key = pool(layer.key, config)
    scale = layer.query.shape[-1] ** -0.5
    return Inputs(layer.query, layer.key, layer.value, pooled_key, pooled_value, gates, None, scale)


class Variant(NamedTuple):
    """An implementation of attention, and a function that prepares it for one layer."""

    name: str
    prepare: Callable[[Layer, Work], Attend]
    """A function that prepares the implementation; raises ConfigError or RuntimeError if it
    cannot."""
    problem: Callable[[Attend, Layer], str | None] | None = None
    """A check that returns why the result is wrong, or None; absent for dense attention."""

    @property
    def is_dense(self) -> bool:
        """True if every key of the past is read."""
        return self.problem is None


def sparse_variants(which: Pass, presets: tuple[str, ...]) -> Iterator[Variant]:
    """Yield each preset with every backend, named like `nsa flex`; in decode one per preset."""
    for preset in presets:
        config = PRESETS[preset]
        if which == "decode":
            decoding = partial(_decoding, config=config)
            yield Variant(f"{preset} decode", decoding, partial(problem, config=config))
            continue
        for backend in BACKENDS:
            by_backend = config.model_copy(update={"backend": backend})
            sparse = partial(_sparse, config=by_backend)
            yield Variant(f"{preset} {backend}", sparse, partial(problem, config=by_backend))


def _sparse(layer: Layer, work: Work, *, config: NSAConfig) -> Attend:
    device = layer.query.device
    route = router.choose(
        config, length=work.length, group=work.group, head_dim=work.width, device=device
    )

    def attend(layer: Layer) -> Tensor:
        return router.attend(inputs_of(layer, config), config, route)

    if route.backend not in ("flex", "gather"):
        return attend
    return torch.compile(attend, fullgraph=True, dynamic=False)


def _decoding(layer: Layer, work: Work, *, config: NSAConfig) -> Attend:
    """Prepare a step inside a tile (or of one query) that appends its key and attends."""
    kept = decode.Past.empty(layer.key, work.length, config)
    inputs = inputs_of(layer._replace(query=layer.key.repeat_interleave(work.group, 1)), config)
    decode.fill(kept, inputs, select_blocks(inputs, config), config)
    position = torch.full((work.batch,), work.length - 1, device=layer.key.device)
    key, value = layer.key[:, :, -1], layer.value[:, :, -1]
    gates = None if inputs.gates is None else inputs.gates[:, 0]

    def attend(layer: Layer) -> Tensor:
        decode.append(kept, key, value, position, config=config)
        query, how = layer.query[:, :, 0], {"config": config, "scale": inputs.scale}
        if config.select_tile == 1:
            decode.choose(query, kept, position, **how)
        return decode.attend(query, kept, position, gates=gates, **how)[:, None]

    return attend


# Check that what is timed is sparse attention: compare a corner of it with the reference. Queries
# only see the past and heads are independent, so the first positions and heads are enough.

BEYOND, KEY_HEADS = 512, 2
"""Positions beyond the reach of the selection, and key-value heads, that are compared."""
CLOSE = 0.05
"""The largest accepted distance of a head's output from the reference, relative to its norm."""
MOST_WITHIN, MOST_BEYOND = 0.01, 0.5
"""Shares of outputs that may be further away: within the reach of the selection, and beyond it,
where rounding may resolve near ties differently and another block changes a tile's output."""


def problem(attend: Attend, layer: Layer, config: NSAConfig) -> str | None:
    """Return why `attend` does not compute `config`, judged by the first positions, or None.

    Call it in the same mode as the timing, with gradients or without: compilation depends on it.
    """
    found = attend(layer).detach()
    length = config.reach + BEYOND
    with torch.no_grad():
        key, value = (tensor[:, :KEY_HEADS, :length] for tensor in (layer.key, layer.value))
        heads = key.shape[1] * (layer.query.shape[1] // layer.key.shape[1])
        query, gates = layer.query[:, :heads, :length], layer.raw_gates[:, :length, :heads]
        inputs = inputs_of(Layer(query, key, value, gates), config)
        selection = select_blocks(inputs, config)  # as the layer's own dtype selects
        names = ("query", "key", "value", "pooled_key", "pooled_value", "gates")
        wide = {n: t.float() for n in names if (t := getattr(inputs, n)) is not None}
        expected = reference.attend(inputs._replace(**wide), selection, config)
        length = expected.shape[1]  # `(B, length, heads, D)`
        distance = (found[:, :length, :heads].float() - expected).norm(dim=-1)
        far = (distance / expected.norm(dim=-1)).nan_to_num(nan=torch.inf) > CLOSE
    for part, most, where in (
        (far[:, : config.reach], MOST_WITHIN, f"the first {config.reach} positions"),
        (far[:, config.reach :], MOST_BEYOND, f"those up to {far.shape[1]}"),
    ):
        share = part.float().mean().item() if part.numel() else 0.0
        if share > most:
            return (
                f"computes something else: {share:.0%} of {where} are far from what the reference "
                "says; nothing of it is timed"
            )
    return None
