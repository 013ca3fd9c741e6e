"""The ways to attend that are timed against one another: PyTorch's dense ones, and sparse ones."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from qat.backend.base import Backend
from qat.kernels.nsa import decode, reference, router
from qat.kernels.nsa.config import PRESETS, NSAConfig
from qat.kernels.nsa.inputs import Inputs
from qat.kernels.nsa.select import pool, select
from qat.nsa.attention import NUM_BRANCHES, squashed

# One layer's attention as it is timed: tensors as a model has them, and one call of each kind.
#
# Shapes: B rows, H query heads, K key-value heads, S positions, D head width.

Pass = Literal["forward", "train", "decode"]


class Work(NamedTuple):
    """How much there is to attend to."""

    length: int
    """S; in decode the positions so far, the new one included."""
    group: int
    """H / K."""
    key_heads: int
    width: int
    batch: int

    @property
    def heads(self) -> int:
        """H."""
        return self.group * self.key_heads


class Layer(NamedTuple):
    """What a layer hands its attention."""

    query: Tensor
    """`(B, H, S, D)`, rotated; one position in decode."""
    key: Tensor
    """`(B, K, S, D)`, rotated."""
    value: Tensor
    """`(B, K, S, D)`."""
    raw_gates: Tensor
    """`(B, S, H, 3)`, before they are squashed."""


Attend = Callable[[Layer], Tensor]
"""To `(B, S, H, D)`."""


def layer_of(work: Work, which: Pass, *, device: torch.device, dtype: torch.dtype) -> Layer:
    """Random heads, laid out as projections give them."""
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
    """With pooled keys and gates made."""
    pooled_value = gates = None
    if config.mode != "merged":
        pooled_value, gates = pool(layer.value, config), squashed(layer.raw_gates, config)
    pooled_key = pool(layer.key, config)
    scale = layer.query.shape[-1] ** -0.5
    return Inputs(layer.query, layer.key, layer.value, pooled_key, pooled_value, gates, None, scale)


def call_of(attend: Attend, layer: Layer, which: Pass) -> Callable[[], object]:
    """One call: without gradients, or forward and backward for gradients of the whole layer."""
    if which != "train":

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(layer)

        return forward
    learned = [tensor for tensor in layer if tensor.requires_grad]
    slope = torch.randn_like(layer.query).transpose(1, 2)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(layer), learned, slope, allow_unused=True)

    return train


DENSE = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = ("reference", "flex", "gather", "fla")


class Way(NamedTuple):
    """A way to attend, and what makes it ready for one layer."""

    name: str
    config: NSAConfig | None
    """What is computed; None: dense attention."""
    prepare: Callable[[Layer, Work], Attend]
    """Raises ConfigError or RuntimeError where it cannot."""

    @property
    def is_dense(self) -> bool:
        """Whether every key of the past is read."""
        return self.config is None


def ways_of(which: Pass, presets: tuple[str, ...]) -> Iterator[Way]:
    """Dense ones first, each by its own name: `dense cudnn`, ..., `nsa flex`, ..."""
    for name, kernel in DENSE.items():
        yield Way(f"dense {name}", None, _dense(kernel, is_causal=which != "decode"))
    for preset in presets:
        if which == "decode":
            yield Way(f"{preset} decode", PRESETS[preset], _decoding(PRESETS[preset]))
            continue
        for backend in BACKENDS:
            config = PRESETS[preset].model_copy(update={"backend": backend})
            yield Way(f"{preset} {backend}", config, _sparse(config))


def recorded(attend: Attend, layer: Layer, backend: Backend) -> Attend:
    """`attend` of `layer` as one graph, as a generating model runs it; itself without a GPU."""
    if not backend.records():
        return attend
    with torch.no_grad():
        attend(layer)
        replay, out = backend.record(lambda: attend(layer))

    def run(_: Layer) -> Tensor:
        replay()
        return out

    return run


def _dense(kernel: SDPBackend, *, is_causal: bool) -> Callable[[Layer, Work], Attend]:
    def prepare(layer: Layer, work: Work) -> Attend:
        def attend(layer: Layer) -> Tensor:
            with sdpa_kernel(kernel):
                out = scaled_dot_product_attention(
                    *layer[:3], is_causal=is_causal, enable_gqa=work.group > 1
                )
            return out.transpose(1, 2)

        return attend

    return prepare


def _sparse(config: NSAConfig) -> Callable[[Layer, Work], Attend]:
    def prepare(layer: Layer, work: Work) -> Attend:
        device = layer.query.device
        route = router.choose(
            config, length=work.length, group=work.group, head_dim=work.width, device=device
        )

        def attend(layer: Layer) -> Tensor:
            return router.attend(inputs_of(layer, config), config, route)

        if route.backend not in ("flex", "gather"):
            return attend
        return torch.compile(attend, fullgraph=True, dynamic=False)

    return prepare


def _decoding(config: NSAConfig) -> Callable[[Layer, Work], Attend]:
    """A step inside a tile, or one that is a tile: it keeps its key and value, and attends."""

    def prepare(layer: Layer, work: Work) -> Attend:
        kept = decode.Kept.empty(layer.key, work.length, config)
        whole = layer._replace(query=layer.key.repeat_interleave(work.group, 1))
        inputs = inputs_of(whole, config)
        decode.fill(kept, inputs, select(inputs, config), config)
        position = torch.full((work.batch,), work.length - 1, device=layer.key.device)
        key, value = layer.key[:, :, -1], layer.value[:, :, -1]
        gates = None if inputs.gates is None else inputs.gates[:, 0]

        def attend(layer: Layer) -> Tensor:
            decode.append(kept, key, value, position, config=config)
            if config.select_tile == 1:
                query = layer.query[:, :, 0]
                decode.choose(query, kept, position, config=config, scale=inputs.scale)
            out = decode.attend(
                layer.query[:, :, 0],
                kept,
                position,
                gates=gates,
                config=config,
                scale=inputs.scale,
            )
            return out[:, None]

        return attend

    return prepare


# Whether what is timed is sparse attention: a corner of it against the reference.
#
# The past alone counts, and heads do not meet, so that the reference need not see all of either.

BEYOND, KEY_HEADS = 512, 2
"""Positions behind the reach of the selection, and key-value heads, that are compared."""
CLOSE = 0.05
"""Farthest that a head's output may be from the reference's, of its norm, in any dtype."""
MOST_WITHIN, MOST_BEYOND = 0.01, 0.5
"""Shares that may be further away: within the reach of the selection, and beyond it, where near
ties may be rounded apart and another block change the output of a tile."""


def problem(attend: Attend, layer: Layer, config: NSAConfig) -> str | None:
    """What `attend` computes instead; None: `config`, as far as the first positions tell.

    Call it as the way is timed, with gradients or without: what is compiled depends on that.
    """
    found = attend(layer).detach()
    with torch.no_grad():
        expected = _corner(layer, config)
        _, length, heads, _ = expected.shape
        far = _distance(found[:, :length, :heads].float(), expected) > CLOSE
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


def _corner(layer: Layer, config: NSAConfig) -> Tensor:
    """`(B, length, heads, D)` float32: the reference's first positions and heads, of the blocks
    that the layer's own dtype selects."""
    length = config.reach + BEYOND
    key, value = (tensor[:, :KEY_HEADS, :length] for tensor in (layer.key, layer.value))
    heads = key.shape[1] * (layer.query.shape[1] // layer.key.shape[1])
    query, gates = layer.query[:, :heads, :length], layer.raw_gates[:, :length, :heads]
    inputs = inputs_of(Layer(query, key, value, gates), config)
    selection = select(inputs, config)
    names = ("query", "key", "value", "pooled_key", "pooled_value", "gates")
    wide = {n: t.float() for n in names if (t := getattr(inputs, n)) is not None}
    return reference.attend(inputs._replace(**wide), selection, config)


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """`(B, S, H)`, of the norm of what is expected; NaN counts as far away."""
    distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return distance.nan_to_num(nan=torch.inf)
