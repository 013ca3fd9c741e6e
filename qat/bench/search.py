"""The search for the largest size that fits."""

from collections.abc import Callable

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
