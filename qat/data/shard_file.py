"""One shard of a cache, read row by row: of its bytes nothing stays in memory.

An open shard keeps a file handle and where each row begins, 8 bytes a sequence.

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

# All of a sequence lies side by side, so that a row is one read. A row holds the fields of
# `Layout` in that order, then the ids drawn for its sequence, as many bytes as those take. A shard
# file has two tensors: `rows`, the bytes of all rows one after the other, and `row_begins`, where
# each begins and the last one ends.
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


# What may stay in memory: the values used last, and no more of them than a bound.

Key = TypeVar("Key")
Value = TypeVar("Value")


class Resident(Generic[Key, Value]):
    """At most `limit` values, of which the one unused for longest makes room; for any threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """The value kept for `key`, which is now the one used last; None if there is none."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: Key, value: Value) -> None:
        """Keep a value, and let go of the one unused for longest if that makes too many."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

    def __len__(self) -> int:
        """How many values are kept."""
        with self._lock:
            return len(self._values)


OPEN_SHARDS = 256
"""Shards that are open at once: file handles, and a header each."""
HEADER_LIMIT = 2**20
"""Bytes of the longest header that is read; ours have about a thousand."""


class Shelf(NamedTuple):
    """What the shards of one cache share."""

    directory: Path
    layout: Layout
    opened: "Resident[str, OpenShard]"
    fetch: Callable[[Shard], None]
    """Makes sure that the file is in the directory, where it comes from elsewhere."""


class ShardFile:
    """One shard, proven by its hash before it is first read, and again if its file changes."""

    def __init__(self, shelf: Shelf, shard: Shard) -> None:
        self._shelf = shelf
        self._shard = shard
        self._proven: tuple[int, ...] | None = None
        self._lock = threading.Lock()

    def open(self) -> "OpenShard":
        """The shard, ready to be read; whoever comes while it is being proven waits for that.

        Raises:
            CacheError: it is missing, damaged or not what the manifest promises.
        """
        shelf, shard = self._shelf, self._shard
        with self._lock:
            opened = shelf.opened.get(shard.file)
            if opened is None:
                shelf.fetch(shard)
                if self._proven is None or self._proven != self._stamp():
                    raise_if_damaged(shelf.directory, shard, deep=True)
                    self._proven = self._stamp()
                opened = OpenShard(shard.path(shelf.directory), shard, shelf.layout)
                shelf.opened.put(shard.file, opened)
            return opened

    def _stamp(self) -> tuple[int, ...] | None:
        """What changes when the file does; None if it is not there."""
        try:
            found = self._shard.path(self._shelf.directory).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


class OpenShard:
    """A safetensors file whose header fits the manifest; closed when nobody holds it any more."""

    def __init__(self, path: Path, shard: Shard, layout: Layout) -> None:
        self._path, self._shard = path, shard
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.begins = self._row_begins(layout)
        """Where each row begins in the file, and the last one ends."""

    def expect(self, read: Read) -> None:
        """Have the system read a part of the file into its own memory, if it can be told."""
        if read.size and hasattr(os, "posix_fadvise"):  # of no bytes would mean: up to the end
            os.posix_fadvise(self._file, read.begin, read.size, os.POSIX_FADV_WILLNEED)

    def fill(self, read: Read) -> None:
        """Copy the bytes of one shard row into the tensors of a batch."""
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
        if is_sound:  # between these ends no difference wraps around
            lengths = np.diff(begins)
            is_sound = lengths.min() >= layout.width
            is_sound &= layout.has_draws or lengths.max() == layout.width
        if not is_sound:
            raise self._wrong(f"row_begins does not cut {size} bytes into rows of {layout.width}")
        return begins + first

    def _read_header(self) -> tuple[dict, int]:
        """What the file says of its tensors, and where their bytes begin."""
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
        """Where a tensor of `count` int64 begins, or of bytes, any number, and its size in bytes.

        `data` is where the header ends.
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


# Proves that a cache is byte for byte what its builder wrote, and holds what it promises.


class ShardFinding(NamedTuple):
    """One shard and what is wrong with it; None when nothing is."""

    shard: Shard
    problem: str | None


def check_shards(directory: Path) -> tuple[Manifest, list[ShardFinding]]:
    """The proven manifest, and a finding for each shard after reading every byte.

    Its hash proves that a shard is what its author wrote; whether that can be read is looked at
    too.

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
    """Turn findings into the error that names every damaged shard.

    Raises:
        CacheError: there is at least one.
    """
    damaged = [f"{f.shard.file}: {f.problem}" for f in findings if f.problem]
    if damaged:
        raise CacheError(
            f"{directory}: {len(damaged)} of {len(findings)} shards are damaged "
            f"({'; '.join(damaged)}); restore them, or delete them and run "
            "the same 'qat cache' command again"
        )
