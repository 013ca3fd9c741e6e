"""Packs documents into sequences of equal length, and derives what a model needs to read them.

Shapes: N sequences, L = S positions.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# What a cache hands to whoever learns from it or is judged against it.
#
# Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws (padded).

NO_LABEL = -100


class Batch(NamedTuple):
    """Sequences with the teacher's targets; a kind of target that the cache lacks has width 0."""

    input_ids: Tensor
    """`(B, S)` int64."""
    position_ids: Tensor
    """`(B, S)` int64, restarting at 0 with each document: models then attend within documents."""
    mask: Tensor
    """`(B, S)` bool: the prediction made at this position counts."""
    labels: Tensor
    """`(B, S)` int64: the next token, `NO_LABEL` where the sequence does not hold it."""
    topk_ids: Tensor
    """`(B, S, K)` int64, most likely first."""
    topk_logprobs: Tensor
    """`(B, S, K)` float32, nats, normalised over the whole vocabulary at temperature 1."""
    tail_logprob: Tensor
    """`(B, S)` float32: log of the teacher's mass outside its top K; NaN where nobody knows it."""
    sample_ids: Tensor
    """`(B, S, D)` int64: distinct tokens drawn from the teacher."""
    sample_counts: Tensor
    """`(B, S, D)` float32: how often each was drawn; 0 where padded."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def filled(self, sequences: int, length: int) -> "Batch":
        """The same batch with rows and positions that do not count, up to these numbers of them."""
        B, S = self.mask.shape
        if B >= sequences and S >= length:
            return self

        def fill(tensor: Tensor) -> Tensor:
            shape = max(B, sequences), max(S, length), *tensor.shape[2:]
            found = tensor.new_zeros(shape)
            found[:B, :S] = tensor
            return found

        return Batch(*map(fill, self))


LOOKAHEAD = 256
"""Sequences that are packed together."""
CONTEXT = 4
"""One of so many tokens of a piece repeats what comes before it in its document."""


class PackedRows(NamedTuple):
    """Sequences of whole documents and pieces of long ones, `(N, L)` each."""

    tokens: np.ndarray
    """int32."""
    starts: np.ndarray
    """bool: a document, a piece of one or the padding begins here."""
    mask: np.ndarray
    """bool: the prediction made here counts. False on padding, on the last token of a document,
    on what a piece repeats, and where the next token is none to learn."""
    num_tokens: int
    """Tokens that are not padding."""


class _Piece(NamedTuple):
    """A document or a part of one that a sequence holds."""

    tokens: np.ndarray
    counts: np.ndarray


class Packer:
    """Lays whole documents into sequences of `length` tokens, so that little room is left.

    So many documents as would fill `lookahead` sequences are packed together by best fit
    decreasing: the longest first, each where it leaves least room. Their sequences come in the
    order of the first document in each, and how many are taken changes none. Without `sorts` the
    documents are laid in their own order, so that sequences of fewer documents are those of more,
    or their beginnings.

    A longer document is cut into pieces. A piece that goes on with a document begins with a quarter
    of its length that was read before and does not count, so that what counts has something before
    it: half of that, at most, is how the document begins, up to the first token to learn (a chat's
    question), or its first token alone if this is one of `special` (models that learned with such a
    token in front are at a loss without it); the rest is what the piece goes on with. A piece in
    which nothing counts, such as the middle of a long question, is left out.
    """

    def __init__(
        self,
        length: int,
        pad: int,
        special: Collection[int] = (),
        *,
        lookahead: int = LOOKAHEAD,
        sorts: bool = True,
    ) -> None:
        self._length = length
        self._pad = pad
        self._special = frozenset(special)
        self._lookahead = lookahead
        self._sorts = sorts
        self._waiting: list[_Piece] = []
        self._num_waiting = 0
        self._rows: deque[list[_Piece]] = deque()

    @property
    def num_full(self) -> int:
        """Sequences that `take` can give."""
        return len(self._rows)

    @property
    def is_empty(self) -> bool:
        """Whether nothing that counts is held."""
        return not self._rows and not self._waiting

    def push(self, ids: Sequence[int], is_target: np.ndarray | None = None) -> None:
        """Add one document, of which the tokens `is_target` are to be learned, or all."""
        tokens = np.array(ids, dtype=np.int32)
        counts = np.zeros(len(tokens), dtype=bool)
        counts[:-1] = True if is_target is None else is_target[1:]
        opening = 0 if is_target is None else int(is_target.argmax())
        for piece in self._pieces(tokens, counts, opening):
            if piece.counts.any():
                self._waiting.append(piece)
                self._num_waiting += len(piece.tokens)
        if self._num_waiting >= self._lookahead * self._length:
            self.finish()

    def finish(self) -> None:
        """Pack what was pushed: there is no more that it could be packed with."""
        self._rows.extend(self._fitted(self._waiting))
        self._waiting, self._num_waiting = [], 0

    def _pieces(self, tokens: np.ndarray, counts: np.ndarray, opening: int) -> list[_Piece]:
        """The document, or parts of it that fit; every prediction counts in one at most."""
        length = self._length
        if len(tokens) <= length:
            return [_Piece(tokens, counts)]
        context = max(1, length // CONTEXT)
        opening = min(max(opening, int(tokens[0]) in self._special), context // 2)
        pieces = []
        for begin in range(0, len(tokens) - context, length - context):
            part = slice(begin, begin + length)
            piece = _Piece(tokens[part].copy(), counts[part].copy())
            if begin:
                piece.counts[: context - 1] = False
                piece.tokens[:opening] = tokens[:opening]
            if begin + length < len(tokens):
                piece.counts[-1] = False  # the next piece holds the token that this predicts
            pieces.append(piece)
        return pieces

    def _fitted(self, pieces: list[_Piece]) -> list[list[_Piece]]:
        """The pieces in sequences by best fit; each sequence in the order of `pieces`."""
        sizes = np.array([len(piece.tokens) for piece in pieces])
        rows: list[list[int]] = []
        by_room: list[list[int]] = [[] for _ in range(self._length + 1)]
        rooms = 0  # bit r says whether a sequence has room r
        order = np.argsort(-sizes, kind="stable") if self._sorts else np.arange(len(sizes))
        for number in order.tolist():
            size = int(sizes[number])
            fitting = rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                row = by_room[room].pop()
                if not by_room[room]:
                    rooms ^= 1 << room
            else:
                room, row = self._length, len(rows)
                rows.append([])
            rows[row].append(number)
            by_room[room - size].append(row)
            rooms |= 1 << (room - size)
        return [[pieces[number] for number in row] for row in sorted(map(sorted, rows))]

    def take(self, count: int) -> PackedRows:
        """Remove the first `count` sequences; room that is left in them is padded."""
        rows = [self._rows.popleft() for _ in range(count)]
        pieces = [piece for row in rows for piece in row]
        sizes = np.array([len(piece.tokens) for piece in pieces])
        owners = np.repeat(np.arange(count), [len(row) for row in rows])
        used = np.bincount(owners, sizes).astype(int)
        padding_before = np.cumsum(self._length - used) - (self._length - used)
        begins = np.cumsum(sizes) - sizes + padding_before[owners]
        places = np.arange(sizes.sum()) + np.repeat(padding_before[owners], sizes)
        tokens = np.full(count * self._length, self._pad, dtype=np.int32)
        starts, mask = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=bool)
        tokens[places] = np.concatenate([piece.tokens for piece in pieces])
        mask[places] = np.concatenate([piece.counts for piece in pieces])
        starts[begins] = True
        starts[(np.arange(count) * self._length + used)[used < self._length]] = True
        shape = count, self._length
        return PackedRows(
            tokens.reshape(shape), starts.reshape(shape), mask.reshape(shape), int(sizes.sum())
        )


def pack(
    documents: Iterable[Sequence[int]], length: int, pad: int, special: Collection[int] = ()
) -> PackedRows:
    """All documents at once, as `Packer` packs them.

    Raises:
        ValueError: nothing in them counts.
    """
    packer = Packer(length, pad, special)
    for ids in documents:
        packer.push(ids)
    packer.finish()
    if packer.num_full == 0:
        raise ValueError("no tokens to pack")
    return packer.take(packer.num_full)


def position_ids(starts: Tensor) -> Tensor:
    """`(B, S)` int64 positions that restart at 0 wherever `starts` is true."""
    places_S = torch.arange(starts.shape[1], device=starts.device)
    zero = torch.zeros((), dtype=torch.int64, device=starts.device)
    return places_S - torch.where(starts, places_S, zero).cummax(dim=1).values


def labels(input_ids: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
    """The next token of the same document, `(B, S)` int64.

    `NO_LABEL` where the prediction does not count or the sequence ends before the next token.
    """
    labels_BS = torch.full_like(input_ids, NO_LABEL)
    known = mask[:, :-1] & ~starts[:, 1:]
    labels_BS[:, :-1][known] = input_ids[:, 1:][known]
    return labels_BS
