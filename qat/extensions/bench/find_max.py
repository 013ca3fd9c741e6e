"""Search for the largest batch that fits into memory and the fastest one, by a memory model."""

import logging
import traceback
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self, TypeVar

from qat.backend.base import Backend
from qat.errors import ConfigError
from qat.extensions.bench.measure import Timing
from qat.process import is_out_of_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")
SLACK_GIB = 1 / 8
"""Memory that a failed run may leave allocated: library workspaces, which are allocated once."""
LONGEST_ERROR = 400  # characters of an allocator's message that a row keeps


class OutOfMemory(NamedTuple):
    """The failure of a run that did not fit into memory."""

    error: str  # the allocator's message, in one line


def unless_out_of_memory(run: Callable[[], T], backend: Backend) -> T | OutOfMemory:
    """Return the result of `run`, or the reason if memory runs out; other errors propagate.

    Cached memory is freed before, and after a failure. If `run` fails it must drop what it made
    (`try ... finally`); its stack frames are cleared here.

    Raises:
        AssertionError: a failed `run` left memory allocated, which is our bug.
    """
    backend.free_memory()
    before = backend.memory_use().held_gib
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        words = " ".join(str(error).split())[:LONGEST_ERROR]
        result = OutOfMemory(words or type(error).__name__)
        while error is not None:  # frames hold tensors, also those of chained errors
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
    backend.free_memory()
    if before is not None:
        left = backend.memory_use().held_gib - before
        assert left <= SLACK_GIB, f"running out of memory left {left:.3f} GiB behind"
    return result


TOLERANCE = 0.01
"""Differences that a search leaves alone: of the largest batch, and of speeds of short trials."""
GROWTH = 4
"""Factor between strides: a guess may be far off, and fixed strides would then take most trials."""


def largest_that_fits(
    fits: Callable[[int], bool],
    guess: int,
    most: int | None = None,
    *,
    least: int = 0,
    tolerance: float = 0.0,
) -> int:
    """Return the largest `n >= 1` for which `fits(n)`; 0 if not even 1 fits.

    `fits` must be true up to some size and false above. From `guess` the search moves in strides
    that grow fourfold until a size that fits and one that does not enclose the answer, then it
    bisects. No size is tried twice. With the answer `t` and the guess `g` it takes at most `2
    log2(max(g, t)) + 6` trials, and few if the guess is good.

    Args:
        fits: tries one size.
        guess: the first size to try; any whole number.
        most: the largest size to consider; None for no limit.
        least: a size that is known to fit; 0 for none.
        tolerance: the share of the answer by which a larger size might fit too.
    """
    guess = max(1, guess if most is None else min(guess, most))
    is_beyond = guess > least
    stride = max(1, int(TOLERANCE * guess))
    size, stride = (guess, stride) if is_beyond else (2 * least, least)
    fitting, failing = least, None if most is None else most + 1
    is_enclosed = False
    while failing is None or failing - fitting > max(1, tolerance * fitting):
        if fits(size):
            fitting = size
        else:
            failing = size
        is_enclosed = is_enclosed or (failing is not None and fitting > least)
        if failing is None:
            size, stride = fitting + stride, GROWTH * stride
        elif is_enclosed or 2 * stride >= failing - fitting:
            size = (fitting + failing) // 2
        else:
            size, stride = failing - stride, GROWTH * stride
    return fitting


PROBES = (1, 8)
"""Divisors of the tokens that keep a device busy: the smaller trial of the memory model has all of
them, or an eighth if those do not fit. With fewer tokens, buffers of fixed size and the slices of a
recomputed layer would look like a cost per sequence."""
REACH, FARTHEST = 2, 3
"""A trial that corrects a prediction has the predicted size over `REACH`; more follow while the
prediction is over `FARTHEST` times the largest trial."""


SPEED_TRIALS = 3  # most trials that look for a faster batch after the search for the largest


@dataclass(frozen=True)
class BatchTrial:
    """A few optimizer steps at one batch size; None is what did not fit or is not counted."""

    batch_size: int
    error: str | None = None  # the allocator's message; None if the batch fits
    peak_gib: float | None = None  # peak of memory in use
    peak_reserved_gib: float | None = None  # peak of memory that PyTorch reserved on the device
    step_s: float | None = None
    tokens_per_s: float | None = None
    loss_nats: float | None = None

    @property
    def fits(self) -> bool:
        """True if the steps fit into memory."""
        return self.error is None


