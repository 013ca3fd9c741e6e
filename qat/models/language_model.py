"""A causal language model as hidden states and a head, so that not all logits exist at once."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.kernels.attention import document_mask, has_room
from qat.kernels.head import Head
from qat.models.attention import is_all_sparse, sparse_attention
from qat.models.document_attention import use_packed_attention
from qat.models.rotary import rotate_by_document
from qat.nn.activation import read
from qat.nn.lut_embedding import TableHead
from qat.nn.quant_weight import QuantWeight
from qat.nn.sites import open_sites
from qat.nn.swap import (
    body_of,
    embedding_dtype,
    head_dim,
    layer_config,
    module_device,
    settle_tie,
)

LOGIT_FACTORS = {
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "logits_scaling": -1,
    "logits_mup_width_multiplier": -1,
}
"""Configuration keys of factors that multiply (1) or divide (-1) the logits or their inputs."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Configuration keys of a soft cap on logits."""
HALVES = (torch.bfloat16, torch.float16)
"""The 16-bit floating-point dtypes."""


class LanguageModel:
    """Splits a Hugging Face causal LM into its body and its head.

    `logits(hidden(ids, positions))` is `model(ids, position_ids=positions).logits`. Positions that
    restart within a row separate packed documents: attention then stays inside each.
    """

    folder: Path | None = None
    """Directory for tensors that do not fit in memory; None for that of temporary files."""
    num_words = sys.maxsize
    """Number of leading words that count; fewer than all beside a model whose head is smaller."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        open_sites(model)
        settle_tie(model)
        if not getattr(model.base_model, "layers_are_rescaled", True):
            model.config.rescale_every = 0  # otherwise RWKV halves weights in place for inference
        self._is_plain = use_packed_attention(model)
        rotate_by_document(model)
        self._cast_head: Tensor | None = None
        factors = {key: getattr(self.config, key, None) or 1.0 for key in LOGIT_FACTORS}
        self.gain = math.prod(value ** LOGIT_FACTORS[key] for key, value in factors.items())

    @property
    def config(self) -> Any:
        """The text part of the model's configuration."""
        return self.model.config.get_text_config()

    @property
    def longest(self) -> int:
        """The largest number of tokens in a sequence; `sys.maxsize` if there is no limit."""
        return most_positions(self.config) or sys.maxsize

    @property
    def head(self) -> nn.Module:
        """The output embedding of the model."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """The device of the input ids."""
        return module_device(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in without autocast."""
        return embedding_dtype(self.model)

    # What `qat.models.streamed.StreamedModel` does in another way.

    def device_of(self, module: nn.Module) -> torch.device:
        """Return the device that `module` computes on."""
        is_quantized = isinstance(module, QuantWeight)
        return module.codebook.device if is_quantized else module.weight.device

    def present(self, module: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Keep the weights of a layer, the embedding or the head on the device inside the block."""
        return nullcontext()

    def settle(self, module: nn.Module) -> None:
        """Store the tensors of a linear that was just quantized where the model has its weights."""

    def widen(self) -> None:
        """Convert unquantized parameters exactly to a dtype that our checkpoints have."""

    def hidden_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield `hidden` of each batch of ids and positions in turn."""
        return (self.hidden(*batch) for batch in batches)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, *, is_packed: bool = True) -> Tensor:
        """Return the last hidden state as the head reads it, `(B, S, D)`; never synchronizes.

        `is_packed=False` promises that every row is one document, which is faster for longer
        sequences (beyond `qat.kernels.attention.MAX_TILE`).
        """
        extra = self._attention_inputs(position_ids, is_packed) if self._is_plain else {}
        output = body_of(self.model)(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra
        )
        return self.as_read(output.last_hidden_state)

    def as_read(self, hidden: Tensor) -> Tensor:
        """Return `hidden` as the head reads it: quantized if a quantized head quantizes its input.

        It is also multiplied by the model's logit factor, so that kernels need not apply it.
        """
        if isinstance(self.head, TableHead):
            hidden = read(self.head, hidden)
        return hidden if self.gain == 1 else hidden * self.gain

    def _attention_inputs(self, position_ids: Tensor, is_packed: bool) -> dict[str, object]:
        """Make the mask here: transformers would synchronize to see if rows are packed."""
        sparse = sparse_attention(self.model)
        if sparse is not None:
            sparse.choose_backend(self.model, position_ids.shape[1], position_ids.device)
        is_read = is_packed and not is_all_sparse(self.model.config)
        # a placeholder for layers that read no mask: transformers replaces None
        no_mask = position_ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        mask = document_mask(position_ids) if is_read else no_mask
        return {
            "attention_mask": mask,
            "document_positions": position_ids,
            "is_packed": is_packed,
            "tile_fits": self._tile_fits(position_ids),
        }

    def _tile_fits(self, position_ids: Tensor) -> bool:
        """Return whether the tile of such sequences fits in the device's memories."""
        width = head_dim(layer_config(self.config, 0))
        return has_room(position_ids.shape[1], width, position_ids.device)

    @property
    def softcap(self) -> float | None:
        """The soft cap on the model's logits, or None."""
        return softcap_of(self.config)

    def head_in(self, dtype: torch.dtype) -> Head:
        """Return the output embedding for computing in `dtype`; casts are cached.

        So is the whole table of a quantized one. Inside a training step a table that learns takes
        its gradient from the head itself if it can.
        """
        head, take, named = self.head, None, None
        if isinstance(head, TableHead):
            table = head.table
            take = table.take_gradient_ if table.learns_by_rows else None
            weight, named = table.weight_in(dtype), head.named if table.is_in_step else None
        elif head.weight.dtype == dtype or head.weight.requires_grad:
            weight = head.weight
        else:
            if self._cast_head is None or self._cast_head.dtype != dtype:
                self._cast_head = head.weight.detach().to(dtype)
            weight = self._cast_head
        return Head(weight, head.bias, self.softcap, take, named).words(0, self.num_words)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `(..., D)` from `hidden` to logits of `num_words`, soft-capped if the model does so.

        Without gradients a plain 16-bit head returns float32, without an intermediate rounding.
        """
        with self.present(self.head):
            return self._logits(hidden)[..., : self.num_words]

    def _logits(self, hidden: Tensor) -> Tensor:
        head, softcap = self.head, self.softcap
        hidden = hidden.to(module_device(head))
        if type(head) is nn.Linear and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(head.weight.dtype)  # Mamba2's residual stream is float32
        if type(head) is nn.Linear and hidden.dtype == head.weight.dtype in HALVES:
            if not torch.is_grad_enabled():
                return Head(head.weight, head.bias, softcap).exact_logits(hidden)
        is_table = isinstance(head, TableHead)
        logits = head.product(hidden) if is_table else head(hidden)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def most_positions(config: Any) -> int | None:
    """Return the most tokens of a sequence by a text configuration; None if there is no limit."""
    found = getattr(config, "max_position_embeddings", None)
    return None if found is None or found < 1 else found  # XLNet writes -1


def softcap_of(config: Any) -> float | None:
    """Return the soft cap on logits in a text configuration; None without one."""
    return next((cap for cap in (getattr(config, key, None) for key in SOFTCAPS) if cap), None)


@contextmanager
def judging(model: LanguageModel) -> Iterator[None]:
    """Run a block without gradients and dropout, then restore the model's mode."""
    was_training = model.model.training
    model.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.model.train(was_training)
