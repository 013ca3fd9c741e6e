"""A cache's blocks over several ranks: the first one reads and tokenises, each gets its own.

Shapes: N sequences of a block, L positions.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from qat.data.cache import SPLITS
from qat.data.config import CacheConfig
from qat.data.packing import Packed
from qat.data.sources import Source, open_source
from qat.data.stream import Block
from qat.errors import QatError
from qat.ranks import Ranks


def open_shared(config: CacheConfig, ranks: Ranks) -> Source:
    """What `open_source` finds on the first rank; the others learn its name and format alone.

    Raises:
        DataError: see `open_source`.
    """

    def opened() -> Source | None:
        if not ranks.is_first:
            return None
        return open_source(config.data, config.format, config.text_field)

    source = ranks.together(opened)
    said = "" if source is None else f"{source.format}\n{source.name}"
    data_format, name = ranks.texts(said)[0].split("\n")
    return source or Source((), data_format, name)


class Shared:
    """This rank's blocks of `found`, which only the first rank's holds: number `n` is that of rank
    `n % size`, so the work is the same however often the build is stopped.

    They travel on a thread of their own, in rounds of a block each; a rank that fails says so in
    the next round, and all stop.
    """

    def __init__(self, found: Iterator[Block], ranks: Ranks) -> None:
        self._found = found
        self._ranks = ranks.apart()
        self._trouble: QatError | OSError | None = None
        self._is_over = False
        """Whether all ranks were told of a failure."""
        self.total = 0
        """Blocks of all ranks so far."""

    def __iter__(self) -> Iterator[Block]:
        size, rank = self._ranks.size, self._ranks.rank
        if size == 1:
            yield from self._found
            return
        while True:
            blocks = self._round()
            self.total += len(blocks)
            if rank < len(blocks):
                yield blocks[rank]
            if len(blocks) < size:
                return

    def fail(self, error: QatError | OSError, left: Iterable[Block]) -> None:
        """Raise `error` on all ranks, in their next round; returns if there is none any more.

        Args:
            left: this rank's blocks that nobody took yet; they are lost.
        """
        if self._is_over or self._ranks.size == 1:
            raise error
        self._trouble = error
        for _ in left:
            pass

    def _round(self) -> list[Block]:
        """The blocks of one round, on every rank; fewer than ranks in the last one."""

        def take() -> list[Block]:
            if self._trouble is not None:
                raise self._trouble
            return list(islice(self._found, self._ranks.size)) if self._ranks.is_first else []

        try:
            blocks = self._ranks.together(take)
        except QatError:
            self._is_over = True
            raise
        heads = torch.zeros(self._ranks.size, 6, dtype=torch.int64)
        for number, block in enumerate(blocks):
            heads[number] = torch.tensor(_head(block))
        heads = self._ranks.copy_from_first(heads)
        count = int((heads[:, 3] > 0).sum())
        return [
            _received(heads[number], blocks[number] if blocks else None, self._ranks)
            for number in range(count)
        ]


def _head(block: Block) -> tuple[int, ...]:
    N, L = block.packed.tokens.shape
    split = SPLITS.index(block.split)
    return split, block.index, block.first_sequence, N, L, block.packed.num_tokens


def _received(head: Tensor, block: Block | None, ranks: Ranks) -> Block:
    """A block that the first rank has, on each rank."""
    split, index, first_sequence, N, L, num_tokens = map(int, head)
    arrays = []
    for place, dtype in enumerate((np.int32, np.uint8, np.uint8)):
        mine = np.zeros((N, L), dtype) if block is None else block.packed[place].astype(dtype)
        arrays.append(ranks.copy_from_first(torch.from_numpy(mine)).numpy())
    tokens, starts, mask = arrays
    packed = Packed(tokens, starts.astype(bool), mask.astype(bool), num_tokens)
    return Block(SPLITS[split], index, first_sequence, packed)
