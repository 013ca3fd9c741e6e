"""The losses by the names that recipes use, and their weighted sum."""

from collections.abc import Callable, Collection

from torch import Tensor

from qat.losses.config import OWN, needed_by
from qat.losses.cross_entropy import hard_ce, sampled
from qat.losses.divergences import cakld, candidates, jsd, reverse_kl, tail
from qat.losses.student import Student
from qat.losses.targets import Targets

Loss = Callable[..., Tensor]
"""`loss(student, targets, *, temperature) -> Tensor`: the sum over valid tokens, in nats."""

LOSSES: dict[str, Loss] = {
    "tail": tail,
    "sampled": sampled,
    "candidates": candidates,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "cakld": cakld,
    "hard_ce": hard_ce,
}
"""Exactly the names of `qat.losses.config.NEEDS`; `OWN` there has those from outside."""

WITH_TEACHER: dict[str, Loss] = {
    "kl": tail,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "cakld": cakld,
    "hard_ce": hard_ce,
}
"""Exactly the names of `qat.losses.config.WITH_TEACHER`: the teacher's top-k is all words, so the
tail is empty and `tail` is the KL."""


def needs_of(names: Collection[str]) -> set[str]:
    """The kinds of words whose logits these losses read."""
    return {needed_by(name) for name in names}


def reads_others(names: Collection[str]) -> bool:
    """Whether any of these losses reads words outside the teacher's top-k."""
    return set(names) != {"candidates"}


def sums_by_name(
    student: Student,
    targets: Targets,
    terms: dict[str, float],
    temperature: float,
    *,
    losses: dict[str, Loss] = LOSSES,
) -> dict[str, Tensor]:
    """The sum of each loss over valid tokens, and their weighted sum as `"loss"`."""
    sums = {}
    for name in terms:
        loss = OWN[name].loss if name in OWN else losses[name]
        sums[name] = loss(student, targets, temperature=temperature)
    sums["loss"] = sum(weight * sums[name] for name, weight in terms.items())
    return sums
