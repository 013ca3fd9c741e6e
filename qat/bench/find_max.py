"""The largest batch that fits into memory, found exactly, beside what a memory model predicts."""

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from qat.backend.base import Backend
from qat.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
SLACK_GIB = 1 / 8
"""What a failed run may leave: workspaces of libraries, which are made once and stay."""


def unless_out_of_memory(run: Callable[[], T], backend: Backend) -> T | None:
    """What `run` returns, or None if memory ran out inside; every other error propagates.

    Memory that is free to give is given back before and after. `run` must drop what it makes when
    it fails (`try ... finally`); its stack frames are cleared here.

    Raises:
        AssertionError: a failed `run` left memory behind, which is our bug.
    """
    backend.free_memory()
    before = backend.held_memory_gib()
    result = None
    try:
        result = run()
    except (RuntimeError, MemoryError) as error:
        if not backend.is_out_of_memory(error):
            raise
        while error is not None:  # frames hold tensors, of the errors behind it as well
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
    backend.free_memory()
    if result is None and before is not None:
        left = backend.held_memory_gib() - before
        assert left <= SLACK_GIB, f"running out of memory left {left:.3f} GiB behind"
    return result


FIRST_STRIDES = 128
"""The first stride is one part in so many of the guess."""


def largest_that_fits(fits: Callable[[int], bool], guess: int, most: int | None = None) -> int:
    """The largest `n >= 1` for which `fits(n)`, exactly; 0 if not even 1 fits.

    `fits` must be true up to some size and false above. From `guess` the search walks in strides
    that double until a size that fits and one that does not enclose the answer, then halves
    the gap; it never asks twice for one size. With `t` the answer and `g` the guess it takes at
    most `2 log2(max(g, t)) + 6` trials, and few if the guess is good.

    Args:
        fits: tries one size.
        guess: where to begin; any whole number.
        most: the largest size to consider; without it there is no cap.
    """
    guess = max(1, guess if most is None else min(guess, most))
    stride = max(1, guess // FIRST_STRIDES)
    fitting, failing = 0, None if most is None else most + 1
    size = guess
    while failing is None or failing - fitting > 1:
        if fits(size):
            fitting = size
        else:
            failing = size
        if failing is not None and fitting:
            size = (fitting + failing) // 2
        elif failing is None:
            size, stride = fitting + stride, 2 * stride
        else:
            size, stride = max(1, failing - stride), 2 * stride
    return fitting


PROBES = (1, 8)
"""The smaller trial of the memory model has the tokens that keep a device busy, or the eighth part
of them where those do not fit: buffers of fixed size would pass for a cost per sequence of fewer,
and so would what a recomputed layer holds for a slice of the batch."""
REACH = 8
"""The trial that says where to begin is one part in so many of what the small ones predict."""


@dataclass(frozen=True)
class BatchTrial:
    """One optimizer step at one batch size."""

    batch_size: int
    fits: bool
    peak_gib: float | None
    """Most memory held, if it fitted."""


@dataclass(frozen=True)
class MemoryModel:
    """`peak = fixed + per_sequence * batch_size`, through two measured points."""

    fixed_gib: float
    per_sequence_gib: float

    def peak_gib(self, batch_size: int) -> float:
        """Predicted peak."""
        return self.fixed_gib + self.per_sequence_gib * batch_size

    @classmethod
    def through(cls, low: tuple[int, float], high: tuple[int, float]) -> Self:
        """The line through two batch sizes and their peaks in GiB."""
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return cls(low[1] - slope * low[0], slope)

    def largest(self, memory_gib: float) -> int:
        """The largest batch whose predicted peak stays within `memory_gib`; at least 0."""
        return max(0, int((memory_gib - self.fixed_gib) / self.per_sequence_gib))


class Trials:
    """Tries batch sizes, each once, so that no trial feels the one before."""

    def __init__(self, step: Callable[[int], None], backend: Backend) -> None:
        self._step = step
        self._backend = backend
        self.done: dict[int, BatchTrial] = {}

    def fits(self, batch_size: int) -> bool:
        """Whether one optimizer step of `batch_size` stays within memory."""
        if batch_size not in self.done:
            found = unless_out_of_memory(lambda: self._peak_gib(batch_size), self._backend)
            peak = None if found is None else found[0]
            self.done[batch_size] = BatchTrial(batch_size, found is not None, peak)
            logger.info("batch %d: %s", batch_size, "fits" if found else "out of memory")
        return self.done[batch_size].fits

    def _peak_gib(self, batch_size: int) -> tuple[float | None]:
        """In a tuple: None is what running out of memory gives, not a device that counts none."""
        self._backend.reset_peak_memory()
        self._step(batch_size)
        self._backend.synchronize()
        return (self._backend.peak_memory_gib(),)

    def memory_model(self, seq_len: int) -> MemoryModel | None:
        """The line through two small batches' peaks; None if they do not fit or tell nothing."""
        tokens = self._backend.tokens_at_once()
        for small in dict.fromkeys((*(max(1, tokens // part // seq_len) for part in PROBES), 1)):
            if self.fits(small) and self.fits(2 * small):
                low, high = self.done[small].peak_gib, self.done[2 * small].peak_gib
                if low is None or high is None or high <= low:
                    return None
                return MemoryModel.through((small, low), (2 * small, high))
        return None

    def nearer(self, model: MemoryModel, memory_gib: float) -> MemoryModel:
        """A model through larger trials, if need be a new one: it predicts from less far away."""
        self.fits(max(1, model.largest(memory_gib) // REACH))
        peaks = {size: trial.peak_gib for size, trial in self.done.items() if trial.fits}
        high = max(peaks)
        low = max((size for size in peaks if 2 * size <= high), default=high)
        if peaks[high] <= peaks[low]:
            return model
        return MemoryModel.through((low, peaks[low]), (high, peaks[high]))


@dataclass(frozen=True)
class Search:
    """What a search found."""

    largest: int
    """Confirmed by timed steps, where those were taken."""
    memory_gib: float | None
    model: MemoryModel | None
    """None where even two sequences do not fit, or where nobody counts memory."""
    predicted: int | None
    """The model's answer, before the search."""
    trials: tuple[BatchTrial, ...]


def find_max_batch(
    trials: Trials, memory_gib: float | None, seq_len: int, sizes: Sequence[int] = ()
) -> Search:
    """Fit a memory model on two small trials, then search around its prediction.

    Unless sizes are named, one trial between corrects where the search begins.

    Args:
        trials: what tries a size.
        memory_gib: memory that may be held.
        seq_len: positions in a sequence.
        sizes: the only sizes to consider, ascending; all for none.

    Raises:
        ConfigError: not even the smallest size fits.
    """
    model = trials.memory_model(seq_len)
    predicted = model.largest(memory_gib) if model and memory_gib is not None else None
    guess = predicted or 1
    if predicted and not sizes:
        guess = trials.nearer(model, memory_gib).largest(memory_gib)
    if sizes:
        place = sum(size <= guess for size in sizes)
        found = largest_that_fits(lambda n: trials.fits(sizes[n - 1]), place, len(sizes))
        largest = sizes[found - 1] if found else 0
    else:
        largest = largest_that_fits(trials.fits, guess)
    if largest == 0:
        limit = "memory" if memory_gib is None else f"{memory_gib:.4g} GiB"
        raise ConfigError(
            f"batch_size={min(sizes, default=1)} does not fit into {limit}; add "
            "--gradient-checkpointing, lower --seq-len or raise --memory-limit"
        )
    ordered = tuple(trials.done[size] for size in sorted(trials.done))
    return Search(largest, memory_gib, model, predicted, ordered)
