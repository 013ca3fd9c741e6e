"""One shard of a cache, read row by row: of its bytes nothing stays in memory.

An open shard keeps a file handle, where each tensor begins, and 8 bytes for every 128 sequences.

Shapes: N sequences of the shard, S positions, K teacher tokens kept, R random tokens.
"""

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qat.data.bits import packed_bytes
from qat.data.cache import Manifest, Shard, raise_if_damaged
from qat.data.codec import CODE_BITS, id_bits
from qat.data.resident import Resident
from qat.errors import CacheError

OPEN_SHARDS = 256
"""Shards that are open at once: file handles, and a header each."""
HEADER_LIMIT = 2**20
"""Bytes of the longest header that is read; ours have about a thousand."""
INDEX_STEP, STRETCH = 128, 2**20
"""Sequences from one known beginning of drawn ids to the next, and those indexed at once."""


@dataclass(frozen=True)
class Rows:
    """What a tensor holds for one sequence."""

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


DTYPES = {
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


def promised_rows(manifest: Manifest) -> dict[str, Rows]:
    """What every shard of a cache holds for a sequence, from the cache's settings alone."""
    settings, R = manifest.settings, manifest.negatives
    S, K, bits = settings.sequence_length, settings.top_k, id_bits(manifest.teacher.vocab_size)
    flags = Rows("U8", (packed_bytes(S, 1),))
    rows = {"tokens": Rows("U8", (packed_bytes(S, bits),)), "starts": flags, "mask": flags}
    if K:
        rows |= {
            "topk_ids": Rows("U8", (packed_bytes(S * K, bits),)),
            "topk_codes": Rows("U8", (packed_bytes(S * (K - 1), CODE_BITS),)),
            "topk_range": Rows("U8", (S,)),
            "log_sum_exp": Rows("F32", (S,)),
            "tail_logprob": Rows("F32", (S,)),
        }
    if settings.draws:
        marks = packed_bytes(S * settings.draws, 1)
        rows |= {"sample_marks": Rows("U8", (marks,)), "sample_lengths": Rows("I32", ())}
    if R:
        rows["negative_ids"] = Rows("U8", (packed_bytes((S - 1) * R, bits),))
        rows["negative_logits"] = Rows("F16", (S - 1, R))
    return rows


class Shelf(NamedTuple):
    """What the shards of one cache share."""

    directory: Path
    rows: dict[str, Rows]
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
                opened = OpenShard(shelf.directory / shard.file, shard, shelf.rows)
                shelf.opened.put(shard.file, opened)
            return opened

    def _stamp(self) -> tuple[int, ...] | None:
        """What changes when the file does; None if it is not there."""
        try:
            found = (self._shelf.directory / self._shard.file).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


class Samples(NamedTuple):
    """Drawn ids of neighbouring sequences in a file."""

    begin: int
    """The first one's place in the file."""
    lengths: list[int]
    """Bytes of each sequence."""


class OpenShard:
    """A safetensors file whose header fits the manifest; closed when nobody holds it any more."""

    def __init__(self, path: Path, shard: Shard, rows: dict[str, Rows]) -> None:
        self._path, self._shard, self._rows = path, shard, rows
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._begins = self._read_header()
        if "sample_lengths" in rows:
            self._sample_begins = self._index_samples()

    def read(self, name: str, row: int, out: memoryview) -> None:
        """Fill `out`, bytes, with the rows of a tensor from `row` on."""
        self._fill(out, self._begins[name] + row * self._rows[name].stride)

    def samples(self, row: int, count: int) -> "Samples":
        """Where the drawn ids of `count` sequences from `row` on are."""
        block = row // INDEX_STEP
        lengths = self._lengths(block * INDEX_STEP, row + count)
        before = len(lengths) - count
        first = int(self._sample_begins[block]) + int(lengths[:before].sum())
        return Samples(self._begins["sample_ids"] + first, lengths[before:].tolist())

    def read_samples(self, samples: "Samples") -> list[np.ndarray]:
        """The bytes of each of these sequences' drawn ids."""
        found = np.empty(sum(samples.lengths), np.uint8)
        self._fill(memoryview(found), samples.begin)
        ends = list(accumulate(samples.lengths))
        return [
            found[end - length : end] for length, end in zip(samples.lengths, ends, strict=True)
        ]

    def expect(self, names: Iterable[str], row: int, count: int) -> None:
        """Have the system begin to read rows of these tensors; does not wait."""
        for name in names:
            stride = self._rows[name].stride
            _will_need(self._file, self._begins[name] + row * stride, count * stride)

    def expect_samples(self, samples: "Samples") -> None:
        """The same for drawn ids."""
        _will_need(self._file, samples.begin, sum(samples.lengths))

    def _read_header(self) -> dict[str, int]:
        """Where the promised tensors begin."""
        prefix = bytearray(8)
        self._fill(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if not 0 < length <= min(HEADER_LIMIT, self._shard.bytes - 8):
            raise self._wrong(f"its header has {length} bytes")
        raw = bytearray(length)
        self._fill(memoryview(raw), 8)
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError):
            raise self._wrong("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._wrong("its header is not a table of tensors")
        N, names = self._shard.sequences, list(self._rows)
        shapes = {name: [N, *self._rows[name].shape] for name in names}
        room = self._shard.bytes - 8 - length
        begins = {name: self._begin(header, name, shapes[name], room) for name in names}
        if "sample_lengths" in self._rows:
            begins["sample_ids"] = self._begin(header, "sample_ids", None, room)
            self._sample_bytes = header["sample_ids"]["shape"][0]
        return {name: 8 + length + begin for name, begin in begins.items()}

    def _begin(self, header: dict, name: str, shape: list[int] | None, room: int) -> int:
        """Where a tensor begins in the `room` behind the header; without a shape it is bytes."""
        entry = header.get(name)
        code = self._rows[name].code if shape else "U8"
        if not isinstance(entry, dict) or entry.get("dtype") != code:
            raise self._wrong(f"it has no tensor {name} of {code}")
        offsets = entry.get("data_offsets")
        if not (isinstance(offsets, list) and [type(each) for each in offsets] == [int, int]):
            raise self._wrong(f"{name} is nowhere")
        begin, end = offsets
        shape = shape or [end - begin]
        if entry.get("shape") != shape:
            raise self._wrong(f"{name} has shape {str(entry.get('shape'))[:60]}, not {shape}")
        if begin < 0 or end - begin != DTYPES[code].itemsize * prod(shape):
            raise self._wrong(f"{name} reaches from {begin} to {end}, which is not its size")
        if end > room:
            raise self._wrong(f"{name} reaches to {end}, beyond its {room} bytes")
        return begin

    def _index_samples(self) -> np.ndarray:
        """Where the drawn ids of every 128th sequence begin."""
        N, sums = self._shard.sequences, [0]
        for first in range(0, N, STRETCH):
            lengths = self._lengths(first, min(first + STRETCH, N))
            if lengths.min() < 0:
                raise self._wrong("sample_lengths has negative ones")
            sums += np.add.reduceat(lengths, np.arange(0, len(lengths), INDEX_STEP)).tolist()
        begins = np.cumsum(sums)
        if begins[-1] != self._sample_bytes:
            raise self._wrong(f"sample_lengths sum to {begins[-1]}, not {self._sample_bytes} bytes")
        return begins

    def _lengths(self, first: int, end: int) -> np.ndarray:
        """Bytes of the drawn ids of some sequences, int64."""
        lengths = np.empty(end - first, "<i4")
        self.read("sample_lengths", first, memoryview(lengths).cast("B"))
        return lengths.astype(np.int64)

    def _fill(self, out: memoryview, begin: int) -> None:
        """Fill `out` with the bytes from `begin` on."""
        while out:
            count = os.preadv(self._file, [out], begin)
            if count == len(out):
                return
            if count == 0:
                raise self._wrong("it ends early")
            out, begin = out[count:], begin + count

    def _wrong(self, what: str) -> CacheError:
        return CacheError(
            f"{self._path}: {what}, expected what the manifest promises; restore it, or delete it "
            "and run the same 'qat cache' command again"
        )


def _will_need(file: int, begin: int, size: int) -> None:
    """Have the system read a part of a file into its own memory, where it lets itself be told."""
    if size and hasattr(os, "posix_fadvise"):  # of no bytes would mean: up to the end
        os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)
