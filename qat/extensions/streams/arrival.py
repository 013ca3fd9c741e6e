"""Read a cache that `qat cache` may still be writing, in an order that its growth does not change.

The first pass goes through the training shards by their numbers, `WINDOW` of them shuffled
together. Later passes begin when the cache is whole, and are those of any cache
(`qat.data.sampler`). When a shard came decides nothing: a run that waited ends with the bits of one
over the finished cache.

The held-out split is its first shards, as many as judge a run; later ones are not read.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import numpy as np

from qat.data.cache import MANIFEST, Manifest, Shard, Split, read_manifest, write_atomic
from qat.data.opening import ADDRESS
from qat.data.reader import TeacherCache
from qat.data.sampler import sequence_indices
from qat.data.shard import merged
from qat.errors import CacheError, ConfigError
from qat.files import awaiting, whole_directory

logger = logging.getLogger(__name__)

T = TypeVar("T")
WINDOW = 8
"""Number of training shards that are shuffled together: a shard holds text of one source, and a
step should see several."""


def open_arriving(location: str | Path, judged: int) -> "ArrivingCache":
    """Open the cache in a directory as soon as it has what a run begins with.

    That is the first window of training shards, and held-out shards with `judged` sequences and
    some of each source in that window.

    Raises:
        ConfigError: the cache is at an address.
        CacheError: there is no cache, it is damaged, or nobody writes what is still missing.
    """
    if ADDRESS.match(str(location)):
        raise ConfigError(
            f"order=arrival, but {location} is an address, expected the directory that 'qat cache' "
            "writes; drop --order, or name that directory"
        )
    directory = Path(location)

    def look(manifest: Manifest) -> tuple[Manifest, Manifest] | None:
        first = beginning(manifest, judged)
        return None if first is None else (first, manifest)

    (first, now), waited_s = awaited(directory, look)
    if waited_s:
        logger.info("waited %.1f s for the first shards of %s", waited_s, directory)
    return ArrivingCache(directory, first, now)


def save_beginning(cache: Path, out: Path, judged: int) -> None:
    """Make `out`, beside the cache, a finished cache of the shards with which a run begins.

    It holds links to them, and is for what cannot wait until the cache is whole: the calibration.
    An `out` that is there is kept.

    Raises:
        CacheError: see `open_arriving`.
    """
    if out.is_dir():
        return
    manifest = open_arriving(cache, judged).manifest.model_copy(update={"state": "complete"})
    with whole_directory(out) as partial:
        for shard in manifest.shards:
            (partial / shard.file).symlink_to(Path("..", cache.name, shard.file))
        write_atomic(partial / MANIFEST, manifest.to_bytes())


class ArrivingCache(TeacherCache):
    """A cache whose training shards may still be arriving; `manifest` has the first ones alone.

    So what identifies the cache is the same when a run begins and when it is resumed, and on all
    ranks.
    """

    def __init__(self, directory: Path, first: Manifest, now: Manifest) -> None:
        """Open the cache of which `first` has what identifies it, and `now` all that is there."""
        super().__init__(directory, first)
        self._lock = threading.Lock()
        self._is_whole = False
        self._bounds = np.zeros(1, np.int64)
        self._take(now)

    def num_sequences(self, split: Split) -> int:
        """Return the sequences of a split; of training those to come too, where a number is set."""
        arrived = super().num_sequences(split)
        to_come = 0 if self._is_whole or split != "train" else self.manifest.settings.num_sequences
        return max(arrived, to_come)

    def indices(self, seed: int, step: int, count: int) -> np.ndarray:
        """Return the training sequences of a step, `(count,)`; wait until they are there.

        Raises:
            CacheError: they are missing, and nobody writes the cache.
        """
        places = step * count + np.arange(count)
        bounds = self._windows(int(places[-1]) + 1)
        total = int(bounds[-1])
        if places[-1] >= total:  # the cache is whole
            found = sequence_indices(seed, step, count, total)
        else:
            found = np.empty(count, np.int64)
        numbers = np.searchsorted(bounds, places, side="right") - 1
        for number in np.unique(numbers[places < total]).tolist():
            here, begin = numbers == number, bounds[number]
            order = _permutation(seed, number, int(bounds[number + 1] - begin))
            found[here] = begin + order[places[here] - begin]
        return found

    def _windows(self, needed: int) -> np.ndarray:
        """Return where windows begin and end, once they hold `needed` sequences or are all."""
        with self._lock:  # of several threads one looks, and the others find what it found
            if not self._is_whole and self._bounds[-1] < needed:
                _, waited_s = awaited(self.directory, lambda m: self._take(m) >= needed or None)
                self.waits += waited_s > 0
                self.waited_s += waited_s
            return self._bounds

    def _take(self, manifest: Manifest) -> float:
        """Take over the shards that have arrived; return how many sequences may be asked for."""
        shards = arrived(manifest, "train")
        ends = np.cumsum([shard.sequences for shard in shards], dtype=np.int64)
        self._shards["train"] = shards  # before their ends: another thread may be reading
        self._ends["train"] = ends
        self._is_whole = manifest.state == "complete"
        last = ends[-1:] if self._is_whole else ends[:0]
        self._bounds = np.unique([0, *ends[WINDOW - 1 :: WINDOW], *last])
        return np.inf if self._is_whole else int(self._bounds[-1])


@lru_cache(maxsize=4)
def _permutation(seed: int, window: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, 0, window])).permutation(count)


def awaited(directory: Path, look: Callable[[Manifest], T | None]) -> tuple[T, float]:
    """Return what `look` finds in a cache's manifest, and the seconds until it found anything.

    Raises:
        CacheError: there is no cache, or it is unfinished and nobody writes it.
    """
    began, waited_s = time.monotonic(), 0.0
    for may_come in awaiting(directory):  # asked first: the last shard may come between the two
        manifest = read_manifest(directory)
        if manifest.state == "building":
            with suppress(FileNotFoundError):  # a rank's log is removed when the cache is whole
                manifest = merged(manifest, directory)
        if (found := look(manifest)) is not None:
            return found, waited_s
        waited_s = time.monotonic() - began
        if not may_come:
            raise CacheError(
                f"{directory} has {manifest.total('sequences')} sequences and nobody writes more, "
                "expected 'qat cache' at work or a finished cache; run the same 'qat cache' "
                "command again, and go on with this one's"
            )
    raise AssertionError("unreachable")


def arrived(manifest: Manifest, split: Split) -> list[Shard]:
    """Return the shards of a split up to the first one that is still missing."""
    shards = manifest.of_split(split)
    if manifest.state == "complete":
        return shards
    pairs = takewhile(lambda each: _number(each[1]) == each[0], enumerate(shards))
    return [shard for _, shard in pairs]


def _number(shard: Shard) -> int:
    return int(Path(shard.file).stem.rpartition("-")[2])


def beginning(manifest: Manifest, judged: int) -> Manifest | None:
    """Return a manifest of what a run begins with; None while some of it is missing."""
    first, held_out = arrived(manifest, "train")[:WINDOW], arrived(manifest, "held_out")
    is_whole = manifest.state == "complete"
    if not is_whole and len(first) < WINDOW:
        return None
    sources = {shard.source for shard in first}
    kept: list[Shard] | None = held_out if is_whole or not manifest.settings.held_out else None
    for count in range(1, len(held_out) + 1):
        shards = held_out[:count]
        enough = sum(shard.sequences for shard in shards) >= judged
        if enough and sources <= {shard.source for shard in shards}:
            kept = shards
            break
    if kept is None:
        return None
    return manifest.model_copy(update={"shards": [*first, *kept], "state": "building"})
