"""Which losses there are, what each needs of a teacher, and how a weighted sum is written."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from qat.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

NEEDS = {
    "tail": "topk",
    "sampled": "draws",
    "candidates": "topk",
    "reverse_kl": "topk",
    "jsd": "topk",
    "cakld": "topk",
    "hard_ce": "labels",
}
"""Each loss on a cache, and the kind of target that it reads: `topk`, `draws` or `labels`."""

WITHOUT_TAIL = ("candidates", "hard_ce")
"""The losses on a cache that do not ask how much mass lies outside the teacher's top K."""

TARGETS = frozenset({"topk", "draws"})
"""What a cache may hold of the teacher."""

WITH_TEACHER = ("kl", "reverse_kl", "jsd", "cakld", "hard_ce")
"""The losses on a teacher that runs beside the student."""

BUILT_IN = (*dict.fromkeys((*NEEDS, *WITH_TEACHER)),)


class OwnLoss(NamedTuple):
    """A loss from outside, and what it reads of a cache."""

    loss: "Callable[..., Tensor]"
    reads: Literal["topk", "draws", "labels"]
    reads_tail: bool


OWN: dict[str, OwnLoss] = {}
"""The losses that `register` was given, by name."""


def register(
    name: str,
    loss: "Callable[..., Tensor]",
    *,
    reads: Literal["topk", "draws", "labels"] = "topk",
    reads_tail: bool = True,
) -> None:
    """Let `loss` be called `name` wherever losses on a cache are named: `"name:1,hard_ce:0.1"`.

    `loss(student, targets, *, temperature) -> Tensor` gives the sum over the T tokens where
    `targets.mask` is true, in nats, differentiable in `student` (`qat.losses.targets.Student`: the
    logits of the words that are read, `(T, K)`, `(T, D)` or `(T, 1)`, and `lse()`, the log-sum-exp
    over the whole vocabulary, `(T,)`); `targets` is `qat.losses.targets.Targets`. Whoever trains
    divides by the valid tokens once. A name may be registered again, which replaces the loss.

    Args:
        name: lower-case letters, digits and underscores, a letter first.
        loss: the function.
        reads: the kind of target it needs: the teacher's top K, its draws, or only the labels.
        reads_tail: it reads `targets.tail_logprob`, which an imported cache lacks.

    Raises:
        ValueError: a built-in loss has that name, or the name cannot stand in a list of losses.
    """
    if name in BUILT_IN or name == "loss":
        raise ValueError(f"name={name!r} is a loss of qat's own; choose another name")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name={name!r}: expected lower-case letters, digits and underscores")
    if reads not in {"topk", "draws", "labels"}:
        raise ValueError(f"reads={reads!r}: expected topk, draws or labels")
    OWN[name] = OwnLoss(loss, reads, reads_tail and reads == "topk")


def needed_by(name: str) -> str | None:
    """The kind of target that a loss on a cache reads; None if it is none of these."""
    return OWN[name].reads if name in OWN else NEEDS.get(name)


def _is_without_tail(name: str) -> bool:
    return name in WITHOUT_TAIL or (name in OWN and not OWN[name].reads_tail)


def parse_losses(text: str) -> dict[str, float]:
    """Weights by loss name: `"tail"` is `{"tail": 1.0}`, `"tail:1.0,hard_ce:0.1"` a sum of two.

    Raises:
        ConfigError: an unknown or repeated name, or a weight that is not a positive number.
    """
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, colon, weight = part.strip().partition(":")
        if name not in (*BUILT_IN, *OWN):
            raise ConfigError(_unknown(name, text))
        if name in terms:
            raise ConfigError(f"losses={text!r} names {name} twice; give each loss one weight")
        terms[name] = _weight(weight, name) if colon else 1.0
    return terms


def targets_read(terms: Iterable[str], *, with_teacher: bool = False) -> frozenset[str]:
    """Which targets of a cache the losses read: `topk`, `draws`, both or none."""
    needs = set() if with_teacher else {needed_by(name) for name in terms}
    return frozenset(needs & TARGETS)


def check_targets(
    terms: dict[str, float], top_k: int, draws: int, *, has_tail: bool = True
) -> None:
    """Refuse losses whose targets the cache does not hold; the other arguments describe the cache.

    Raises:
        ConfigError: a term reads the teacher's top K, its tail or draws, and the cache holds none;
            or it reads every word of the teacher.
    """
    held = {"topk": top_k > 0, "draws": draws > 0, "labels": True}
    flags = {"topk": "--top-k 64", "draws": "--draws 50"}
    fitting = ", ".join(
        name
        for name in (*NEEDS, *OWN)
        if held[needed_by(name)] and (has_tail or _is_without_tail(name))
    )
    for name in terms:
        need = needed_by(name)
        if need is None:
            raise ConfigError(
                f"losses={name} reads every word of the teacher, but a cache holds top_k={top_k} "
                f"and draws={draws}; use 'qat train --teacher DIR' or choose among {fitting}"
            )
        if not held[need]:
            raise ConfigError(
                f"losses={name} reads the teacher's {need}, but the cache has top_k={top_k} and "
                f"draws={draws}; rebuild it with 'qat cache {flags[need]}' or choose among "
                f"{fitting}"
            )
        if not has_tail and not _is_without_tail(name):
            raise ConfigError(
                f"losses={name} reads the teacher's mass outside its top K, but the cache was "
                "imported without it; use --loss candidates, or build a cache with 'qat cache'"
            )


def fitting_loss(top_k: int, draws: int, *, has_tail: bool = True) -> str:
    """The loss that a cache with so much of its teacher gives without being asked for one."""
    if top_k == 0 and draws > 0:
        return "sampled"
    return "tail" if has_tail else "candidates"


def check_with_teacher(terms: dict[str, float]) -> None:
    """Refuse losses that read a cache where the teacher itself is there.

    Raises:
        ConfigError: a term is not one of `WITH_TEACHER`.
    """
    for name in terms:
        if name not in WITH_TEACHER:
            raise ConfigError(
                f"losses={name} reads the teacher from a cache, but --teacher runs it beside the "
                f"student; drop --teacher or choose among {', '.join(WITH_TEACHER)}"
            )


def _unknown(name: str, text: str) -> str:
    names = (*BUILT_IN, *OWN)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "write NAME or NAME:WEIGHT,NAME:WEIGHT"
    return f"losses={text!r} has no loss called {name!r}; there are {', '.join(names)}; {hint}"


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = float("nan")
    if not 0 < weight < float("inf"):
        raise ConfigError(
            f"losses: {name} has weight {text!r}; expected a positive number, as in {name}:0.5"
        )
    return weight
