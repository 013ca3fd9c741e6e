"""Parsing of a GGUF file: metadata, and the names, types and places of its tensors.

The package `gguf` loops over counts that the file states, even past its end, cuts every word of a
vocabulary out of the file by several views of a memory map, and does not know ggml's newest types.
So files are parsed here. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qat.errors import CheckpointError
from qat.models.directory import settled

SCALARS = dict(enumerate(map(np.dtype, ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?"))))
SCALARS |= {10: np.dtype("u8"), 11: np.dtype("i8"), 12: np.dtype("f8")}
"""Dtypes of scalars by their numbers in GGUF, as in `gguf.GGUFValueType`."""
UINT32, STRING, ARRAY = 4, 8, 9
VERSIONS = (2, 3)
"""Versions of the layout that are read; version 1 had counts of 32 bits."""
MOST_DIMENSIONS = 8
PAIR_BYTES, TENSOR_BYTES = 13, 24
"""The minimum bytes of a key-value pair, and of the entry of a tensor."""
ALIGNMENT = ("general.alignment", 32)
"""The key of the alignment of tensor data in bytes, and its default."""
NEWER = {"Q1_0": (41, 128, 2 + 16), "Q2_0": (42, 64, 2 + 16)}
"""Number, weights and bytes per block of types that release 0.19 of `gguf` does not dequantize.

A block is a float16 scale, then codes of one or two bits each, in the lowest bits first.
Codes of Q1_0 stand for -1 and 1 times the scale, those of Q2_0 for -1 to 2 times the scale.
"""


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file."""

    shape: tuple[int, ...]
    """Dimensions with the slowest axis first, as in torch."""
    type: str
    """Name of the ggml type, such as Q8_0."""
    bits: float
    """Bits per weight, scales included."""
    place: int
    """Offset of the first byte in the file."""

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of the stored bytes: rows are packed one by one."""
        return (*self.shape[:-1], int(self.shape[-1] * self.bits) // 8)

    @property
    def num_bytes(self) -> int:
        """The number of stored bytes."""
        return math.prod(self.byte_shape)


class Field(NamedTuple):
    """A value of the metadata, in the form of a `gguf.gguf_reader.ReaderField`."""

    parts: list
    """The elements: a string as bytes, a number as a tuple of itself."""
    data: range
    """The indices of all `parts`."""
    types: list[int]
    """The number of the value's type; of an array that is not empty also that of its elements."""


def check_gguf(path: Path) -> None:
    """Check that everything counted in the header of a GGUF file lies within the file.

    Raises:
        CheckpointError: it does not, or something is named twice.
    """
    _header(path)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the GGUF file at `path` by name.

    Raises:
        CheckpointError: see `check_gguf`; or the type of a tensor is unknown, or its data are cut.
    """
    import gguf

    size, found = path.stat().st_size, {}
    for name, (shape, number, place) in _header(path).tensors.items():
        type_ = next((kind for kind, newer in NEWER.items() if newer[0] == number), None)
        if type_ is None:
            try:
                type_ = gguf.GGMLQuantizationType(number).name
            except ValueError:
                raise CheckpointError(
                    f"{path} holds {name} in ggml's type {number}, expected one that the package "
                    "gguf knows; start from the float model"
                ) from None
        weights, octets = block_size(type_)
        tensor = StoredTensor(shape, type_, 8 * octets / weights, place)
        end = place + tensor.num_bytes
        if shape[-1] % weights or end > size:
            raise CheckpointError(
                f"{path} holds {size} bytes, expected {name} of shape {shape} in whole blocks of "
                f"{type_} that end at {end}; copy it anew"
            )
        found[name] = tensor
    return found


def block_size(type: str) -> tuple[int, int]:
    """Return the weights and the bytes of a block of that ggml type."""
    import gguf

    if type in NEWER:
        return NEWER[type][1:]
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]


def read_metadata(path: Path) -> dict[str, Field]:
    """Return the metadata of the GGUF file at `path` by key.

    Raises:
        CheckpointError: see `check_gguf`.
    """
    values = _header(path).values
    with _whole(path), _mapped(path) as data:
        return {key: _field(data, *value) for key, value in values.items()}


class _Header(NamedTuple):
    values: dict[str, tuple[int, int]]
    """Type and offset of each value of the metadata."""
    tensors: dict[str, tuple[tuple[int, ...], int, int]]
    """Shape, type number, and offset of the first byte of each tensor."""


def _header(path: Path) -> _Header:
    """Return the header; one opening of a model asks for it up to eight times."""
    with _whole(path):
        return settled(_parsed, path)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turn errors of the block into one line about the file."""
    try:
        yield
    except (ValueError, struct.error) as error:
        fault = "its header is cut" if isinstance(error, struct.error) else error
        raise CheckpointError(
            f"{path} is no whole GGUF file ({fault}), expected one; download or copy it anew"
        ) from None


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _parsed(path: Path) -> _Header:
    with _mapped(path) as data:
        return _header_in(data)


