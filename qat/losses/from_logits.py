"""From logits to losses, where all logits are at hand: evaluation, and the oracle of tests.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from qat.kernels.head import wide, without
from qat.losses.registry import needs_of, reads_others, sums_by_name
from qat.losses.student import Student, WordsRead
from qat.losses.targets import Targets, valid_rows


def loss_from_logits(
    logits: Tensor, targets: Targets, terms: dict[str, float], *, temperature: float = 1.0
) -> dict[str, Tensor]:
    """The sum of each loss over valid tokens, and their weighted sum as `"loss"`, all in nats.

    Computed in float32 (float64 stays) by ordinary autograd; masked rows reach neither value nor
    gradient.

    Args:
        logits: `(T, V)`, of any float dtype.
        targets: the teacher's word on the T tokens.
        terms: weight by name of loss, as `parse_losses` gives them.
        temperature: softmax temperature of the divergences, > 0.
    """
    targets = valid_rows(targets)
    return sums_by_name(student_of(logits, targets, terms), targets, terms, temperature)


def student_of(logits: Tensor, targets: Targets, names: Collection[str]) -> Student:
    """What the losses `names` read of the logits, beside targets as `valid_rows` gives them."""
    logits = wide(logits.masked_fill(~targets.mask[:, None], 0.0))
    words = WordsRead.of(targets, needs_of(names))
    ids = words.ids()
    chosen = logits.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
    others_lse = None
    if reads_others(names) and words.topk.shape[1] < logits.shape[1]:
        others_lse = without(logits, words.topk, -torch.inf).logsumexp(1)
    return words.student(chosen, others_lse)
