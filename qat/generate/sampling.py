"""Draw the next tokens, and end a row at its last.

Shapes: B sequences, V words.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Parameters for drawing the next token."""

    temperature: float
    """Softmax temperature of the draw; 0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling: draw from the smallest set of tokens with this probability mass."""

    def draw(self, logits: Tensor) -> Tensor:
        """Draw token ids `(B,)` from logits `(B, V)` with torch's generator of their device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return draw_from(self.probs(logits))

    def probs(self, logits: Tensor) -> Tensor:
        """Return the probabilities `(B, V)` float32 of what `draw` returns."""
        if self.temperature == 0:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, best, 1.0)
        scaled = logits.float() / self.temperature
        if self.top_p < 1:
            ordered, order = scaled.sort(-1)
            rare = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            rare[:, -1] = False
            scaled = scaled.masked_fill(rare.scatter(-1, order, rare), -torch.inf)
        return scaled.softmax(-1)


def draw_from(weights: Tensor) -> Tensor:
    """Draw token ids `(B,)` in proportion to `weights` `(B, V)`."""
    # exponential race: token i with rate p_i is first with probability p_i
    times = torch.empty_like(weights).exponential_()
    return (weights / times).argmax(-1)


def until_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """Return `ids` up to and including the first of `ends`."""
    stop = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: stop + 1]
