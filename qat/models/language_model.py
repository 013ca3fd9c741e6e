"""A causal language model as hidden states and a head, so that nobody needs all logits at once."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend.device import on
from qat.errors import CheckpointError
from qat.kernels.attention import document_mask, fits_tile, tile_bytes
from qat.kernels.head import Head
from qat.models.attention import no_mask, use_packed_attention
from qat.models.nsa_swap import is_all_sparse, say_route
from qat.models.tables import embedding_dtype, module_device
from qat.nn.lut_embedding import FrozenLutHead, TiedLutHead

SPLIT_TOLERANCE = 0.02
"""Largest difference that two orders of the same sums may make, relative to the largest logit."""


class LanguageModel:
    """Splits a Hugging Face causal LM into its body and its head.

    `logits(hidden(ids, positions))` is `model(ids, position_ids=positions).logits`. Positions that
    restart within a row separate packed documents: attention then stays inside each.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._is_plain = use_packed_attention(model)
        self._cast_head: Tensor | None = None

    @property
    def config(self) -> object:
        """The text part of the model's configuration."""
        return self.model.config.get_text_config()

    @property
    def head(self) -> nn.Module:
        """The output embedding."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """Where the input ids go."""
        return module_device(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in without autocast."""
        return embedding_dtype(self.model)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, *, is_packed: bool = True) -> Tensor:
        """The last hidden state, `(B, S, D)`; nothing waits for the device.

        `is_packed=False` promises that every row is one document, which longer sequences
        (beyond `qat.kernels.attention.MAX_TILE`) compute faster.
        """
        extra = self._attention_inputs(position_ids, is_packed) if self._is_plain else {}
        body = self.model.base_model
        return body(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra
        ).last_hidden_state

    def _attention_inputs(self, position_ids: Tensor, is_packed: bool) -> dict[str, object]:
        """The mask, made here: transformers would ask the device whether rows are packed."""
        say_route(self.model, position_ids.shape[1], position_ids.device)
        is_read = is_packed and not is_all_sparse(self.model.config)
        mask = document_mask(position_ids) if is_read else no_mask(position_ids.device)
        return {
            "attention_mask": mask,
            "document_positions": position_ids,
            "is_packed": is_packed,
            "tile_fits": self._tile_fits(position_ids),
        }

    def attention(self, length: int, dtype: torch.dtype) -> str:
        """How packed sequences of `length` attend in `dtype`.

        `nsa` where every layer is sparse; else `tile`, our kernel, or `sdpa`.
        """
        if is_all_sparse(self.model.config):
            return "nsa"
        positions = torch.arange(length, device=self.device)[None]
        heads = torch.empty(1, 1, length, self._head_width(), dtype=dtype, device=self.device)
        is_tile = self._is_plain and self._tile_fits(positions) and fits_tile(heads, heads)
        return "tile" if is_tile else "sdpa"

    def _tile_fits(self, position_ids: Tensor) -> bool:
        """Whether the device has room for the tile of such sequences."""
        room = on(position_ids.device).shared_memory_bytes()
        return tile_bytes(position_ids.shape[1], self._head_width()) <= room

    def _head_width(self) -> int:
        config = self.config
        width = getattr(config, "head_dim", None)
        return width or config.hidden_size // config.num_attention_heads

    @torch.no_grad()
    def check_split(self) -> None:
        """Compare body and head with the whole model on four tokens.

        Raises:
            CheckpointError: the model does something to its logits that `logits` does not know.
        """
        if self.head is None:
            raise CheckpointError(
                f"{type(self.model).__name__} has no output embedding, expected a causal language "
                "model; choose another model"
            )
        ids = torch.arange(4, device=self.device)[None] % self.config.vocab_size
        split = self.logits(self.hidden(ids, torch.arange(4, device=self.device)[None])).float()
        whole = self.model(input_ids=ids, use_cache=False).logits.float().to(split.device)
        # negated, so that a NaN counts as different
        if not (split - whole).abs().max() <= SPLIT_TOLERANCE * whole.abs().max():
            raise CheckpointError(
                f"{type(self.model).__name__} changes its logits behind the head (by up to "
                f"{(split - whole).abs().max().item():.3g}), expected a plain or soft-capped head; "
                "choose another model"
            )

    @property
    def softcap(self) -> float | None:
        """The bound that the model's logits are softly kept in, if there is one."""
        return getattr(self.config, "final_logit_softcapping", None)

    def head_in(self, dtype: torch.dtype) -> Head:
        """The output embedding for computing in `dtype`; a cast that it needs is made once.

        So is the whole table of a quantized one.
        """
        head = self.head
        if isinstance(head, FrozenLutHead | TiedLutHead):
            return Head(head.weight_in(dtype), head.bias, self.softcap)
        weight, bias = head.weight, head.bias
        if weight.dtype != dtype and not weight.requires_grad:
            if self._cast_head is None or self._cast_head.dtype != dtype:
                self._cast_head = weight.detach().to(dtype)
            weight = self._cast_head
        return Head(weight, bias, self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """`(..., D)` to `(..., V)`, soft-capped if the model does so."""
        head = self.head
        logits = head(hidden.to(module_device(head)))
        softcap = self.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
