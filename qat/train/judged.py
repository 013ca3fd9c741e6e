"""Which held-out sequences judge a run, also in a cache that holds more than when it began.

Shapes: N sequences, S positions.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import xxhash

from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.train.run import BEGIN_THERE, Run

CHUNK = 256
"""Sequences that are read together."""


class Judged(NamedTuple):
    """Held-out sequences, found by what they say."""

    marks: list[str]
    """Of each, how many positions count and the xxh3-64 of those, such as `64:0123456789abcdef`."""
    places: list[int]
    """Where each is in the cache's held-out split."""

    @classmethod
    def first(cls, cache: TeacherCache, count: int) -> Self:
        """The first `count`, or all if there are fewer."""
        rows = zip(range(count), _held_out(cache), strict=False)
        marks = [_mark(row, _end(row)) for _, row in rows]
        return cls(marks, list(range(len(marks))))

    @classmethod
    def found(cls, cache: TeacherCache, marks: Sequence[str]) -> Self | None:
        """Those with these marks, in this order; None if the cache lacks one.

        A sequence that was the last one, and so padded, may go on: its beginning is looked for.
        """
        wanted: dict[str, deque[int]] = defaultdict(deque)
        for number, mark in enumerate(marks):
            wanted[mark].append(number)
        ends = sorted({_end_of(mark) for mark in marks}, reverse=True)
        places: dict[int, int] = {}
        for place, row in enumerate(_held_out(cache)):
            same = (wanted[m] for m in (_mark(row, end) for end in ends) if wanted.get(m))
            if (numbers := next(same, None)) is not None:
                places[numbers.popleft()] = place
            if len(places) == len(marks):
                return cls(list(marks), [places[number] for number in range(len(marks))])
        return None

    def ends(self) -> np.ndarray:
        """`(N,)` int64: the position of each from which on nothing counts."""
        return np.array([_end_of(mark) for mark in self.marks], dtype=np.int64)


def cache_facts(cache: TeacherCache) -> dict[str, dict[str, object]]:
    """What `run.json` keeps of a cache: how many sequences it has, and all else that made it."""
    manifest = cache.manifest
    settings = {k: v for k, v in manifest.settings.recorded().items() if k != "num_sequences"}
    made = {"teacher": manifest.teacher.identity, "dtype": manifest.teacher.dtype}
    made |= {name: getattr(manifest, name) for name in ("tokenizer", "has_tail", "negatives")}
    counts = {split: cache.num_sequences(split) for split in ("train", "held_out")}
    return {"cache_sequences": counts, "cache_settings": {**settings, **made}}


def holds_more(cache: TeacherCache, content: str, run: Run) -> bool:
    """Whether the cache has more sequences than the one that the run knows, and is made alike.

    Of a run from before its facts were kept nobody can know.

    Raises:
        ConfigError: it has other content, and differs in more than that.
    """
    old, new = run.facts(), cache_facts(cache)
    if old.get("cache_content", content) == content or "cache_settings" not in old:
        return False
    known, made = old["cache_settings"], new["cache_settings"]
    counts = [facts["cache_sequences"]["train"] for facts in (old, new)]
    for name in sorted(known.keys() | made.keys()):
        if known.get(name) != made.get(name):
            raise ConfigError(
                f"{cache.directory} has {name}={made.get(name)}, but the run in {run.path} was "
                f"begun with {known.get(name)}: a cache may have more sequences, and differ in "
                f"nothing else; restore it or choose another --out{BEGIN_THERE}"
            )
    if counts[1] < counts[0]:
        raise ConfigError(
            f"{cache.directory} has {counts[1]} training sequences, but the run in {run.path} "
            f"learned from {counts[0]}, expected as many or more; restore it or choose another "
            f"--out{BEGIN_THERE}"
        )
    return counts[1] > counts[0]


def same_judged(cache: TeacherCache, count: int, run: Run) -> Judged:
    """What has judged the run from its beginning; of a new one, the first `count` sequences.

    Raises:
        ConfigError: the cache does not hold all of it.
    """
    marks = run.facts().get("judged")
    if marks is None:
        return Judged.first(cache, count)
    judged = Judged.found(cache, marks)
    if judged is None:
        raise ConfigError(
            f"{cache.directory} lacks some of the {len(marks)} held-out sequences that judge the "
            f"run in {run.path}, expected all of them: the best student is told by the same ones "
            "from the first to the last; build it from the same documents and more behind them, "
            f"or choose another --out{BEGIN_THERE}"
        )
    return judged


def _held_out(cache: TeacherCache) -> Iterator[np.ndarray]:
    """`(3, S)` int64 of each held-out sequence: tokens, positions, and whether each counts."""
    total = cache.num_sequences("held_out")
    for start in range(0, total, CHUNK):
        batch = cache.batch(range(start, min(start + CHUNK, total)), "held_out", targets=())
        parts = (batch.input_ids, batch.position_ids, batch.mask.long())
        yield from np.stack([part.numpy() for part in parts], axis=1)


def _end(row: np.ndarray) -> int:
    """Positions up to the label of the last one that counts."""
    counted = np.flatnonzero(row[2])
    return min(row.shape[1], int(counted[-1]) + 2) if len(counted) else 1


def _mark(row: np.ndarray, end: int) -> str:
    return f"{end}:{xxhash.xxh3_64_hexdigest(row[:, :end].tobytes())}"


def _end_of(mark: str) -> int:
    return int(mark.partition(":")[0])
