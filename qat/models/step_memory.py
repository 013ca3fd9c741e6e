"""Memory of a training step on one device."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from qat.backend.base import VISITORS
from qat.backend.copies import placed
from qat.models.cost import num_weights, packed_bytes
from qat.models.stored_state import quantized_modules
from qat.nn.lut_embedding import quant_tables
from qat.nn.quant_linear import quant_linears
from qat.nn.quant_weight import KIND_OF, PackedWeight
from qat.nn.swap import decoder_layers


class Moved(Protocol):
    """The settings of a step that determine its memory."""

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of parameter that learn."""

    @property
    def optimizer(self) -> str:
        """The optimizer of latent weights."""

    @property
    def grad_accum_steps(self) -> int:
        """The micro-batches of a step."""

    @property
    def latent_dtype(self) -> str:
        """The dtype of latent weights."""

    @property
    def offload(self) -> str:
        """State on the host: `none`, `moments` of latent weights, or `latents` and moments."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a device holds during training, without activations, logits and workspaces."""

    stored: int
    """Packed indices or latent weights, scales, codebooks, adapters, and all unquantized
    tensors."""
    gradients: int
    """Gradients of everything that learns, with those of a head that are still to be added."""
    moments: int
    """Moments of AdamW; with offload, the part that is on the device at one time, with latent
    weights."""
    formed: int
    """All formed weights."""
    largest_layer: int
    """Formed weights of the largest layer; of two layers if devices prefetch the next one."""
    pinned: int
    """Pinned host memory."""

    def total(self, *, by_layer: bool) -> int:
        """Return all bytes on the device, with weights formed at once or layer by layer."""
        formed = self.largest_layer if by_layer else self.formed
        return self.stored + self.gradients + self.moments + formed


BLOCK_OF_MOMENTS = 256
"""8-bit moments that share a float32 scale."""
LATENT_BYTES = {"fp32": 4, "bf16": 2}
HOSTED = {"none": 0, "moments": 2, "latents": 3}
"""Tensors of a latent weight's size on the host, by `offload`."""


def step_bytes(
    model: PreTrainedModel,
    learning: Collection[str],
    config: Moved,
    dtype: torch.dtype,
    *,
    parts: int = 1,
) -> StepBytes:
    """Return the memory of a step of `model` in `dtype` when the weights called `learning` train.

    The result does not depend on whether these already have latent weights, and the model may be on
    `meta`. Each of `parts` devices holds its rows of the latent weights. Everything but quantized
    weights counts as frozen in `dtype`: norms, gates and routers are small.
    """
    stored = gradients = moments = of_linears = 0.0
    latents, each, hosted = [], LATENT_BYTES[config.latent_dtype], HOSTED[config.offload]
    weights, layers = quantized_modules(model), decoder_layers(model)
    tables = quant_tables(model)
    for name, module in weights.items():
        kinds = set(config.kinds) if name in learning else set()
        if "weights" in kinds:
            latents.append(each * num_weights(module) / parts)
            of_linears += 0.0 if name in tables else latents[-1]
            stored += packed_bytes(module) if config.offload == "latents" else latents[-1]
        else:
            held = module.packed if isinstance(module, PackedWeight) else module.weight
            stored += held.nbytes
        for local, parameter in module.weight_parameters().items():
            if local == "weight":
                continue
            stored += parameter.nbytes
            if KIND_OF[local] in kinds:
                gradients += parameter.nbytes
                moments += 2 * parameter.nbytes
    gradients += sum(latents) + _of_head(
        model,
        learning,
        set(config.kinds),
        octets=torch.float32.itemsize + (dtype.itemsize if parts > 1 else 0),
        is_first=config.grad_accum_steps == parts == 1 and config.latent_dtype == "fp32",
    )
    pinned = 0
    if hosted:
        moments += hosted * VISITORS * max(latents, default=0)
        blocks = [math.ceil(latent) for latent in latents]
        # moments, and latent weights if these are offloaded
        for away in (2 * blocks, (hosted - 2) * blocks):
            pinned += sum(placed(away)[1])
    else:
        is_eight = config.optimizer == "adamw8bit"
        spared = 1 - (1 + 4 / BLOCK_OF_MOMENTS) / each if is_eight else 0.0
        moments += 2 * (sum(latents) - spared * of_linears)
    inside = {id(t) for m in weights.values() for t in (*m.parameters(), *m.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in inside:
            is_wide = tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
            stored += tensor.numel() * (dtype.itemsize if is_wide else tensor.itemsize)
    # a step forms the tables that learn, and a head keeps what it forms of one that does not
    still = [num_weights(table) for name, table in tables.items() if name not in learning]
    tables_formed = dtype.itemsize * sum(num_weights(tables[n]) for n in tables if n in learning)
    stored += tables_formed + dtype.itemsize * max(still, default=0)
    formed = sum(map(num_weights, quant_linears(model).values()))
    largest = max(sum(map(num_weights, quant_linears(layer).values())) for layer in layers)
    held = min(2, parts) * largest
    formed, held = formed * dtype.itemsize, held * dtype.itemsize
    return StepBytes(*map(round, (stored, gradients, moments, formed, held, pinned)))


def _of_head(
    model: PreTrainedModel,
    learning: Collection[str],
    kinds: set[str],
    *,
    octets: int,
    is_first: bool,
) -> int:
    """Return the bytes of a head's gradient until it is added to that of its latent table.

    It has all rows, of `octets` bytes a weight; `is_first` if it becomes the other instead.
    """
    table = getattr(model.get_output_embeddings(), "table", None)
    learns = any(each is table for name, each in quant_tables(model).items() if name in learning)
    is_read = bool(kinds & {"weights", "scales", "codebook"})
    waits = learns and is_read and not (is_first and "weights" in kinds)
    return octets * num_weights(table) if waits else 0
