"""Lists of cases that cover every value of every parameter without their whole product."""

from collections.abc import Iterable


def covering(*values: Iterable) -> list[tuple]:
    """Return as many cases as the longest list has values, each value of each list in one of them.

    Lists come in descending order of length. Each but the first is cycled, and shifted by one
    whenever those before it have run through all their pairs.
    """
    columns, length, shifts = [], 0, []
    for each in map(list, values):
        length = length or len(each)
        places = [sum(i // period for period in shifts) % len(each) for i in range(length)]
        columns.append([each[place] for place in places] if shifts else each)
        assert len(set(places)) == len(each) or not shifts, "the lists do not descend in length"
        shifts.append(shifts[-1] * len(each) if shifts else 1)
    return [*zip(*columns, strict=True)]
