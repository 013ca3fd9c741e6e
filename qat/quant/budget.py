"""Which format each weight gets when all of them together may take only so many bits.

A multiple-choice knapsack: one option of every item, the least total cost, at most `budget` bits.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

import numpy as np

SLACK = 1e-9
"""Relative room for rounding where two sums of costs are compared."""


class Option(NamedTuple):
    """One way to store a weight."""

    cost: float
    """What it costs, in nats; noise may make it negative."""
    bits: int
    """What it takes of the budget."""


def choose_options(items: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """The number of the option to take of each of `items`: the least total cost within `budget`.

    Exact. Items join one by one, and of the sums so far only those stay that no other beats in both
    bits and cost. A sum is also dropped when even the cheapest way to go on, at the Lagrangian
    price of a bit, ends above the best whole choice known.

    Args:
        items: the options of each item, at least one.
        budget: bits for all items together.

    Raises:
        ValueError: not even the smallest options fit.
    """
    least = sum(min(option.bits for option in options) for options in items)
    if least > budget:
        raise ValueError(f"budget={budget} is below the {least} bits of the smallest options")
    price = _price_of_a_bit(items, budget)
    known = _cheapest(items, price).cost
    limit = known + SLACK * (1 + abs(known))
    bits, cost = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps = []
    # behind each item, the least that all later ones cost with their bits paid for
    priced = [min(o.cost + price * o.bits for o in options) for options in items]
    rests = list(accumulate(reversed(priced[1:]), initial=0.0))[::-1]
    for options, rest in zip(items, rests, strict=True):
        origin, taken = np.divmod(np.arange(len(bits) * len(options)), len(options))
        bits = bits[origin] + np.array([option.bits for option in options])[taken]
        cost = cost[origin] + np.array([option.cost for option in options])[taken]
        hopeful = (bits <= budget) & (cost + rest - price * (budget - bits) <= limit)
        # those sums that no other takes with fewer or equal bits and less cost
        among = np.flatnonzero(hopeful)
        order = among[np.lexsort((cost[among], bits[among]))]
        before = np.minimum.accumulate(cost[order])[:-1]
        kept = order[np.concatenate([[True], cost[order][1:] < before])]
        bits, cost = bits[kept], cost[kept]
        steps.append((origin[kept], taken[kept]))
    last, chosen = int(cost.argmin()), []  # from the cheapest sum back to what led to it
    for origin, taken in reversed(steps):
        chosen.append(int(taken[last]))
        last = int(origin[last])
    return chosen[::-1]


def _price_of_a_bit(items: Sequence[Sequence[Option]], budget: int) -> float:
    """The lowest price, in nats a bit, at which the cheapest options together fit."""
    slopes = {0.0}
    for options in items:
        for one, other in combinations(options, 2):
            if one.bits != other.bits:
                slopes.add((one.cost - other.cost) / (other.bits - one.bits))
    prices = sorted(slope for slope in slopes if slope >= 0)
    prices.append(2 * prices[-1] + 1)  # here the smallest options win, whatever the rounding
    place = bisect_left(prices, True, key=lambda price: _cheapest(items, price).bits <= budget)
    return prices[place]


def _cheapest(items: Sequence[Sequence[Option]], price: float) -> Option:
    """All items in their cheapest options at that price, the smaller of two equals, added up."""
    taken = [min(options, key=lambda o: (o.cost + price * o.bits, o.bits)) for options in items]
    return Option(sum(option.cost for option in taken), sum(option.bits for option in taken))
