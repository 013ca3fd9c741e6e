"""Choice of a format for each weight under a total budget of bits.

This is a multiple-choice knapsack: choose one option for every item with the least total cost and
at most `budget` bits.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

import numpy as np

SLACK = 1e-9  # relative tolerance for rounding errors when two sums of costs are compared


class Option(NamedTuple):
    """One way to store a weight."""

    cost: float  # cost in nats; measurement noise may make it negative
    bits: int  # bits that the option uses of the budget


def choose_options(items: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Return the index of the option taken of each of `items`: the least total cost in `budget`.

    The result is exact. Items are added one by one, and of the partial sums only those are kept
    that no other sum beats in both bits and cost. A partial sum is also dropped when its cheapest
    completion, at the Lagrangian price of a bit, costs more than the best complete choice found so
    far.

    Args:
        items: the options of each item, at least one.
        budget: bits for all items together.

    Raises:
        ValueError: even the smallest options exceed the budget.
    """
    least = sum(min(option.bits for option in options) for options in items)
    if least > budget:
        raise ValueError(f"budget={budget} is below the {least} bits of the smallest options")
    price = _price_of_a_bit(items, budget)
    known = _cheapest(items, price).cost
    limit = known + SLACK * (1 + abs(known))
    bits, cost = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps = []
    # lower bound on the priced cost (cost + price * bits) of all items after each one
    priced = [min(o.cost + price * o.bits for o in options) for options in items]
    rests = list(accumulate(reversed(priced[1:]), initial=0.0))[::-1]
    for options, rest in zip(items, rests, strict=True):
        origin, taken = np.divmod(np.arange(len(bits) * len(options)), len(options))
        bits = bits[origin] + np.array([option.bits for option in options])[taken]
        cost = cost[origin] + np.array([option.cost for option in options])[taken]
        hopeful = (bits <= budget) & (cost + rest - price * (budget - bits) <= limit)
        # keep the Pareto front: no other sum has at most these bits and a lower cost
        among = np.flatnonzero(hopeful)
        order = among[np.lexsort((cost[among], bits[among]))]
        before = np.minimum.accumulate(cost[order])[:-1]
        kept = order[np.concatenate([[True], cost[order][1:] < before])]
        bits, cost = bits[kept], cost[kept]
        steps.append((origin[kept], taken[kept]))
    last, chosen = int(cost.argmin()), []  # backtrack from the cheapest sum
    for origin, taken in reversed(steps):
        chosen.append(int(taken[last]))
        last = int(origin[last])
    return chosen[::-1]


def _price_of_a_bit(items: Sequence[Sequence[Option]], budget: int) -> float:
    """Return the lowest price, in nats per bit, at which the cheapest options together fit."""
    slopes = {0.0}
    for options in items:
        for one, other in combinations(options, 2):
            if one.bits != other.bits:
                slopes.add((one.cost - other.cost) / (other.bits - one.bits))
    prices = sorted(slope for slope in slopes if slope >= 0)
    # at this price the smallest options win, whatever the rounding
    prices.append(2 * prices[-1] + 1)
    place = bisect_left(prices, True, key=lambda price: _cheapest(items, price).bits <= budget)
    return prices[place]


def _cheapest(items: Sequence[Sequence[Option]], price: float) -> Option:
    """Return the sum of each item's cheapest option at `price`; ties go to the smaller one."""
    taken = [min(options, key=lambda o: (o.cost + price * o.bits, o.bits)) for options in items]
    return Option(sum(option.cost for option in taken), sum(option.bits for option in taken))
