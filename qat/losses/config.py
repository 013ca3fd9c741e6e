"""Names of the losses, what each reads of the teacher, and the parser for weighted sums."""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from qat.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["topk", "draws", "labels"]


class Reads(NamedTuple):
    """Parts of the teacher and the student that a loss reads."""

    kind: Kind
    """The kind of target: the teacher's top K, its draws, or only the words of the text."""
    tail: bool = True
    """True if it reads the teacher's mass outside the top K."""
    others: bool = True
    """True if it reads the student's log-sum-exp over the words outside the teacher's top K."""


ON_CACHE = {
    "tail": Reads("topk"),
    "sampled": Reads("draws"),
    "candidates": Reads("topk", tail=False, others=False),
    "reverse_kl": Reads("topk"),
    "jsd": Reads("topk"),
    "cakld": Reads("topk"),
    "hard_ce": Reads("labels", tail=False),
}
"""Losses that read a cache."""

WITH_TEACHER = ("kl", "reverse_kl", "jsd", "cakld", "hard_ce")
"""Losses that read a teacher which runs during training."""

BUILT_IN = (*dict.fromkeys((*ON_CACHE, *WITH_TEACHER)),)
"""Names of all built-in losses."""

OWN_WORDS = "own_"
"""Prefix in the metrics of losses on text that the student generated."""

TARGETS = frozenset({"topk", "draws"})
"""Kinds of target that a cache may hold."""


class OwnLoss(NamedTuple):
    """A registered loss and what it reads of a cache."""

    loss: "Callable[..., Tensor]"
    reads: Reads


OWN: dict[str, OwnLoss] = {}
"""Losses added with `register`, by name."""


def register(
    name: str,
    loss: "Callable[..., Tensor]",
    *,
    reads: Kind = "topk",
    reads_tail: bool = True,
) -> None:
    """Register `loss` as `name`, for use in every list of losses on a cache.

    `"name:1,hard_ce:0.1"` is such a list. `loss(student, targets, *, temperature) -> Tensor`
    returns the sum over the T tokens where `targets.mask` is true, in nats, differentiable in
    `student` (`qat.losses.formulas.Student`: the logits of the words that are read, `(T, K)`, `(T,
    D)` or `(T, 1)`, and `lse()`, the log-sum-exp over the whole vocabulary, `(T,)`); `targets` is
    `qat.losses.formulas.Targets`. The trainer divides once by the number of valid tokens.
    Registering a name again replaces its loss.

    Args:
        name: lower-case letters, digits and underscores; starts with a letter.
        loss: the function.
        reads: the kind of target it needs: the teacher's top K, its draws, or only the labels.
        reads_tail: true if it reads `targets.tail_logprob`, which an imported cache lacks.

    Raises:
        ValueError: a built-in loss has that name, or the name cannot stand in a list of losses.
    """
    if name in BUILT_IN or name == "loss":
        raise ValueError(f"name={name!r} is a loss of qat's own; choose another name")
    if name.startswith(OWN_WORDS):
        raise ValueError(f"name={name!r}: {OWN_WORDS} begins the losses on a student's own words")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name={name!r}: expected lower-case letters, digits and underscores")
    if reads not in {"topk", "draws", "labels"}:
        raise ValueError(f"reads={reads!r}: expected topk, draws or labels")
    OWN[name] = OwnLoss(loss, Reads(reads, tail=reads_tail and reads == "topk"))


def reads_of(name: str) -> Reads | None:
    """Return what a loss reads of a cache; None if no loss on a cache has that name."""
    return OWN[name].reads if name in OWN else ON_CACHE.get(name)


def kinds_read(names: Iterable[str]) -> set[Kind]:
    """Return the kinds of target that losses on a cache read: `topk`, `draws`, `labels`."""
    return {reads.kind for name in names if (reads := reads_of(name)) is not None}


def reads_others(names: Iterable[str]) -> bool:
    """Return whether any of these losses reads the student outside the teacher's top K."""
    return any(reads.others for name in names if (reads := reads_of(name)) is not None)


def parse_losses(text: str, setting: str = "loss") -> dict[str, float]:
    """Parse a sum of losses into weights by name.

    `"tail"` becomes `{"tail": 1.0}`, and `"tail:1.0,hard_ce:0.1"` a sum of two.

    Raises:
        ConfigError: an unknown or repeated name, or a weight that is not a positive number.
    """
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, colon, weight = part.strip().partition(":")
        if name not in (*BUILT_IN, *OWN):
            names = (*BUILT_IN, *OWN)
            near = nearest(name, names)
            hint = f"did you mean {near[0]}?" if near else "write NAME or NAME:WEIGHT,NAME:WEIGHT"
            raise ConfigError(
                f"{setting}={text!r} has no loss called {name!r}; there are {', '.join(names)}; "
                f"{hint}"
            )
        if name in terms:
            raise ConfigError(f"{setting}={text!r} names {name} twice; give each loss one weight")
        terms[name] = _weight(weight, name) if colon else 1.0
    return terms


def targets_read(terms: Iterable[str], *, with_teacher: bool = False) -> frozenset[str]:
    """Return the targets of a cache that the losses read: `topk`, `draws`, both or none."""
    return frozenset() if with_teacher else frozenset(kinds_read(terms) & TARGETS)


def check_targets(
    terms: dict[str, float], top_k: int, draws: int, *, has_tail: bool = True
) -> None:
    """Check that a cache with these properties holds the targets of every loss.

    Raises:
        ConfigError: a term reads the teacher's top K, its tail or draws, and the cache holds none;
            or it reads every word of the teacher.
    """
    held = {"topk": top_k > 0, "draws": draws > 0, "labels": True}
    flags = {"topk": "--top-k 64", "draws": "--draws 50"}
    known = ON_CACHE | {name: own.reads for name, own in OWN.items()}
    fitting = ", ".join(
        name for name, reads in known.items() if held[reads.kind] and (has_tail or not reads.tail)
    )
    for name in terms:
        reads = reads_of(name)
        if reads is None:
            raise ConfigError(
                f"loss={name} reads every word of the teacher, but a cache holds top_k={top_k} "
                f"and draws={draws}; use 'qat train --teacher DIR' or choose among {fitting}"
            )
        if not held[reads.kind]:
            raise ConfigError(
                f"loss={name} reads the teacher's {reads.kind}, but the cache has "
                f"top_k={top_k} and draws={draws}; rebuild it with 'qat cache {flags[reads.kind]}' "
                f"or choose among {fitting}"
            )
        if reads.tail and not has_tail:
            raise ConfigError(
                f"loss={name} reads the teacher's mass outside its top K, but the cache was "
                "imported without it; use --loss candidates, or build a cache with 'qat cache'"
            )


def fitting_loss(top_k: int, draws: int, *, has_tail: bool = True) -> str:
    """Return the default loss for a cache that holds these targets."""
    if top_k == 0 and draws > 0:
        return "sampled"
    return "tail" if has_tail else "candidates"


def check_with_teacher(terms: dict[str, float]) -> None:
    """Check that every loss can be computed from a teacher that runs during training.

    Raises:
        ConfigError: a term is not one of `WITH_TEACHER`.
    """
    for name in terms:
        if name not in WITH_TEACHER:
            raise ConfigError(
                f"loss={name} reads the teacher from a cache, but --teacher runs it beside the "
                f"student; drop --teacher or choose among {', '.join(WITH_TEACHER)}"
            )


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = float("nan")
    if not 0 < weight < float("inf"):
        raise ConfigError(
            f"loss: {name} has weight {text!r}; expected a positive number, as in {name}:0.5"
        )
    return weight
