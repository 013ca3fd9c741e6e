"""Pack documents into sequences of equal length, and derive positions and labels from them.

Shapes: N sequences, L = S positions.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qat.backend.device import on

# The batch that training and evaluation read from a cache.
#
# Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws (padded).

NO_LABEL = -100


class Batch(NamedTuple):
    """Sequences with the teacher's targets; targets that the cache lacks have width 0."""

    input_ids: Tensor
    """Token ids, `(B, S)` int64."""
    position_ids: Tensor
    """Positions, `(B, S)` int64, restarting at 0 with each document so that attention stays within
    it."""
    mask: Tensor
    """Loss mask, `(B, S)` bool: true where the prediction of the next token counts."""
    labels: Tensor
    """The next token, `(B, S)` int64; `NO_LABEL` where it does not count or is not in the
    sequence."""
    topk_ids: Tensor
    """The teacher's top tokens, `(B, S, K)` int64, most likely first."""
    topk_logprobs: Tensor
    """Their log-probs, `(B, S, K)` float32, nats, normalised over the whole vocabulary at
    temperature 1."""
    tail_logprob: Tensor
    """Log of the teacher's mass outside its top K, `(B, S)` float32; NaN if the cache has no
    tail."""
    sample_ids: Tensor
    """Distinct tokens drawn from the teacher, `(B, S, D)` int64."""
    sample_counts: Tensor
    """Number of times each token was drawn, `(B, S, D)` float32; 0 for padding."""

    def to(self, device: torch.device) -> "Batch":
        """Return a copy of the batch on `device`; the host does not wait for the device."""
        if self.mask.device.type == "cpu":
            return Batch(*map(on(torch.device(device)).to_device, self))
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def filled(self, sequences: int, length: int) -> "Batch":
        """Pad the batch to at least this many rows and positions; the padding does not count."""
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
"""Number of sequences that are packed together."""
CONTEXT = 4
"""One in this many tokens of a piece repeats earlier tokens of its document as context."""


class PackedRows(NamedTuple):
    """Sequences of whole documents and pieces of long ones, `(N, L)` each."""

    tokens: np.ndarray
    """Token ids, int32."""
    starts: np.ndarray
    """True where a document, a piece of one or the padding begins; bool."""
    mask: np.ndarray
    """Loss mask, bool. False on padding, on a document's last token, on the repeated context of a
    piece, and where the next token is not a target."""
    num_tokens: int
    """Number of tokens that are not padding."""


class _Piece(NamedTuple):
    """A document, or a part of a long one, with its loss mask."""

    tokens: np.ndarray
    counts: np.ndarray


