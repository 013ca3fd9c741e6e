"""Read one shard of a cache row by row; its content is not kept in memory.

An open shard keeps a file handle and the offset of each row, 8 bytes per sequence.

Shapes: N sequences of the shard.
"""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from qat.data.cache import Manifest, Shard, raise_if_damaged, read_manifest, shard_problem
from qat.data.codec import CODE_BITS, id_bits, packed_bytes, unpack_flags
from qat.errors import CacheError
from qat.files import parse_json
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


# An LRU cache.

Key = TypeVar("Key")
Value = TypeVar("Value")


class Resident(Generic[Key, Value]):
    """A thread-safe LRU cache of at most `limit` values."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """Return the value for `key` as the most recently used one; None if it is missing."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: Key, value: Value) -> None:
        """Add a value; evict the least recently used one if there are too many."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

    def __len__(self) -> int:
        """Return the number of values."""
        with self._lock:
            return len(self._values)


OPEN_SHARDS = 256
"""Default number of shards that are open at once: a file handle and a table of offsets each."""
HEADER_LIMIT = 2**20
"""Longest safetensors header in bytes that is read; a shard's header has about a thousand."""


class ShardStore(NamedTuple):
    """The state that all shards of one cache share."""

    directory: Path
    layout: Layout
    opened: "Resident[str, OpenShard]"
    fetch: Callable[[Shard], None]
    """Downloads a shard's file into the directory, if the cache is remote."""


class ShardFile:
    """One shard; its hash is checked before the first read and again if its file changes."""

    def __init__(self, store: ShardStore, shard: Shard) -> None:
        self._store = store
        self._shard = shard
        self._proven: tuple[int, ...] | None = None
        self._lock = threading.Lock()

    def open(self) -> "OpenShard":
        """Return the open shard; a second thread waits while the first one checks the hash.

        Raises:
            CacheError: the shard is missing, damaged or does not match the manifest.
        """
        store, shard = self._store, self._shard
        with self._lock:
            opened = store.opened.get(shard.file)
            if opened is None:
                store.fetch(shard)
                if self._proven is None or self._proven != self._stamp():
                    raise_if_damaged(store.directory, shard, deep=True)
                    self._proven = self._stamp()
                opened = OpenShard(shard.path(store.directory), shard, store.layout)
                store.opened.put(shard.file, opened)
            return opened

    def _stamp(self) -> tuple[int, ...] | None:
        """Return inode, size and mtime, which change with the file; None if it is missing."""
        try:
            found = self._shard.path(self._store.directory).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


class OpenShard:
    """An open safetensors file whose header matches the manifest; closed when garbage-collected."""

    def __init__(self, path: Path, shard: Shard, layout: Layout) -> None:
        self._path, self._shard = path, shard
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.begins = self._row_begins(layout)
        """Offset of each row in the file, and the end of the last one, `(N + 1,)` int64."""

    def expect(self, read: Read) -> None:
        """Announce a read to the kernel, which then prefetches it, where posix_fadvise exists."""
        if read.size and hasattr(os, "posix_fadvise"):  # size 0 would mean the rest of the file
            os.posix_fadvise(self._file, read.begin, read.size, os.POSIX_FADV_WILLNEED)

    def fill(self, read: Read) -> None:
        """Read a contiguous part of the file into the buffers of `read`."""
        outs, begin = [out for out in read.outs if len(out)], read.begin
        while outs:
            count = os.preadv(self._file, outs, begin)
            if count == 0:
                raise self._wrong("it ends early")
            begin += count
            while outs and count >= len(outs[0]):
                count -= len(outs.pop(0))
            if count:
                outs[0] = outs[0][count:]

    def _row_begins(self, layout: Layout) -> np.ndarray:
        header, data = self._read_header()
        first, size = self._place(header, "rows", None, data)
        table, _ = self._place(header, "row_begins", self._shard.sequences + 1, data)
        begins = np.empty(self._shard.sequences + 1, "<i8")
        octets = memoryview(begins).cast("B")
        self.fill(Read(table, len(octets), [octets]))
        is_sound = begins[0] == 0 == begins.min() and begins[-1] == size == begins.max()
        if is_sound:  # both ends are in range, so no difference overflows
            lengths = np.diff(begins)
            is_sound = lengths.min() >= layout.width
            is_sound &= layout.has_draws or lengths.max() == layout.width
        if not is_sound:
            raise self._wrong(f"row_begins does not cut {size} bytes into rows of {layout.width}")
        return begins + first

    def _read_header(self) -> tuple[dict, int]:
        """Return the parsed safetensors header, and the offset where the tensors' bytes begin."""
        prefix = bytearray(8)
        self.fill(Read(0, 8, [memoryview(prefix)]))
        length = int.from_bytes(prefix, "little")
        if not 0 < length <= min(HEADER_LIMIT, self._shard.bytes - 8):
            raise self._wrong(f"its header has {length} bytes")
        raw = bytearray(length)
        self.fill(Read(8, length, [memoryview(raw)]))
        try:
            header = parse_json(raw)
        except ValueError:
            raise self._wrong("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._wrong("its header is not a table of tensors")
        return header, 8 + length

    def _place(self, header: dict, name: str, count: int | None, data: int) -> tuple[int, int]:
        """Return the offset and the size in bytes of a tensor, after checking its header entry.

        Args:
            count: number of int64 elements, or None for a tensor of any number of bytes.
            data: offset where the header ends.
        """
        entry, room = header.get(name), self._shard.bytes - data
        code, itemsize = ("U8", 1) if count is None else ("I64", 8)
        if not isinstance(entry, dict) or entry.get("dtype") != code:
            raise self._wrong(f"it has no tensor {name} of {code}")
        offsets = entry.get("data_offsets")
        if not (isinstance(offsets, list) and [type(each) for each in offsets] == [int, int]):
            raise self._wrong(f"{name} is nowhere")
        begin, end = offsets
        shape = [end - begin if count is None else count]
        if entry.get("shape") != shape:
            raise self._wrong(f"{name} has shape {str(entry.get('shape'))[:60]}, not {shape}")
        if begin < 0 or end - begin != itemsize * shape[0]:
            raise self._wrong(f"{name} reaches from {begin} to {end}, which is not its size")
        if end > room:
            raise self._wrong(f"{name} reaches to {end}, beyond its {room} bytes")
        return data + begin, end - begin

    def _wrong(self, what: str) -> CacheError:
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
