"""The losses by the names that recipes use."""

from collections.abc import Callable

from torch import Tensor

from qat.losses.cross_entropy import hard_ce, sampled
from qat.losses.divergences import cakld, candidates, jsd, reverse_kl, tail

Loss = Callable[..., Tensor]
"""`loss(logits, targets, *, temperature) -> Tensor`: the sum over valid tokens, in nats."""

LOSSES: dict[str, Loss] = {
    "tail": tail,
    "sampled": sampled,
    "candidates": candidates,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "cakld": cakld,
    "hard_ce": hard_ce,
}
"""Exactly the names of `qat.losses.config.NEEDS`."""
