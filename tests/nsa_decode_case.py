"""Rows of NSA inputs told one position at a time."""

import torch
from torch import Tensor

from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.decode import Past, append, attend, choose, fill
from qat.extensions.nsa.kernels.select import Inputs, pool, select

Weights = tuple[Tensor, Tensor] | None


def upto(inputs: Inputs, length: int, config: NSAConfig, weights: Weights = None) -> Inputs:
    """The first `length` positions."""
    query, key, value = (tensor[:, :, :length] for tensor in inputs[:3])
    of_keys, of_values = weights or (None, None)
    return Inputs(
        query,
        key,
        value,
        pool(key, config, of_keys),
        None if inputs.pooled_value is None else pool(value, config, of_values),
        None if inputs.gates is None else inputs.gates[:, :length],
        None,
        inputs.scale,
    )


def decoded(
    inputs: Inputs, config: NSAConfig, begin: int = 0, *, room: int = 0, weights: Weights = None
) -> tuple[Tensor, Past]:
    """`(B, S - begin, H, D)` after `begin` positions at once, and what is kept at the end."""
    B, S = inputs.query.shape[0], inputs.length
    kept = Past.empty(inputs.key, room or S, config)
    before = upto(inputs, begin, config, weights)
    if begin:
        fill(kept, before, select(before, config), config)
    said = []
    for at in range(begin, S):
        position = torch.full((B,), at, device=inputs.query.device)
        query, key, value = (tensor[:, :, at] for tensor in inputs[:3])
        append(kept, key, value, position, config=config, weights=weights)
        if at % config.select_tile == 0:
            choose(query, kept, position, config=config, scale=inputs.scale)
        gates = None if inputs.gates is None else inputs.gates[:, at]
        said.append(attend(query, kept, position, gates=gates, config=config, scale=inputs.scale))
    return torch.stack(said, 1), kept