@dataclass(frozen=True)
class MemoryModel:
    """The line `peak = fixed + per_sequence * batch_size` through two measured points."""

    fixed_gib: float
    per_sequence_gib: float

    def peak_gib(self, batch_size: int) -> float:
        """Return the predicted peak in GiB."""
        return self.fixed_gib + self.per_sequence_gib * batch_size

    @classmethod
    def through(cls, low: tuple[int, float], high: tuple[int, float]) -> Self:
        """Return the line through two batch sizes and their peaks in GiB."""
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return cls(low[1] - slope * low[0], slope)

    def largest(self, memory_gib: float) -> int:
        """Return the largest batch whose predicted peak stays within `memory_gib`; at least 0."""
        return max(0, int((memory_gib - self.fixed_gib) / self.per_sequence_gib))


class Trials:
    """Tries each batch size once, with memory freed between trials so that they are independent."""

    def __init__(self, time_steps: Callable[[int], Timing], backend: Backend) -> None:
        self._time_steps = time_steps
        self._backend = backend
        self.done: dict[int, BatchTrial] = {}

    def fits(self, batch_size: int) -> bool:
        """Return whether a few optimizer steps of `batch_size` fit into memory."""
        if batch_size not in self.done:
            found = unless_out_of_memory(lambda: self._time_steps(batch_size), self._backend)
            if isinstance(found, OutOfMemory):
                self.done[batch_size] = BatchTrial(batch_size, found.error)
                logger.info("batch %d: out of memory", batch_size)
                return False
            numbers = found.peak_gib, found.reserved_gib, found.step_s, found.tokens_per_s
            self.done[batch_size] = BatchTrial(batch_size, None, *numbers, found.loss_nats)
            logger.info(
                "batch %d: fits, %.4g s a step, %.0f tokens/s",
                *(batch_size, found.step_s, found.tokens_per_s),
            )
        return self.done[batch_size].fits

    def fastest(self, choices: Sequence[int]) -> int:
        """Return the tried one of `choices` with the most tokens/s; the last if none was tried."""
        speeds = {size: trial.tokens_per_s for size, trial in self.done.items() if trial.fits}
        among = (size for size in speeds if size in choices)
        return max(among, key=speeds.__getitem__, default=choices[-1])

    def look_for_faster(self, choices: Sequence[int]) -> None:
        """Try sizes a quarter of the way from the fastest towards its farther neighbour.

        It ends with the first that gains no more than `TOLERANCE`. `choices` are all sizes that may
        be tried, ascending up to the largest that fits.
        """
        for _ in range(SPEED_TRIALS):
            best = self.fastest(choices)
            tried = sorted(size for size in self.done if size <= choices[-1])
            at = tried.index(best)
            gaps = [
                choices[bisect_right(choices, low) : bisect_left(choices, high)]
                for low, high in pairwise([0, *tried][at : at + 3])
            ]
            gap = max(gaps[0][::-1], *gaps[1:], (), key=len)
            if not gap or not self.is_faster(gap[len(gap) // 4], best):
                return

    def is_faster(self, batch_size: int, other: int) -> bool:
        """Return whether `batch_size` has more tokens/s than `other`, by more than `TOLERANCE`.

        False if one of them does not fit.
        """
        speeds = [self.done[n].tokens_per_s for n in (batch_size, other) if self.fits(n)]
        return len(speeds) == 2 and speeds[0] > (1 + TOLERANCE) * speeds[1]

    def memory_model(self, seq_len: int, sizes: Sequence[int] = ()) -> MemoryModel | None:
        """Return the line through two small batches' peaks; None if they do not fit or grow.

        The second has twice the sequences of the first, or was tried before. They are among
        `sizes`, unless that is empty.
        """
        tokens = self._backend.tokens_at_once
        for small in dict.fromkeys((*(max(1, tokens // part // seq_len) for part in PROBES), 1)):
            if sizes and not {small, 2 * small} <= {*sizes}:
                continue
            if self.fits(small) and (self.line() or self.fits(2 * small)):
                return self.line()
        return None

    def line(self) -> MemoryModel | None:
        """Return the line through the peaks of the largest batch and of one of at most its half.

        None if there are no two, or if their peaks do not grow or are not counted.
        """
        peaks = {size: trial.peak_gib for size, trial in self.done.items() if trial.fits}
        high = max(peaks, default=0)
        low = max((size for size in peaks if 2 * size <= high), default=high)
        if not peaks or peaks[high] is None or peaks[high] <= peaks[low]:
            return None
        return MemoryModel.through((low, peaks[low]), (high, peaks[high]))

    def nearer(self, model: MemoryModel, memory_gib: float) -> MemoryModel:
        """Correct a memory model by larger trials, so that it extrapolates less.

        The peak of a step may have one cause for small batches (a recomputed layer's buffers for a
        slice of the batch) and another for large ones, with a higher cost per sequence.
        """
        reached = max(n for n, trial in self.done.items() if trial.fits)
        while (size := model.largest(memory_gib)) > FARTHEST * reached:
            while (size := size // REACH) > reached and not self.fits(size):
                pass
            high, line = max(n for n, trial in self.done.items() if trial.fits), self.line()
            if high == reached or line is None:
                break
            model, reached = line, high
        return model


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    largest: int
    fastest: int  # the size with the most tokens/s; the largest if none is `TOLERANCE` faster
    confirmed: dict[int, float | None]
    """The tokens/s of each batch size that was timed again with a fresh compilation; None if memory
    ran out."""
    memory_gib: float | None
    model: MemoryModel | None
    """The fitted model; None if two sequences do not fit, or if memory is not counted."""
    predicted: int | None  # the prediction of the model before the search
    trials: tuple[BatchTrial, ...]


def find_max_batch(
    trials: Trials,
    confirm: Callable[[int], float | None],
    memory_gib: float | None,
    seq_len: int,
    *,
    sizes: Sequence[int] = (),
) -> Search:
    """Fit a memory model on two small trials, search around its prediction, then confirm.

    Unless `sizes` are given, larger trials correct the model; otherwise, if the two small ones are
    not among them, the model is fitted after the search. A few more trials look for a faster batch
    while the code compiled for trials is at hand. Then the largest batch is confirmed, or the
    largest below that can be, and the fastest if its trial was faster by more than `TOLERANCE`.
    Of all sizes, the largest is found within `TOLERANCE`; of `sizes`, exactly.

    Args:
        trials: tries a size.
        confirm: compiles a size anew, runs it and returns its tokens/s; None for out of memory.
        memory_gib: memory that may be used.
        seq_len: positions per sequence.
        sizes: the only sizes to consider, ascending; all if empty.

    Raises:
        ConfigError: not even the smallest size fits.
    """
    model = trials.memory_model(seq_len, sizes)
    predicted = model.largest(memory_gib) if model and memory_gib is not None else None
    if predicted and not sizes:
        model = trials.nearer(model, memory_gib)
        predicted = model.largest(memory_gib)
    guess = predicted or 1
    if sizes:
        place = sum(size <= guess for size in sizes)
        count = largest_that_fits(lambda n: trials.fits(sizes[n - 1]), place, len(sizes))
    else:
        least = max((size for size, trial in trials.done.items() if trial.fits), default=0)
        count = largest_that_fits(trials.fits, guess, least=least, tolerance=TOLERANCE)
    choices = (sizes or range(1, count + 1))[:count]
    if choices:
        trials.look_for_faster(choices)
    confirmed: dict[int, float | None] = {}

    def survives(size: int) -> bool:
        confirmed[size] = confirm(size)
        if confirmed[size] is None:
            logger.warning("batch %d took a few steps but not all; looking below", size)
        return confirmed[size] is not None

    count = largest_that_fits(
        lambda n: survives(choices[n - 1]), count, count, tolerance=0.0 if sizes else TOLERANCE
    )
    choices = choices[:count]
    if not choices:
        least, limit = min(sizes, default=1), "memory"
        if memory_gib is not None:
            limit = f"{memory_gib:.4g} GiB"
        error = trials.done[least].error if least in trials.done else None
        smaller = "name smaller --batch-sizes, " if sizes else ""
        raise ConfigError(
            f"batch_size={least} does not fit into {limit}{f' ({error})' if error else ''}; "
            f"{smaller}add --gradient-checkpointing, lower --seq-len or raise --memory-limit"
        )
    promising = trials.fastest(choices)
    if promising not in confirmed and trials.is_faster(promising, choices[-1]):
        survives(promising)
    speeds = {size: speed for size, speed in confirmed.items() if speed is not None}
    fastest = max(speeds, key=speeds.__getitem__)
    ordered = tuple(trials.done[size] for size in sorted(trials.done))
    model = model or trials.line()
    return Search(choices[-1], fastest, confirmed, memory_gib, model, predicted, ordered)
