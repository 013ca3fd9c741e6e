"""Whether what is timed is sparse attention: a corner of it against the reference.

The past alone counts, and heads do not meet, so that the reference need not see all of either.
"""

import torch
from torch import Tensor

from qat.bench.attention.work import Attend, Layer, inputs_of
from qat.kernels.nsa import reference
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.select import select

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
