"""The search for the largest batch: its memory model, and trials that leave nothing behind."""

from collections.abc import Callable
from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qat.backend import device as backend
from qat.backend.base import Backend, MemoryUse
from qat.errors import ConfigError
from qat.extensions.bench.find_max import (
    LONGEST_ERROR,
    TOLERANCE,
    OutOfMemory,
    Search,
    Trials,
    find_max_batch,
    largest_that_fits,
    unless_out_of_memory,
)
from qat.extensions.bench.measure import Timing


def speed(batch_size: int) -> float:
    """Tokens a second, most of them at a batch of 200 and far fewer beyond."""
    return 1000 - (200 - batch_size if batch_size < 200 else 10 * (batch_size - 200))


def searched(card: "Card", memory: float, *, survives: int = 10**9, **more: object) -> Search:
    """The whole search, in which sizes above `survives` take a few steps and not all."""
    trials = Trials(card.step, card)
    confirm = lambda size: speed(size) if size <= survives else None  # noqa: E731
    return find_max_batch(trials, confirm, memory, seq_len=1024, **more)


class Card(Backend):
    """A device of our own making: `peak = 2 + 0.25 * batch` GiB, and memory that can leak."""

    def __init__(
        self, memory_gib: float, peak: Callable[[int], float] = lambda size: 2 + 0.25 * size
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.peak = peak
        self.facts = {"memory": memory_gib, "held": 2.0, "steps": []}

    def step(self, batch_size: int) -> Timing:
        self.facts["steps"].append(batch_size)
        peak = self.peak(batch_size)
        if peak > self.facts["memory"]:
            raise torch.OutOfMemoryError(f"full,\n  tried {peak} GiB")
        return Timing(0.0, (speed(batch_size) ** -1,), peak, peak + 1, 1 / batch_size, 1, 1, {})

    def memory_use(self) -> MemoryUse:
        return MemoryUse(self.facts["held"])

    def free_memory(self) -> None:
        pass


@pytest.mark.parametrize("memory", [2.25, 2.5, 3.0, 10.1, 1000.0])
def test_the_largest_is_exact_and_the_model_predicts_it(memory: float) -> None:
    card = Card(memory)
    found = searched(card, memory)
    assert found.largest == int((memory - 2) / 0.25)
    assert len(card.facts["steps"]) == len(set(card.facts["steps"]))
    assert [trial.fits for trial in found.trials] == sorted(
        (trial.fits for trial in found.trials), reverse=True
    )
    if memory > 2.5:
        assert found.predicted == found.largest
        assert found.model.fixed_gib == pytest.approx(2)
        assert found.model.per_sequence_gib == pytest.approx(0.25)


@pytest.mark.parametrize("memory", [40.0, 400.0, 4000.0])
def test_a_peak_of_another_kind_for_large_batches_is_predicted(memory: float) -> None:
    def peak(batch_size: int) -> float:  # a slice's layer, or the inputs of all layers
        return max(2 + 0.02 * batch_size, 0.05 * batch_size)

    card = Card(memory, peak)
    found = searched(card, memory)
    assert 0 <= memory / 0.05 - found.largest <= TOLERANCE * found.largest
    assert found.predicted == pytest.approx(found.largest, rel=0.3)
    assert len(card.facts["steps"]) <= 2 * log2(found.largest) + 6


def test_a_trial_that_fits_is_a_point_of_the_line_where_twice_its_size_does_not() -> None:
    card = Card(12.0)  # 40 sequences
    model = Trials(card.step, card).memory_model(seq_len=64)
    assert card.facts["steps"] == [32, 64, 4] and model.fixed_gib == pytest.approx(2)


def test_a_wrong_prediction_is_overruled_by_trials() -> None:
    card = Card(10.0)
    found = searched(card, 500.0)
    assert found.predicted == 1992 and found.largest == 32


def test_only_the_sizes_named_are_considered() -> None:
    card = Card(10.0)
    found = searched(card, 10.0, sizes=(8, 24, 40))
    assert found.largest == 24 and card.facts["steps"] == [8, 24, 40]
    # fitted after the search: no size was tried for it alone
    assert found.predicted is None and found.model.per_sequence_gib == pytest.approx(0.25)


def test_small_sizes_named_are_the_first_trials_of_the_model() -> None:
    card = Card(10.0)
    found = searched(card, 10.0, sizes=(2, 4, 24, 32, 40))
    assert found.largest == 32 and found.predicted == 32
    assert {2, 4} <= set(card.facts["steps"]) <= {2, 4, 24, 32, 40}


def test_a_trial_keeps_its_loss_or_the_allocators_words() -> None:
    trials = {each.batch_size: each for each in searched(Card(10.0), 10.0).trials}
    assert trials[32].loss_nats == 1 / 32 and trials[32].error is None
    assert trials[33].error == "full, tried 10.25 GiB" and trials[33].loss_nats is None


def test_the_fastest_batch_is_not_the_largest() -> None:
    found = searched(Card(2 + 208 / 4), 2 + 208 / 4)
    assert found.largest == 208 and 130 <= found.fastest <= 200
    assert list(found.confirmed) == [208, found.fastest]
    by_size = {trial.batch_size: trial for trial in found.trials}
    assert by_size[208].tokens_per_s == pytest.approx(920) and by_size[208].peak_gib == 54
    assert by_size[208].peak_reserved_gib == 55 and by_size[210].tokens_per_s is None


def test_a_look_ends_and_nothing_is_confirmed_for_a_hundredth_more_tokens() -> None:
    found = searched(Card(2 + 201 / 4), 2 + 201 / 4)
    assert found.largest == found.fastest == 201 and list(found.confirmed) == [201]
    # one to correct the memory model, one to look
    assert sum(10 < trial.batch_size < 201 for trial in found.trials) == 2


@pytest.mark.parametrize("survives", [1, 5, 90, 170, 207])
def test_confirmations_bisect_too(survives: int) -> None:
    found = searched(Card(2 + 208 / 4), 2 + 208 / 4, survives=survives)
    assert 0 <= survives - found.largest <= TOLERANCE * survives
    assert found.fastest <= found.largest and len(found.confirmed) <= 13


def test_not_even_one_sequence_is_a_mistake_of_the_user() -> None:
    for memory, survives in ((2.1, 10**9), (3.0, 0)):
        with pytest.raises(ConfigError, match=f"batch_size=1 does not fit into {memory:g} GiB"):
            searched(Card(memory), memory, survives=survives)


def test_named_sizes_that_all_fail_leave_the_message_of_the_allocator() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=40 .* \(full, tried 12.0 GiB\); name small"):
        searched(Card(3.0), 3.0, sizes=(40, 80))


def test_a_failed_run_that_leaves_memory_behind_is_our_bug() -> None:
    card = Card(10.0)

    def leak() -> None:
        card.facts["held"] += 1.0
        raise torch.OutOfMemoryError("full")

    with pytest.raises(AssertionError, match=r"running out of memory left 1\.000 GiB behind"):
        unless_out_of_memory(leak, card)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("no")])
