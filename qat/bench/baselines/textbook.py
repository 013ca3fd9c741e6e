"""The losses as a competent user would write them: log-softmax over all logits, chunk by chunk.

Independent of `qat.losses` on purpose: equal numbers in one table are then a check of both.
Shapes: T tokens, V vocabulary, K teacher tokens kept, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qat.errors import ConfigError
from qat.losses.targets import NO_LABEL, Targets

CHUNK_TOKENS = 2048


def tail(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """KL over the teacher's K tokens and one outcome for all others, `(T,)`."""
    log_q = torch.log_softmax(logits, -1).gather(1, targets.topk_ids)
    others = torch.log1p(-log_q.exp().sum(1).clamp(max=1 - 1e-6))
    log_q = torch.log_softmax(torch.cat([log_q, others[:, None]], 1) / temperature, 1)
    log_p = torch.cat([targets.topk_logprobs, targets.tail_logprob[:, None]], 1)
    return _kl(log_p, log_q, temperature)


def candidates(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """KL over the teacher's K tokens alone, both sides renormalised, `(T,)`."""
    chosen = logits.gather(1, targets.topk_ids)
    return _kl(targets.topk_logprobs, torch.log_softmax(chosen / temperature, 1), temperature)


def sampled(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Cross-entropy with the tokens drawn from the teacher, `(T,)`."""
    log_q = torch.log_softmax(logits, -1).gather(1, targets.sample_ids)
    shares = targets.sample_counts / targets.sample_counts.sum(1, keepdim=True).clamp_min(1)
    return -(shares * log_q).sum(1)


def hard_ce(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Cross-entropy with the token that follows, `(T,)`."""
    return F.cross_entropy(logits, targets.labels, ignore_index=NO_LABEL, reduction="none")


LOSSES: dict[str, Callable[[Tensor, Targets, float], Tensor]] = {
    "tail": tail,
    "candidates": candidates,
    "sampled": sampled,
    "hard_ce": hard_ce,
}


def check_losses(terms: dict[str, float]) -> None:
    """Refuse losses that this file does not write out.

    Raises:
        ConfigError: naming one.
    """
    for name in terms:
        if name not in LOSSES:
            raise ConfigError(
                f"loss={name}, but the baselines know {', '.join(LOSSES)} only; choose among them "
                "or leave the plain cases out of --only"
            )


class ChunkedLoss:
    """The weighted sum of losses over valid tokens, for `CHUNK_TOKENS` rows of logits at a time.

    Each chunk is recomputed in backward, so that one chunk of logits exists at a time.
    """

    def __init__(
        self, head: Tensor, softcap: float | None, terms: dict[str, float], temperature: float
    ) -> None:
        self._head = head
        self._softcap = softcap
        self._terms = terms
        self._temperature = temperature
        self._run: Callable[..., Tensor] = self._chunk

    def compile(self) -> None:
        """Let the compiler fuse what happens to a chunk of logits."""
        self._run = torch.compile(self._chunk)

    def run_eagerly(self) -> None:
        """Take back `compile`."""
        self._run = self._chunk

    def __call__(self, hidden: Tensor, targets: Targets) -> Tensor:
        """`(T, D)` hidden states to the sum in nats."""
        pieces = zip(
            hidden.split(CHUNK_TOKENS), *(t.split(CHUNK_TOKENS) for t in targets), strict=True
        )
        parts = [
            checkpoint(self._run, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in pieces
        ]
        return torch.stack(parts).sum()

    def _chunk(self, hidden: Tensor, *target_rows: Tensor) -> Tensor:
        targets = Targets(*target_rows)
        logits = F.linear(hidden, self._head).float()
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        losses = [
            weight * LOSSES[name](logits, targets, self._temperature)
            for name, weight in self._terms.items()
        ]
        return torch.where(targets.mask, sum(losses), 0.0).sum()


def _kl(log_p: Tensor, log_q: Tensor, temperature: float) -> Tensor:
    log_p = torch.log_softmax(log_p / temperature, 1)
    return temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)
