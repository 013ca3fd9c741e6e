"""A causal language model as hidden states and a head, so that nobody needs all logits at once."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.errors import CheckpointError

SPLIT_TOLERANCE = 0.02
"""Largest difference that two orders of the same sums may make, relative to the largest logit."""


class LanguageModel:
    """Splits a Hugging Face causal LM into its body and its head.

    `logits(hidden(ids, positions))` is `model(ids, position_ids=positions).logits`. Positions that
    restart within a row separate packed documents: attention then stays inside each.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

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
        return self.model.get_input_embeddings().weight.device

    def hidden(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The last hidden state, `(B, S, D)`."""
        body = self.model.base_model
        return body(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state

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

    def logits(self, hidden: Tensor) -> Tensor:
        """`(..., D)` to `(..., V)`, soft-capped if the model does so."""
        head = self.head
        logits = head(hidden.to(head.weight.device))
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
