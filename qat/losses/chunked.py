"""From hidden states to losses without all logits at once.

Shapes: T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qat.losses.registry import LOSSES
from qat.losses.targets import Targets


def loss_from_hidden(
    hidden: Tensor,
    logits_fn: Callable[[Tensor], Tensor],
    targets: Targets,
    terms: dict[str, float],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
) -> dict[str, Tensor]:
    """The sum of each loss over valid tokens, and their weighted sum as `"loss"`, all in nats.

    Logits exist for `chunk_tokens` rows at a time and are formed again in backward, so memory is
    bounded by `chunk_tokens * V` and the head runs twice. Values and gradients are those of the
    unchunked losses. Nothing waits for the device.

    Args:
        hidden: `(T, D)` last hidden states.
        logits_fn: `(t, D)` to `(t, V)`; its parameters get their gradients too.
        targets: the teacher's word on the T tokens.
        terms: weight by name of loss, as `parse_losses` gives them.
        temperature: softmax temperature of the divergences, > 0.
        chunk_tokens: rows of logits that exist together, > 0.
    """

    def sums(hidden_rows: Tensor, *target_rows: Tensor) -> Tensor:
        logits, rows = logits_fn(hidden_rows), Targets(*target_rows)
        return torch.stack([LOSSES[name](logits, rows, temperature=temperature) for name in terms])

    pieces = zip(hidden.split(chunk_tokens), *(t.split(chunk_tokens) for t in targets), strict=True)
    # losses draw no random numbers: keeping the generators' state would only cost a copy
    parts = [checkpoint(sums, *p, use_reentrant=False, preserve_rng_state=False) for p in pieces]
    by_name = dict(zip(terms, torch.stack(parts).sum(0), strict=True))
    by_name["loss"] = torch.stack([w * by_name[name] for name, w in terms.items()]).sum()
    return by_name
