"""The search finds every threshold exactly, and does not ask more than it must."""

from math import log2

from hypothesis import given, settings
from hypothesis import strategies as st

from qat.extensions.bench.find_max import largest_that_fits

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
)
def test_any_threshold_is_found_in_few_trials(
    largest: int, guess: int, most: int | None, share: float
) -> None:
    fits = Threshold(largest)
    if most is not None:  # nothing beyond it is tried
        assert largest_that_fits(fits, guess, most) == min(largest, most)
        assert max(fits.asked) <= most
    else:  # what is known to fit is not asked again
        least = int(share * largest)
        assert largest_that_fits(fits, guess, least=least) == largest
        assert least not in fits.asked or least == 0
        assert len(fits.asked) <= 2 * log2(max(guess, largest, 1)) + 6
    assert len(fits.asked) == len(set(fits.asked))


def test_a_good_guess_costs_few_trials() -> None:
    fits = Threshold(24_600)
    assert largest_that_fits(fits, 24_576) == 24_600
    assert len(fits.asked) <= 10
