"""Read one shard of a cache row by row; its content is not kept in memory.

An open shard keeps a file handle and the offset of each row, 8 bytes per sequence.

Shapes: N sequences of the shard.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qat.data.cache import Manifest, Shard, raise_if_damaged, read_manifest, shard_problem
from qat.data.codec import CODE_BITS, id_bits, packed_bytes, unpack_flags
from qat.errors import CacheError
from qat.logs import progress

# All data of a sequence is contiguous, so that a row is one read. A row holds the fields of
# `Layout` in that order, then the ids drawn for its sequence, of variable size. A shard file has
# two tensors: `rows`, the concatenated bytes of all rows, and `row_begins`, the offset of each row
# and the end of the last.
#
# Shapes: N sequences of the shard, S positions, K teacher tokens kept, R random tokens.

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
"""Order of the fields in a row. Those that a batch needs come last, next to the drawn ids, so that
one read covers them."""
BRIDGE = 2**14
"""Largest gap in bytes between two pieces that is read and discarded rather than skipped."""
MOST_BUFFERS = 1024
"""Maximum number of buffers per read (IOV_MAX on Linux)."""


@dataclass(frozen=True)
class Field:
    """The type of one field of a row."""

    code: str
    """The elements' dtype as safetensors names it."""
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """The elements' NumPy dtype."""
        return DTYPES[self.code]

    @cached_property
    def stride(self) -> int:
        """Bytes of the field per sequence."""
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The fields of every row of a cache."""

    fields: dict[str, Field]
    """Fields by name, in their order within a row."""
    has_draws: bool
    """True if drawn ids follow the fields."""

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The offset of each field in a row, in bytes."""
        strides = [field.stride for field in self.fields.values()]
        return dict(zip(self.fields, accumulate(strides, initial=0), strict=False))

    @cached_property
    def width(self) -> int:
        """Total bytes of all fields, which is the offset of drawn ids."""
        return sum(field.stride for field in self.fields.values())


def promised_layout(manifest: Manifest) -> Layout:
    """Return the layout of every row of a cache, derived from the manifest alone."""
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
    """Return the bytes of a shard file from `(N, ...)` tensors with the names of `ORDER`.

    Drawn ids, if any, are given as `sample_ids`, concatenated over all sequences, and
    `sample_lengths`, `(N,)` integers, the bytes of each sequence.
    """
    fields = [tensors[name] for name in ORDER if name in tensors]
    octets = [field.flatten(1).contiguous().view(torch.uint8) for field in fields]
    rows_NW = torch.cat(octets, 1)
    lengths_N = torch.full((len(rows_NW),), rows_NW.shape[1])
    rows = rows_NW.flatten()
    if "sample_ids" in tensors:
        drawn_N = tensors["sample_lengths"].long()
        ids = tensors["sample_ids"].split(drawn_N.tolist())
        rows = torch.cat([*chain.from_iterable(zip(rows_NW.unbind(0), ids, strict=True))])
        lengths_N += drawn_N
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)])
    return save({"rows": rows, "row_begins": begins})


class Read(NamedTuple):
    """A contiguous part of a file that one system call scatters into several buffers."""

    begin: int
    size: int
    outs: list[memoryview]


def reads(pieces: Iterable[tuple[int, memoryview]]) -> Iterator[Read]:
    """Merge `pieces`, in ascending order of offset, into reads; short gaps are read too."""
    nowhere = memoryview(bytearray(BRIDGE))  # sink for gaps
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


OPEN_SHARDS = 256
"""Default number of shards that are open at once: a file handle and a table of offsets each."""


def shard_opener(
    directory: Path,
    manifest: Manifest,
    *,
    fetch: Callable[[Shard], None],
    limit: int,
) -> Callable[[Shard], "OpenShard"]:
    """Return a thread-safe function that opens a shard; the `limit` used last stay open.

    A shard's hash is checked before it is first read, and again if its file changed. The function
    raises a CacheError if the shard is missing, damaged or does not match the manifest.

    Args:
        fetch: downloads a shard's file into the directory, if the cache is remote.
    """
    layout = promised_layout(manifest)
    verified: dict[str, tuple[int, ...]] = {}  # inode, size and mtime of files whose hash is right
    locks: dict[str, threading.Lock] = {}

    @lru_cache(limit)
    def opened(shard: Shard) -> OpenShard:
        fetch(shard)
        path = shard.path(directory)
        found = path.stat() if path.exists() else None
        stamp = () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
        if verified.get(shard.file) != stamp:
            raise_if_damaged(directory, shard, deep=True)
            verified[shard.file] = stamp
        return OpenShard(path, shard, layout)

    def open_shard(shard: Shard) -> OpenShard:
        # only one of two threads downloads and hashes it
        with locks.setdefault(shard.file, threading.Lock()):
            return opened(shard)

    return open_shard


