"""How a shard lays out its sequences: all of one side by side, so that a row is one read.

A row holds the fields of `Layout` in that order, then the ids drawn for its sequence, as many bytes
as those take. A shard file has two tensors: `rows`, the bytes of all rows one after the other, and
`row_begins`, where each begins and the last one ends.

Shapes: N sequences of the shard, S positions, K teacher tokens kept, R random tokens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from qat.data.cache import Manifest
from qat.data.codec import CODE_BITS, id_bits, packed_bytes

DTYPES = {"U8": np.dtype("u1"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
ORDER = (
    "log_sum_exp",
    "negative_ids",
    "negative_logits",
    "tokens",
    "starts",
    "mask",
    "sample_marks",
    "topk_ids",
    "topk_codes",
    "topk_range",
    "tail_logprob",
)
"""What a batch is made of comes last, so that it lies side by side with the drawn ids."""
BRIDGE = 2**14
"""Bytes between two pieces that are sooner read and thrown away than jumped over."""
MOST_BUFFERS = 1024
"""What one read may fill: POSIX systems take as many."""


@dataclass(frozen=True)
class Field:
    """What a row holds of one kind."""

    code: str
    """The element's dtype as safetensors names it."""
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """The element's dtype."""
        return DTYPES[self.code]

    @cached_property
    def stride(self) -> int:
        """Bytes of one sequence."""
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """What every row of a cache holds."""

    fields: dict[str, Field]
    """In the order in which they lie."""
    has_draws: bool
    """Whether drawn ids follow them."""

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each field begins in a row."""
        strides = [field.stride for field in self.fields.values()]
        return dict(zip(self.fields, accumulate(strides, initial=0), strict=False))

    @cached_property
    def width(self) -> int:
        """Bytes of all fields, which is where drawn ids begin."""
        return sum(field.stride for field in self.fields.values())


def promised_layout(manifest: Manifest) -> Layout:
    """What every row of a cache holds, from the cache's settings alone."""
    settings, R = manifest.settings, manifest.negatives
    S, K, bits = settings.sequence_length, settings.top_k, id_bits(manifest.teacher.vocab_size)
    flags = Field("U8", (packed_bytes(S, 1),))
    fields = {"tokens": Field("U8", (packed_bytes(S, bits),)), "starts": flags, "mask": flags}
    if K:
        fields |= {
            "topk_ids": Field("U8", (packed_bytes(S * K, bits),)),
            "topk_codes": Field("U8", (packed_bytes(S * (K - 1), CODE_BITS),)),
            "topk_range": Field("U8", (S,)),
            "log_sum_exp": Field("F32", (S,)),
            "tail_logprob": Field("F32", (S,)),
        }
    if settings.draws:
        fields["sample_marks"] = Field("U8", (packed_bytes(S * settings.draws, 1),))
    if R:
        fields["negative_ids"] = Field("U8", (packed_bytes((S - 1) * R, bits),))
        fields["negative_logits"] = Field("F16", (S - 1, R))
    ordered = {name: fields[name] for name in ORDER if name in fields}
    return Layout(ordered, has_draws=settings.draws > 0)


def shard_content(tensors: dict[str, Tensor]) -> bytes:
    """The bytes of a shard file from `(N, ...)` tensors called as in `ORDER`.

    Drawn ids, if there are any, are `sample_ids` of all sequences one after the other, and
    `sample_lengths`, `(N,)` integers, the bytes of each.
    """
    fields = [tensors[name] for name in ORDER if name in tensors]
    rows_NW = torch.cat([_octets(field) for field in fields], 1)
    lengths_N = torch.full((len(rows_NW),), rows_NW.shape[1])
    rows = rows_NW.flatten()
    if "sample_ids" in tensors:
        drawn_N = tensors["sample_lengths"].long()
        ids = tensors["sample_ids"].split(drawn_N.tolist())
        rows = torch.cat([*chain.from_iterable(zip(rows_NW.unbind(0), ids, strict=True))])
        lengths_N += drawn_N
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)])
    return save({"rows": rows, "row_begins": begins})


def _octets(field: Tensor) -> Tensor:
    return field.flatten(1).contiguous().view(torch.uint8)


class Read(NamedTuple):
    """Neighbouring parts of a file, filled by one call of the system."""

    begin: int
    size: int
    outs: list[memoryview]


def reads(pieces: Iterable[tuple[int, memoryview]]) -> Iterator[Read]:
    """The reads that fill `pieces`, of ascending places; short gaps between them are read too."""
    nowhere = memoryview(bytearray(BRIDGE))
    begin = end = 0
    outs: list[memoryview] = []
    for place, out in pieces:
        gap = place - end
        if outs and (gap > BRIDGE or len(outs) + 2 > MOST_BUFFERS):
            yield Read(begin, end - begin, outs)
            outs = []
        if not outs:
            begin, gap = place, 0
        if gap:
            outs.append(nowhere[:gap])
        outs.append(out)
        end = place + len(out)
    if outs:
        yield Read(begin, end - begin, outs)
