"""Packs documents into sequences of equal length, and derives what a model needs to read them.

Shapes: N sequences, L = S positions.
"""

from collections.abc import Iterable, Sequence
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
    """bool: the prediction made here counts. False on padding and on the last token of a document,
    whose successor belongs to another one."""
    num_tokens: int
    """Tokens that are not padding."""


class Packer:
    """Lays documents end to end and cuts the stream into sequences of `length` tokens."""

    def __init__(self, length: int, pad: int) -> None:
        self._length = length
        self._pad = pad
        self._documents: list[np.ndarray] = []
        self._offset = 0
        self._num_tokens = 0

    @property
    def num_full(self) -> int:
        """Complete sequences that `take` can give."""
        return self._num_tokens // self._length

    @property
    def num_left(self) -> int:
        """Sequences that all tokens held would fill, the last one perhaps in part."""
        return -(-self._num_tokens // self._length)

    def push(self, ids: Sequence[int]) -> None:
        """Append one document."""
        self._documents.append(np.asarray(ids, dtype=np.int32))
        self._num_tokens += len(ids)

    def take(self, count: int) -> Packed:
        """Remove the first `count` sequences; a last, partial one is padded."""
        wanted = count * self._length
        tokens = np.concatenate(self._documents)
        lengths = [len(document) for document in self._documents]
        starts, ends = _borders(lengths, self._offset)
        tokens = tokens[self._offset :]
        used = min(wanted, len(tokens))
        packed = self._cut(tokens[:used], starts[:used], ~ends[:used], count)
        self._drop(used)
        return packed

    def _cut(self, tokens: np.ndarray, starts: np.ndarray, mask: np.ndarray, count: int) -> Packed:
        padding = count * self._length - len(tokens)
        shape = (count, self._length)
        tokens_NL = np.pad(tokens, (0, padding), constant_values=self._pad).reshape(shape)
        starts = np.pad(starts, (0, padding))
        if padding:
            starts[len(tokens)] = True
        starts_NL = starts.reshape(shape)
        starts_NL[:, 0] = True
        mask_NL = np.pad(mask, (0, padding)).reshape(shape)
        return Packed(tokens_NL, starts_NL, mask_NL, num_tokens=len(tokens))

    def _drop(self, used: int) -> None:
        self._num_tokens -= used
        position = self._offset + used
        done = 0
        while done < len(self._documents) and position >= len(self._documents[done]):
            position -= len(self._documents[done])
            done += 1
        del self._documents[:done]
        self._offset = position


def _borders(lengths: list[int], offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Where documents laid end to end start and end, without the first `offset` tokens."""
    stops = np.cumsum(lengths)
    starts, ends = np.zeros(stops[-1], dtype=bool), np.zeros(stops[-1], dtype=bool)
    starts[0] = True
    starts[stops[:-1]] = True
    ends[stops - 1] = True
    return starts[offset:], ends[offset:]


def pack(documents: Iterable[Sequence[int]], length: int, pad: int) -> Packed:
    """All documents at once, the last sequence padded.

    Raises:
        ValueError: there is not one token.
    """
    packer = Packer(length, pad)
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
