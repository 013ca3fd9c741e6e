"""One layer's attention as it is timed: tensors as a model has them, and one call of each kind.

Shapes: B rows, H query heads, K key-value heads, S positions, D head width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.inputs import Inputs
from qat.kernels.nsa.select import pool
from qat.nsa.attention import NUM_BRANCHES, squashed

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
