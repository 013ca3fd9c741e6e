"""Which losses there are, what each needs of a teacher, and how a weighted sum is written."""

import difflib
from collections.abc import Iterable

from qat.errors import ConfigError

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

NAMES = (*dict.fromkeys((*NEEDS, *WITH_TEACHER)),)


def parse_losses(text: str) -> dict[str, float]:
    """Weights by loss name: `"tail"` is `{"tail": 1.0}`, `"tail:1.0,hard_ce:0.1"` a sum of two.

    Raises:
        ConfigError: an unknown or repeated name, or a weight that is not a positive number.
    """
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, colon, weight = part.strip().partition(":")
        if name not in NAMES:
            raise ConfigError(_unknown(name, text))
        if name in terms:
            raise ConfigError(f"losses={text!r} names {name} twice; give each loss one weight")
        terms[name] = _weight(weight, name) if colon else 1.0
    return terms


def targets_read(terms: Iterable[str], *, with_teacher: bool = False) -> frozenset[str]:
    """Which targets of a cache the losses read: `topk`, `draws`, both or none."""
    needs = set() if with_teacher else {NEEDS[name] for name in terms}
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
        name for name, need in NEEDS.items() if held[need] and (has_tail or name in WITHOUT_TAIL)
    )
    for name in terms:
        if name not in NEEDS:
            raise ConfigError(
                f"losses={name} reads every word of the teacher, but a cache holds top_k={top_k} "
                f"and draws={draws}; use 'qat train --teacher DIR' or choose among {fitting}"
            )
        need = NEEDS[name]
        if not held[need]:
            raise ConfigError(
                f"losses={name} reads the teacher's {need}, but the cache has top_k={top_k} and "
                f"draws={draws}; rebuild it with 'qat cache {flags[need]}' or choose among "
                f"{fitting}"
            )
        if not has_tail and name not in WITHOUT_TAIL:
            raise ConfigError(
                f"losses={name} reads the teacher's mass outside its top K, but the cache was "
                "imported without it; use --loss candidates, or build a cache with 'qat cache'"
            )


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
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "write NAME or NAME:WEIGHT,NAME:WEIGHT"
    return f"losses={text!r} has no loss called {name!r}; there are {', '.join(NAMES)}; {hint}"


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
