"""Makes the targets that a cache would hold from a teacher's full logits.

Shapes: T tokens, V vocabulary, K teacher tokens kept, D distinct draws.
"""

import torch
from torch import Tensor

from qat.losses.formulas import NO_LABEL, Targets


def with_junk(clean: Targets, junk: float) -> Targets:
    """The same targets, whose masked rows name words that are none, with masses of `junk`."""
    rows = ~clean.mask
    return Targets(
        mask=clean.mask,
        labels=clean.labels.masked_fill(rows, 10**6),
        topk_ids=clean.topk_ids.masked_fill(rows[:, None], 10**6),
        topk_logprobs=clean.topk_logprobs.masked_fill(rows[:, None], junk),
        tail_logprob=clean.tail_logprob.masked_fill(rows, junk),
        sample_ids=clean.sample_ids.masked_fill(rows[:, None], 10**6),
        sample_counts=clean.sample_counts.masked_fill(rows[:, None], junk),
    )


def targets_of(teacher_logits: Tensor, top_k: int, draws: int = 20, seed: int = 1) -> Targets:
    """Targets from `(T, V)` logits: every fourth token masked, every fifth without a label."""
    T, V = teacher_logits.shape
    generator = torch.Generator().manual_seed(seed)
    log_p = teacher_logits.double().log_softmax(1)
    kept, ids = log_p.topk(top_k, dim=1)
    rest = log_p.scatter(1, ids, -torch.inf).logsumexp(1)
    counts = torch.zeros(T, V, dtype=torch.float64)
    if draws:
        drawn = torch.multinomial(log_p.exp(), draws, replacement=True, generator=generator)
        counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    sample_counts, sample_ids = counts.topk(min(draws, V), dim=1)
    labels = torch.randint(V, (T,), generator=generator)
    return Targets(
        mask=torch.arange(T) % 4 != 3,
        labels=labels.masked_fill(torch.arange(T) % 5 == 4, NO_LABEL),
        topk_ids=ids,
        topk_logprobs=kept.float(),
        tail_logprob=rest.float(),
        sample_ids=sample_ids,
        sample_counts=sample_counts.float(),
    )
