"""Formats under a budget of bits, against trying everything."""

import random
from itertools import product

import pytest
from covering import covering

from qat.quant.budget import Option, choose_options


def drawn(seed: int, num_items: int, *, whole: bool) -> list[list[Option]]:
    """Items of a few sizes with two to four options, whose cost falls with bits, mostly."""
    rng = random.Random(seed)
    items = []
    for _ in range(num_items):
        size, weight = rng.choice([3, 8, 24]), rng.lognormvariate(0, 1.5)
        options = []
        for level in range(2, rng.choice([4, 5, 6])):
            cost = weight * 4.0**-level * rng.uniform(0.5, 1.5) - 0.002
            options.append(Option(round(20 * cost) if whole else cost, level * size + level))
        items.append(rng.sample(options, len(options)))
    return items


def total(items: list[list[Option]], chosen: tuple[int, ...]) -> Option:
    taken = [options[place] for options, place in zip(items, chosen, strict=True)]
    return Option(sum(o.cost for o in taken), sum(o.bits for o in taken))


@pytest.mark.parametrize(("seed", "whole"), covering(range(6), [False, True]))
def test_no_choice_within_the_budget_costs_less(seed: int, whole: bool) -> None:
    items = drawn(seed, 6, whole=whole)
    sums = [total(items, c) for c in product(*(range(len(options)) for options in items))]
    least, most = min(s.bits for s in sums), max(s.bits for s in sums)
    for budget in range(least, most + 2, max(1, (most - least) // 25)):
        found = total(items, choose_options(items, budget))
        assert found.bits <= budget
        best = min(s.cost for s in sums if s.bits <= budget)
        assert found.cost == pytest.approx(best, abs=1e-12)


def test_a_large_model_takes_no_time() -> None:
    items = drawn(0, 300, whole=False)
    smallest = sum(min(o.bits for o in options) for options in items)
    largest = sum(max(o.bits for o in options) for options in items)
    budget = (smallest + largest) // 2
    found = total(items, choose_options(items, budget))
    assert budget - 30 < found.bits <= budget


def test_more_bits_than_needed_buy_the_cheapest() -> None:
    items = [[Option(1.0, 2), Option(-0.5, 3), Option(0.1, 9)], [Option(2.0, 4)]]
    assert choose_options(items, 100) == [1, 0]


def test_a_budget_that_nothing_fits() -> None:
    with pytest.raises(ValueError, match="budget=5 is below the 6 bits of the smallest options"):
        choose_options([[Option(1.0, 2)], [Option(2.0, 4)]], 5)