class OpenShard:
    """An open safetensors file whose header matches the manifest; closed when garbage-collected."""

    def __init__(self, path: Path, shard: Shard, layout: Layout) -> None:
        self._path, self._shard = path, shard
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.begins = self._row_begins(layout)
        """Offset of each row in the file, and the end of the last one, `(N + 1,)` int64."""

    def prefetch(self, read: Read) -> None:
        """Announce a read to the kernel, which then prefetches it, where posix_fadvise exists."""
        if read.size and hasattr(os, "posix_fadvise"):  # size 0 would mean the rest of the file
            os.posix_fadvise(self._file, read.begin, read.size, os.POSIX_FADV_WILLNEED)

    def fill(self, read: Read) -> None:
        """Read a contiguous part of the file into the buffers of `read`."""
        outs, begin = [out for out in read.outs if len(out)], read.begin
        while outs:
            count = os.preadv(self._file, outs, begin)
            if count == 0:
                raise self._damaged("it ends early")
            begin += count
            while outs and count >= len(outs[0]):
                count -= len(outs.pop(0))
            if count:
                outs[0] = outs[0][count:]

    def _row_begins(self, layout: Layout) -> np.ndarray:
        try:
            # this refuses a header that is no JSON or whose tensors overlap, leave gaps, end beyond
            # the file or have other sizes than their shapes
            with safe_open(self._path, "np") as file:
                found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                kinds = {name: (t.get_dtype(), len(t.get_shape())) for name, t in found.items()}
                if kinds != {"rows": ("U8", 1), "row_begins": ("I64", 1)}:
                    raise self._damaged("its tensors are not rows of U8 and row_begins of I64")
                (size,), begins = found["rows"].get_shape(), found["row_begins"][:]
        except SafetensorError as error:
            raise self._damaged(str(error)) from None
        is_sound = len(begins) == self._shard.sequences + 1
        is_sound &= begins[0] == 0 == begins.min() and begins[-1] == size == begins.max()
        if is_sound:  # both ends are in range, so no difference overflows
            lengths = np.diff(begins)
            is_sound = lengths.min() >= layout.width
            is_sound &= layout.has_draws or lengths.max() == layout.width
        if not is_sound:
            raise self._damaged(f"row_begins does not cut {size} bytes into rows of {layout.width}")
        # safetensors stores wider dtypes first, so that the rows are the end of the file
        return begins + (self._shard.bytes - size)

    def _damaged(self, what: str) -> CacheError:
        return CacheError(
            f"{self._path}: {what}, expected what the manifest promises; restore it, or delete it "
            "and run the same 'qat cache' command again"
        )


# Verification: a cache is byte for byte what its builder wrote and matches its manifest.


class ShardFinding(NamedTuple):
    """One shard and its problem, None if it is sound."""

    shard: Shard
    problem: str | None


def check_shards(directory: Path) -> tuple[Manifest, list[ShardFinding]]:
    """Read every byte of a cache; return the verified manifest and a finding for each shard.

    The hash proves that a shard is what its builder wrote; its header and masks are checked as
    well.

    Raises:
        CacheError: the manifest is missing, foreign, damaged, or of an unknown format.
    """
    manifest = read_manifest(directory)
    layout, findings = promised_layout(manifest), []
    with progress("verify", len(manifest.shards), "shards") as ticker:
        for shard in manifest.shards:
            problem = _problem(directory, shard, layout, manifest.settings.sequence_length)
            findings.append(ShardFinding(shard, problem))
            ticker.advance()
    return manifest, findings


def _problem(directory: Path, shard: Shard, layout: Layout, length: int) -> str | None:
    problem = shard_problem(directory, shard, deep=True)
    if problem is None:
        path = shard.path(directory)
        try:
            opened = OpenShard(path, shard, layout)
            begins = (opened.begins[:-1] + layout.offsets["mask"]).tolist()
            masks = np.empty((len(begins), layout.fields["mask"].stride), np.uint8)
            for read in reads(zip(begins, map(memoryview, masks), strict=True)):
                opened.fill(read)
        except CacheError as error:
            return str(error).removeprefix(f"{path}: ").partition(", expected")[0]
        counted = int(unpack_flags(torch.from_numpy(masks), length).sum())
        if counted != shard.counted:
            problem = f"{counted} of its tokens count instead of {shard.counted}"
    return problem


def raise_if_any_damaged(directory: Path, findings: list[ShardFinding]) -> None:
    """Raise an error that names every damaged shard.

    Raises:
        CacheError: at least one shard is damaged.
    """
    damaged = [f"{f.shard.file}: {f.problem}" for f in findings if f.problem]
    if damaged:
        raise CacheError(
            f"{directory}: {len(damaged)} of {len(findings)} shards are damaged "
            f"({'; '.join(damaged)}); restore them, or delete them and run "
            "the same 'qat cache' command again"
        )
