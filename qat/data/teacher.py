"""The teacher as the cache builder sees it: two functions, whatever is behind them."""

from typing import Protocol

import torch
from torch import Tensor


class Teacher(Protocol):
    """A model split into body and head (`qat.models.language_model.LanguageModel` is one)."""

    @property
    def device(self) -> torch.device:
        """Where the input ids go."""

    def hidden(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The last hidden state, `(B, S, D)`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`(..., D)` to `(..., V)`."""
