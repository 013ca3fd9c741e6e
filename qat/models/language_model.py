"""A causal language model as hidden states and a head, so that nobody needs all logits at once."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


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

    def logits(self, hidden: Tensor) -> Tensor:
        """`(..., D)` to `(..., V)`, soft-capped if the model does so."""
        head = self.head
        logits = head(hidden.to(head.weight.device))
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