class Packer:
    """Packs whole documents into sequences of `length` tokens with little padding.

    Documents that would fill `lookahead` sequences are packed together by best fit decreasing: the
    longest first, each into the fullest sequence that still has room for it. Sequences are ordered
    by their first document, and taking more of them changes none. Without `sorts` the documents
    keep their own order, so that the sequences of a prefix of the documents are those of all
    documents, or prefixes of them.

    A document longer than `length` is cut into pieces. Each piece after the first begins with
    context: a quarter of its length that repeats earlier tokens and does not count. At most half of
    the context is the document's opening, up to the first target (a chat's question), or its first
    token alone if that is one of `special` (a model trained with such a token in front fails
    without it); the rest are the tokens just before the piece. A piece in which nothing counts,
    such as the middle of a long question, is dropped.
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
        """Number of sequences that `take` can return."""
        return len(self._rows)

    @property
    def is_empty(self) -> bool:
        """True if no counted token is held."""
        return not self._rows and not self._waiting

    def push(self, ids: Sequence[int], is_target: np.ndarray | None = None) -> None:
        """Add one document; `is_target` marks the tokens to learn, None all of them."""
        tokens = np.array(ids, dtype=np.int32)
        counts = np.zeros(len(tokens), dtype=bool)
        # a token counts where the token after it, which it predicts, is a target
        counts[:-1] = True if is_target is None else is_target[1:]
        opening = 0 if is_target is None else int(is_target.argmax())
        for piece in self._pieces(tokens, counts, opening):
            if piece.counts.any():
                self._waiting.append(piece)
                self._num_waiting += len(piece.tokens)
        if self._num_waiting >= self._lookahead * self._length:
            self.finish()

    def finish(self) -> None:
        """Pack all documents that were pushed and are not packed yet."""
        self._rows.extend(self._fitted(self._waiting))
        self._waiting, self._num_waiting = [], 0

    def _pieces(self, tokens: np.ndarray, counts: np.ndarray, opening: int) -> list[_Piece]:
        """Return the document, or parts of it that fit; each prediction counts at most once."""
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
                # the context repeats earlier tokens; its last one predicts the first new token
                piece.counts[: context - 1] = False
                piece.tokens[:opening] = tokens[:opening]
            if begin + length < len(tokens):
                piece.counts[-1] = False  # the next piece holds this token's label
            pieces.append(piece)
        return pieces

    def _fitted(self, pieces: list[_Piece]) -> list[list[_Piece]]:
        """Assign the pieces to sequences by best fit; each sequence keeps the order of `pieces`."""
        sizes = np.array([len(piece.tokens) for piece in pieces])
        rows: list[list[int]] = []
        by_room: list[list[int]] = [[] for _ in range(self._length + 1)]
        rooms = 0  # bit r is set if some sequence has r free positions
        order = np.argsort(-sizes, kind="stable") if self._sorts else np.arange(len(sizes))
        for number in order.tolist():
            size = int(sizes[number])
            fitting = rooms >> size
            if fitting:
                # the lowest set bit: the fullest sequence that still has room
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
        """Remove and return the first `count` sequences, padded to the full length."""
        rows = [self._rows.popleft() for _ in range(count)]
        pieces = [piece for row in rows for piece in row]
        sizes = np.array([len(piece.tokens) for piece in pieces])
        owners = np.repeat(np.arange(count), [len(row) for row in rows])  # sequence of each piece
        used = np.bincount(owners, sizes).astype(int)  # tokens of each sequence, (N,)
        padding_before = np.cumsum(self._length - used) - (self._length - used)  # (N,)
        # offsets of pieces and of tokens in the flat (N * L,) arrays
        begins = np.cumsum(sizes) - sizes + padding_before[owners]
        places = np.arange(sizes.sum()) + np.repeat(padding_before[owners], sizes)
        tokens = np.full(count * self._length, self._pad, dtype=np.int32)
        starts, mask = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=bool)
        tokens[places] = np.concatenate([piece.tokens for piece in pieces])
        mask[places] = np.concatenate([piece.counts for piece in pieces])
        starts[begins] = True
        # the padding of a sequence is a document of its own, which attention keeps apart
        starts[(np.arange(count) * self._length + used)[used < self._length]] = True
        shape = count, self._length
        return PackedRows(
            tokens.reshape(shape), starts.reshape(shape), mask.reshape(shape), int(sizes.sum())
        )


def position_ids(starts: Tensor) -> Tensor:
    """Return `(B, S)` int64 positions that restart at 0 wherever `starts` is true."""
    places_S = torch.arange(starts.shape[1], device=starts.device)
    zero = torch.zeros((), dtype=torch.int64, device=starts.device)
    return places_S - torch.where(starts, places_S, zero).cummax(dim=1).values


def labels(input_ids: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
    """Return the next token of the same document, `(B, S)` int64.

    It is `NO_LABEL` where the prediction does not count or the sequence ends before the next token.
    """
    labels_BS = torch.full_like(input_ids, NO_LABEL)
    known = mask[:, :-1] & ~starts[:, 1:]
    labels_BS[:, :-1][known] = input_ids[:, 1:][known]
    return labels_BS
