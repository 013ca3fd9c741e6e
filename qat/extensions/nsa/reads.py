"""Blocks that the selections of a training step read, against those that the definition predicts.

Shapes as in `qat.extensions.nsa.kernels.select`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from qat.extensions.nsa.attention import NSAAttention
from qat.extensions.nsa.kernels import router
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, past_blocks
from qat.extensions.nsa.swap import attending_with

if TYPE_CHECKING:
    from qat.convert.calibrate import TokenBatch
    from qat.extensions.nsa.attention import Call
    from qat.models.language_model import LanguageModel

logger = logging.getLogger(__name__)
_warned: WeakSet[object] = WeakSet()
"""Models whose first difference is reported."""


class LayerReads(NamedTuple):
    """Counts of one layer's selections."""

    layer: int
    selections: int
    read: int
    """Blocks in all of them."""
    predicted: int
    off: int
    """Selections whose number of blocks is not the predicted one."""


def layer_reads(model: LanguageModel, batch: TokenBatch) -> list[LayerReads]:
    """Run `model` on a batch without gradients and count the blocks of every sparse layer.

    Compiled layers are not intercepted: call it inside `qat.models.regions.as_written`. Layers
    select as their backend does in a step; the host waits for the device once, at the end.
    """
    found: list[tuple[int, int, Tensor]] = []

    def count(module: NSAAttention, call: Call) -> Tensor:
        inputs, config = module.inputs(call), module.nsa.config
        route = module.route(inputs.length, inputs.query.device)
        out, read = router.attend_counted(inputs, config, route)
        predicted = predicted_blocks(inputs, config)[:, None].expand_as(read)
        counts = torch.stack([read.sum(), predicted.sum(), (read != predicted).sum()])
        found.append((module.layer_idx, read.numel(), counts))
        return out

    with torch.no_grad(), attending_with(model.model, count):
        model.hidden(batch.input_ids.to(model.device), batch.position_ids.to(model.device))
    on_host = torch.stack([counts for *_, counts in found]).tolist()
    pairs = zip(found, on_host, strict=True)
    return [LayerReads(layer, number, *counts) for (layer, number, _), counts in pairs]


def predicted_blocks(inputs: Inputs, config: NSAConfig) -> Tensor:
    """Return the number of blocks that a tile reads by the definition, `(B, T)`."""
    past = past_blocks(inputs, config)
    return past if inputs.length < config.min_len else past.clamp(max=config.num_selected)


def step_numbers(
    model: LanguageModel, batch: TokenBatch, event: Callable[..., None]
) -> dict[str, float]:
    """Return the mean blocks of a selection, read and predicted, with names starting `nsa_`.

    The first difference between them in a run is logged as a warning and passed to `event`.
    """
    layers = layer_reads(model, batch)
    worst = max(layers, key=lambda layer: layer.off)
    if worst.off and model.model not in _warned:
        _warned.add(model.model)
        read, predicted = (count / worst.selections for count in (worst.read, worst.predicted))
        logger.warning(
            "nsa: %.4g blocks a query are read in layer %d, expected %.4g (%d of %d selections "
            "differ from the definition); report this, and set another `backend` in it",
            *(read, worst.layer, predicted, worst.off, worst.selections),
        )
        facts = {"layer": worst.layer, "off": worst.off, "selections": worst.selections}
        event("blocks_read", **facts, blocks_read=read, blocks_predicted=predicted)
    total = sum(layer.selections for layer in layers)
    return {
        "nsa_blocks_read": sum(layer.read for layer in layers) / total,
        "nsa_blocks_predicted": sum(layer.predicted for layer in layers) / total,
    }
