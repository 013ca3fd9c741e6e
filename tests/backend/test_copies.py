"""Pinned tensors share few allocations, one behind the other."""

import itertools
import random

import pytest
import torch

from qat.backend import copies


@pytest.mark.parametrize("seed", range(4))
def test_blocks_lie_side_by_side_in_powers_of_two(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 2**16)
    sizes = [random.Random(seed + n).randrange(1, 2**15) for n in range(50)] + [2**17 + 5]
    places, pieces = copies.placed(sizes)
    assert all(piece.bit_count() == 1 for piece in pieces)
    taken: dict[int, list[tuple[int, int]]] = {}
    for (piece, begin), size in zip(places, sizes, strict=True):
        assert begin % copies.ALIGNED == 0 and begin + size <= pieces[piece]
        taken.setdefault(piece, []).append((begin, begin + size))
    for spans in taken.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    alone = sum(2 ** (size - 1).bit_length() for size in sizes)
    assert sum(pieces) < 0.85 * alone and copies.placed([]) == ([], [])


def test_rooms_are_apart_and_few(monkeypatch) -> None:
    made, empty = [], torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda size, *, dtype, pin_memory: made.append(size) or empty(size, dtype=dtype),
    )
    rooms = copies.pinned_rooms([4, 0, 12, 8])
    for number, room in enumerate(rooms):
        room.view(torch.float32).fill_(number)
    assert [room.view(torch.float32).tolist() for room in rooms] == [
        [0.0],
        [],
        [2.0] * 3,
        [3.0] * 2,
    ]
    assert made == [1024]