def _header_in(data: mmap.mmap) -> _Header:
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, num_tensors, num_values = struct.unpack_from("<IQQ", data, 4)
    if version not in VERSIONS:
        raise ValueError(f"version {version}")
    _check_room(len(data) - 24, num_values, PAIR_BYTES, "pairs of key and value")
    values, at = {}, 24
    for _ in range(num_values):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        values[_new(key, values)] = kind, at + 4
        at = _after_value(data, at + 4, kind)
    key, alignment = ALIGNMENT
    if key in values:
        kind, place = values[key]
        (alignment,) = struct.unpack_from("<I", data, place)
        if kind != UINT32 or alignment.bit_count() != 1:  # no power of two
            raise ValueError(f"an alignment of {alignment}, of type {kind}")
    _check_room(len(data) - at, num_tensors, TENSOR_BYTES, "tensors")
    tensors = {}
    for _ in range(num_tensors):
        name, at = _string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}Q", data, at + 4)[::-1]
        kind, place = struct.unpack_from("<IQ", data, at + 4 + 8 * dimensions)
        tensors[_new(name, tensors)] = shape, kind, place
        at += 4 + 8 * dimensions + 12
    begin = -(-at // alignment) * alignment  # offsets count from the end of the header, aligned
    return _Header(values, {n: (s, kind, begin + place) for n, (s, kind, place) in tensors.items()})


def _new(name: bytes, known: dict[str, Any]) -> str:
    text = name.decode()
    if text in known:
        raise ValueError(f"{text[:80]!r} twice")
    return text


def _string(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    begin = at + 8
    _check_room(len(data) - begin, length, 1, "letters")
    return data[begin : begin + length], begin + length


def _after_value(data: mmap.mmap, at: int, kind: int) -> int:
    """Return the offset after a value; checks that all of it lies within the file."""
    if kind in SCALARS:
        return at + SCALARS[kind].itemsize
    if kind == STRING:
        return _string(data, at)[1]
    if kind != ARRAY:
        raise ValueError(f"a value of type {kind}")
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in SCALARS:
        size = SCALARS[inner].itemsize
        _check_room(len(data) - at, count, size, "elements of an array")
        return at + count * size
    if inner != STRING:  # transformers reads no arrays of arrays
        raise ValueError(f"an array of type {inner}")
    _check_room(len(data) - at, count, 8, "elements of an array")
    for _ in range(count):
        at = _string(data, at)[1]
    return at


def _check_room(left: int, count: int, size: int, what: str) -> None:
    if count * size > left:
        raise ValueError(f"{count} {what} where {max(0, left)} bytes are left")


def _field(data: mmap.mmap, kind: int, at: int) -> Field:
    """Return a value whose place `_after_value` has checked."""
    inner, count, types = kind, 1, [kind]
    if kind == ARRAY:
        inner, count = struct.unpack_from("<IQ", data, at)
        at, types = at + 12, [ARRAY, inner] if count else [ARRAY]
    if inner == STRING:
        parts = []
        for _ in range(count):
            text, at = _string(data, at)
            parts.append(text)
    else:
        numbers = np.frombuffer(data, SCALARS[inner], count, at).tolist()
        parts = [(number,) for number in numbers]
    return Field(parts, range(len(parts)), types)