def test_every_other_error_propagates(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        unless_out_of_memory(fail, backend.select("cpu"))


def test_tensors_of_a_failed_run_are_freed_with_its_frames() -> None:
    cpu = backend.select("cpu")

    def inner(kept: torch.Tensor) -> None:
        try:
            raise KeyError("first")
        except KeyError:
            torch.empty(2**60, dtype=torch.uint8)

    def outer() -> None:
        block = torch.ones(2**27)  # half a GiB, far above the slack
        inner(block)

    found = unless_out_of_memory(outer, cpu)
    assert isinstance(found, OutOfMemory) and 0 < len(found.error) <= LONGEST_ERROR
    assert unless_out_of_memory(lambda: 3, cpu) == 3


SIZES = st.one_of(st.integers(0, 100), st.integers(0, 10**6))


class Threshold:
    """A trial that fits up to a size and records the sizes that it was asked for."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.asked: list[int] = []

    def __call__(self, size: int) -> bool:
        assert size >= 1
        self.asked.append(size)
        return size <= self.largest


@settings(max_examples=600, deadline=None)
@given(
    largest=SIZES,
    guess=SIZES,
    most=st.one_of(st.none(), st.integers(1, 10**6)),
    share=st.floats(0, 1),
    tolerance=st.sampled_from([0.0, TOLERANCE]),
)
def test_any_threshold_is_found_in_few_trials(
    largest: int, guess: int, most: int | None, share: float, tolerance: float
) -> None:
    fits = Threshold(largest)
    if most is not None:  # nothing beyond it is tried
        found = largest_that_fits(fits, guess, most, tolerance=tolerance)
        largest = min(largest, most)
        assert max(fits.asked) <= most
    else:  # what is known to fit is not asked again
        least = int(share * largest)
        found = largest_that_fits(fits, guess, least=least, tolerance=tolerance)
        assert least not in fits.asked or least == 0
        assert len(fits.asked) <= 2 * log2(max(guess, largest, 1)) + 6
    assert 0 <= largest - found <= tolerance * found
    assert len(fits.asked) == len(set(fits.asked))


def test_a_good_guess_costs_few_trials() -> None:
    fits = Threshold(24_600)
    assert largest_that_fits(fits, 24_576) == 24_600
    assert len(fits.asked) <= 10
    fits = Threshold(24_600)
    assert largest_that_fits(fits, 24_576, tolerance=TOLERANCE) == 24_576
    assert len(fits.asked) == 2
