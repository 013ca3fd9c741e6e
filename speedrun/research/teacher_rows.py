"""Rows that a teacher trains on: each begins with a document, and several fill it.

Shapes: N rows, L tokens a row.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.data.packing import NO_LABEL


def fill_rows(lengths: list[int], row: int) -> list[list[int]]:
    """Documents of at most `row` tokens by row, each where it leaves the least room."""
    room: list[tuple[int, int]] = []  # ascending (tokens left, row)
    rows: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[document], -1))
        if place == len(room):
            rows.append([])
            room.append((row, len(rows) - 1))
        left, index = room.pop(place)
        rows[index].append(document)
        insort(room, (left - lengths[document], index))
    return rows


def pack_rows(documents: list[list[int]], row: int) -> tuple[Tensor, Tensor]:
    """Ids and labels, `(N, L)` int64 each: every token is there once, none predicts across.

    A document longer than a row is cut, and goes on at the beginning of another.
    """
    parts = [doc[i : i + row + 1] for doc in documents for i in range(0, len(doc), row)]
    parts = [part for part in parts if len(part) > 1]
    rows = fill_rows([min(len(part), row) for part in parts], row)
    ids_NL = torch.zeros(len(rows), row, dtype=torch.int64)
    labels_NL = torch.full_like(ids_NL, NO_LABEL)
    for n, members in enumerate(rows):
        start = 0
        for part in (torch.tensor(parts[i]) for i in members):
            count = min(len(part), row)
            ids_NL[n, start : start + count] = part[:count]
            labels_NL[n, start : start + len(part) - 1] = part[1:]
            start += count
    return ids_NL, labels_NL


def with_empty_rows(rows: tuple[Tensor, Tensor], multiple: int) -> tuple[Tensor, Tensor]:
    """Ids and labels with rows without labels at the end: every batch has one compiled shape."""
    pad = (0, 0, 0, -len(rows[0]) % multiple)
    return F.pad(rows[0], pad), F.pad(rows[1], pad, value=NO_LABEL)


def endless_batches(num_rows: int, size: int, seed: int) -> Iterator[Tensor]:
    """Numbers of rows, `(size,)` each: all rows in a new order, then again; a rest is left out."""
    generator = torch.Generator().manual_seed(seed)
    size = min(size, num_rows)
    while True:
        yield from torch.randperm(num_rows, generator=generator)[: num_rows // size * size].split(
            size
        )
