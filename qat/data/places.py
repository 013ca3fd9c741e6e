"""The rows of a batch, wherever they lie: all asked of the disk together, then read.

Shapes: B sequences of a batch.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from qat.data.rows import Layout, reads
from qat.data.shard_file import ShardFile

Out = tuple[int, int, memoryview]
"""Where a field begins in a row, its bytes a row, and where those of all sequences go."""


class Places:
    """Where sequences are: in which of the files, and from where to where in it."""

    def __init__(
        self, files: Sequence[ShardFile], owners_B: np.ndarray, rows_B: np.ndarray, layout: Layout
    ) -> None:
        self._layout = layout
        shards = {owner: files[owner].open() for owner in np.unique(owners_B).tolist()}
        is_next = (np.diff(owners_B) == 0) & (np.diff(rows_B) == 1)
        cuts = [0, *(np.flatnonzero(~is_next) + 1).tolist(), len(rows_B)]
        self._runs = []
        """Shard, first and end of what lies side by side in it."""
        self._begins: list[int] = []
        self._lengths: list[int] = []
        for first, end in pairwise(cuts) if len(rows_B) else ():
            shard, row = shards[int(owners_B[first])], int(rows_B[first])
            begins = shard.begins[row : row + end - first + 1]
            self._runs.append((shard, first, end))
            self._begins += begins[:-1].tolist()
            self._lengths += np.diff(begins).tolist()

    def read(
        self, names: Sequence[str], *, drawn: bool
    ) -> tuple[dict[str, Tensor], list[np.ndarray]]:
        """Encoded fields, in the order asked for, and if wanted the bytes of drawn ids."""
        fields = {name: self._layout.fields[name] for name in names}
        shapes = {name: (len(self._begins), *field.shape) for name, field in fields.items()}
        found = {name: np.empty(shapes[name], field.dtype) for name, field in fields.items()}
        outs = [
            (
                self._layout.offsets[name],
                field.stride,
                memoryview(found[name].reshape(-1)).cast("B"),
            )
            for name, field in fields.items()
            if field.stride and self._begins
        ]
        ids = self._room_for_ids() if drawn else []
        wanted = [
            (shard, read)
            for shard, first, end in self._runs
            for read in reads(self._pieces(range(first, end), sorted(outs, key=_begin), ids))
        ]
        for shard, read in wanted:
            shard.expect(read)
        for shard, read in wanted:
            shard.fill(read)
        return {name: torch.from_numpy(array) for name, array in found.items()}, ids

    def _room_for_ids(self) -> list[np.ndarray]:
        ends = accumulate((length - self._layout.width for length in self._lengths), initial=0)
        cuts = list(ends)
        room = np.empty(cuts[-1], np.uint8)
        return [room[first:end] for first, end in pairwise(cuts)]

    def _pieces(
        self, places: range, outs: Sequence[Out], ids: list[np.ndarray]
    ) -> Iterator[tuple[int, memoryview]]:
        for place in places:
            begin = self._begins[place]
            for offset, stride, out in outs:
                yield begin + offset, out[place * stride : (place + 1) * stride]
            if ids:
                yield begin + self._layout.width, memoryview(ids[place])


def _begin(out: Out) -> int:
    return out[0]
