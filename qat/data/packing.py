"""Packs documents into sequences of equal length, and derives what a model needs to read them.

Shapes: N sequences, L = S positions.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qat.data.batch import NO_LABEL


class Packed(NamedTuple):
    """Sequences cut from a stream of documents, `(N, L)` each."""

    tokens: np.ndarray
    """int32."""
    starts: np.ndarray
    """bool: a document, the padding or the sequence begins here."""
    mask: np.ndarray
    """bool: the prediction made here counts. False on padding, on the last token of a document,
    whose successor belongs to another one, on a beginning put before the rest of one, and where
    the next token is none to learn."""
    num_tokens: int
    """Tokens that are not padding."""


class _Piece(NamedTuple):
    """A document or what is left of one."""

    tokens: np.ndarray
    counts: np.ndarray
    begins: bool

    def part(self, begin: int, end: int | None) -> "_Piece":
        """The tokens from `begin` to `end`."""
        begins = self.begins and begin == 0
        return _Piece(self.tokens[begin:end], self.counts[begin:end], begins)


class Packer:
    """Lays documents end to end and cuts the stream into sequences of `length` tokens.

    Where a document is cut, `begin` goes before its rest: models that learned with a
    beginning-of-sequence token in front are at a loss without it. A sequence in which nothing
    counts, such as the middle of a long question, is left out.
    """

    def __init__(self, length: int, pad: int, begin: int | None = None) -> None:
        self._length = length
        self._pad = pad
        self._begin = begin
        self._pieces: deque[_Piece] = deque()
        self._num_tokens = 0

    @property
    def num_full(self) -> int:
        """Complete sequences that `take` can give."""
        return self._num_tokens // self._length

    @property
    def num_left(self) -> int:
        """Sequences that all tokens held would fill, the last one perhaps in part."""
        return -(-self._num_tokens // self._length)

    def push(self, ids: Sequence[int], is_target: np.ndarray | None = None) -> None:
        """Append one document, of which the tokens `is_target` are to be learned, or all."""
        tokens = np.asarray(ids, dtype=np.int32)
        counts = np.zeros(len(tokens), dtype=bool)
        counts[:-1] = True if is_target is None else is_target[1:]
        if self._begin is not None:
            cuts = np.arange(self._room(), len(tokens), self._length - 1)
            tokens = np.insert(tokens, cuts, self._begin)
            counts = np.insert(counts, cuts, False)
        whole = _Piece(tokens, counts, begins=True)
        if is_target is None:
            self._append(whole)
            return
        edges = range(self._room(), len(tokens), self._length)
        for begin, end in pairwise([0, *edges, len(tokens)]):
            self._append(whole.part(begin, end))
            self._leave_out_last()

    def _append(self, piece: _Piece) -> None:
        if len(piece.tokens):
            self._pieces.append(piece)
            self._num_tokens += len(piece.tokens)

    def _room(self) -> int:
        """Tokens that the sequence begun last still takes."""
        return self._length - self._num_tokens % self._length

    def _leave_out_last(self) -> None:
        """Remove the last sequence if it is full and nothing in it counts."""
        if self._room() < self._length:
            return
        left = self._length
        for piece in reversed(self._pieces):
            if piece.counts[-left:].any():
                return
            left -= len(piece.counts)
            if left <= 0:
                break
        self._num_tokens -= self._length
        left = self._length
        while left > 0:
            piece = self._pieces.pop()
            if len(piece.tokens) > left:
                self._pieces.append(piece.part(0, len(piece.tokens) - left))
            left -= len(piece.tokens)

    def take(self, count: int) -> Packed:
        """Remove the first `count` sequences; a last, partial one is padded."""
        used = min(count * self._length, self._num_tokens)
        pieces = self._remove(used)
        shape = (count, self._length)
        padding = (0, count * self._length - used)
        tokens = np.concatenate([piece.tokens for piece in pieces])
        stops = np.cumsum([len(piece.tokens) for piece in pieces])
        starts, mask = np.zeros(used, dtype=bool), np.concatenate([p.counts for p in pieces])
        starts[[0, *stops[:-1]]] = [piece.begins for piece in pieces]
        starts = np.pad(starts, padding)
        starts[used : used + 1] = True
        starts_NL, mask_NL = starts.reshape(shape), np.pad(mask, padding).reshape(shape)
        if self._begin is not None:
            mask_NL[:, 0] &= starts_NL[:, 0]
        starts_NL[:, 0] = True
        return Packed(
            tokens=np.pad(tokens, padding, constant_values=self._pad).reshape(shape),
            starts=starts_NL,
            mask=mask_NL,
            num_tokens=used,
        )

    def _remove(self, num_tokens: int) -> list[_Piece]:
        """The first `num_tokens` tokens held; a document that reaches beyond them is cut."""
        self._num_tokens -= num_tokens
        pieces = []
        while num_tokens:
            piece = self._pieces.popleft()
            if len(piece.tokens) > num_tokens:
                self._pieces.appendleft(piece.part(num_tokens, None))
                piece = piece.part(0, num_tokens)
            pieces.append(piece)
            num_tokens -= len(piece.tokens)
        return pieces


def pack(
    documents: Iterable[Sequence[int]], length: int, pad: int, begin: int | None = None
) -> Packed:
    """All documents at once, the last sequence padded.

    Raises:
        ValueError: there is not one token.
    """
    packer = Packer(length, pad, begin)
    for ids in documents:
        packer.push(ids)
    if packer.num_left == 0:
        raise ValueError("no tokens to pack")
    return packer.take(packer.num_left)


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
