"""Parsing of the header of a GGUF file, before the package `gguf` trusts its counts.

That package loops over counts that the file states, even past its end, and decodes every word of a
vocabulary. This module finds names, types and offsets of tensors in a second, and reads single rows
and long arrays of metadata. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qat.errors import CheckpointError

SCALARS = dict(enumerate(map(np.dtype, ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?"))))
SCALARS |= {10: np.dtype("u8"), 11: np.dtype("i8"), 12: np.dtype("f8")}
"""Dtypes of scalars by their numbers in GGUF, as in `gguf.GGUFValueType`."""
UINT32, STRING, ARRAY = 4, 8, 9
MOST_DIMENSIONS, DEEPEST = 8, 4
"""Limits on the dimensions of a tensor and on the nesting of arrays."""
PAIR_BYTES, TENSOR_BYTES = 13, 24
"""The minimum bytes of a key-value pair, and of the entry of a tensor."""
ALIGNMENT = (b"general.alignment", 32)
"""The key of the alignment of tensor data in bytes, and its default."""


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


def check_gguf(path: Path) -> None:
    """Check that everything counted in the header of a GGUF file lies within the file.

    Raises:
        CheckpointError: it does not, or arrays are nested too deeply.
    """
    _entries(path)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the GGUF file at `path` by name.

    Raises:
        CheckpointError: see `check_gguf`; or a type is unknown.
    """
    import gguf

    teach_q2_0()
    found = {}
    for name, shape, number, place in _entries(path):
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(
                f"{path} holds {name} in ggml's type {number}, expected one that the package gguf "
                "knows; start from the float model"
            ) from None
        weights, octets = gguf.GGML_QUANT_SIZES[kind]
        found[name] = StoredTensor(shape, kind.name, 8 * octets / weights, place)
    return found


def read_rows(path: Path, tensor: StoredTensor, rows: range) -> Tensor:
    """Return the `rows` of a matrix in the GGUF file at `path`, `(n, I)` float32.

    Raises:
        CheckpointError: the file ends before them, or `gguf` cannot dequantize their type.
    """
    import gguf

    width = int(tensor.shape[1] * tensor.bits) // 8
    with path.open("rb") as file:
        octets = np.empty((len(rows), width), np.uint8)
        for octet_row, row in zip(octets, rows, strict=True):
            file.seek(tensor.place + row * width)
            if file.readinto(octet_row) != width:
                raise CheckpointError(
                    f"{path} ends at {path.stat().st_size} bytes, expected row {row} of a tensor "
                    f"at {tensor.place + row * width}; copy it anew"
                )
    kind = gguf.GGMLQuantizationType[tensor.type]
    try:
        return torch.from_numpy(gguf.quants.dequantize(octets, kind).astype(np.float32))
    except NotImplementedError:
        raise CheckpointError(
            f"{path} holds a tensor of type {tensor.type}, expected one that gguf "
            "dequantizes; start from the float model"
        ) from None


def read_array(data: memoryview, start: int) -> tuple[int, int, list] | None:
    """Return the type, size in bytes and elements of the metadata array that begins at `start`.

    A string is returned as bytes, a number as a tuple of itself. None if the array holds arrays, or
    if it extends past the end of the file.
    """
    at = start + 12
    try:
        kind, count = struct.unpack_from("<IQ", data, start)
        if kind in SCALARS:
            numbers = np.frombuffer(data, SCALARS[kind], count, at).tolist()
            return kind, 12 + count * SCALARS[kind].itemsize, [(number,) for number in numbers]
        if kind != STRING:
            return None
        strings = []
        for _ in range(count):
            begin, at = at + 8, _after_string(data, at)
            strings.append(bytes(data[begin:at]))
    except (OverflowError, ValueError, struct.error):
        return None
    return kind, at - start, strings


Entry = tuple[str, tuple[int, ...], int, int]
"""Name, shape, type number, and offset of the first byte of a tensor."""


def _entries(path: Path) -> list[Entry]:
    """Return all tensors of the GGUF file at `path`; raises as `check_gguf` does."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _walk(data)
    except (ValueError, struct.error) as error:
        fault = "its header is cut" if isinstance(error, struct.error) else error
        raise CheckpointError(
            f"{path} is no whole GGUF file ({fault}), expected one; download or copy it anew"
        ) from None


def _walk(data: mmap.mmap) -> list[Entry]:
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    _check_room(len(data) - 24, pairs, PAIR_BYTES, "pairs of key and value")
    at, (key, alignment) = 24, ALIGNMENT
    for _ in range(pairs):
        begin, at = at + 8, _after_string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        if kind == UINT32 and data[begin:at] == key:
            (alignment,) = struct.unpack_from("<I", data, at + 4)
        at = _after_value(data, at + 4, kind, DEEPEST)
    _check_room(len(data) - at, tensors, TENSOR_BYTES, "tensors")
    found = []
    for _ in range(tensors):
        begin, at = at + 8, _after_string(data, at)
        name = data[begin:at].decode()
        (dimensions,) = struct.unpack_from("<I", data, at)
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}Q", data, at + 4)[::-1]
        kind, place = struct.unpack_from("<IQ", data, at + 4 + 8 * dimensions)
        found.append((name, shape, kind, place))
        at += 4 + 8 * dimensions + 12
    if at > len(data):
        raise ValueError("its header is cut")
    begin = -(-at // max(1, alignment)) * max(1, alignment)
    return [(name, shape, kind, begin + place) for name, shape, kind, place in found]


def _after_string(data: mmap.mmap | memoryview, at: int) -> int:
    (length,) = struct.unpack_from("<Q", data, at)
    _check_room(len(data) - at - 8, length, 1, "letters")
    return at + 8 + length


def _after_value(data: mmap.mmap, at: int, kind: int, depth: int) -> int:
    if kind in SCALARS:
        return at + SCALARS[kind].itemsize
    if kind == STRING:
        return _after_string(data, at)
    if kind != ARRAY or depth == 0:
        raise ValueError(f"a value of type {kind}" if depth else "arrays in arrays")
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    size = SCALARS[inner].itemsize if inner in SCALARS else 8
    _check_room(len(data) - at, count, size, "elements of an array")
    if inner in SCALARS:
        return at + count * size
    for _ in range(count):
        at = _after_value(data, at, inner, depth - 1)
    return at


def _check_room(left: int, count: int, size: int, what: str) -> None:
    if count * size > left:
        raise ValueError(f"{count} {what} where {max(0, left)} bytes are left")


def teach_q2_0() -> None:
    """Register ggml's type Q2_0 in the package `gguf`, whose release 0.19 lacks it.

    Blocks of 64 weights: a float16 scale, then two bits each, 0 to 3 for -1 to 2 times the scale.
    """
    import gguf

    types, read = gguf.GGMLQuantizationType, gguf.quants._type_traits  # noqa: SLF001
    if "Q2_0" not in types.__members__:
        made = int.__new__(types, 42)
        made._name_, made._value_ = "Q2_0", 42
        types._member_map_["Q2_0"] = types._value2member_map_[42] = made  # noqa: SLF001
        gguf.GGML_QUANT_SIZES[made] = (64, 2 + 16)
    if types["Q2_0"] not in read:

        class Q2_0(gguf.quants.Q4_0.__base__, qtype=types["Q2_0"]):
            """Registers itself by its definition, as the classes of `gguf` do."""

            @classmethod
            def dequantize_blocks(cls, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
                scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
                codes = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
                return scale * (codes.reshape(len(blocks), -1).astype(np.float32) - 1)
