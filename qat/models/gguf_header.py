"""Looks through the header of a GGUF file before the package `gguf` believes its counts.

That package loops over a count that the file states, far behind its end too. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path

from qat.errors import CheckpointError

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a scalar, by the number of its type."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS, DEEPEST = 8, 4
PAIR_BYTES, TENSOR_BYTES = 13, 24
"""The fewest bytes that a pair of key and value, or the entry of a tensor, can take."""


def check_gguf(path: Path) -> None:
    """Make sure that everything the header of a GGUF file counts lies in the file.

    Raises:
        CheckpointError: it does not, or nests more arrays than any file does.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _walk(data)
    except (ValueError, struct.error) as error:
        fault = "its header is cut" if isinstance(error, struct.error) else error
        raise CheckpointError(
            f"{path} is no whole GGUF file ({fault}), expected one; download or copy it anew"
        ) from None


def _walk(data: mmap.mmap) -> None:
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    _check_room(len(data) - 24, pairs, PAIR_BYTES, "pairs of key and value")
    at = 24
    for _ in range(pairs):
        at = _after_string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        at = _after_value(data, at + 4, kind, DEEPEST)
    _check_room(len(data) - at, tensors, TENSOR_BYTES, "tensors")
    for _ in range(tensors):
        at = _after_string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        at += 4 + 8 * dimensions + 12
    if at > len(data):
        raise ValueError("its header is cut")


def _after_string(data: mmap.mmap, at: int) -> int:
    (length,) = struct.unpack_from("<Q", data, at)
    _check_room(len(data) - at - 8, length, 1, "letters")
    return at + 8 + length


def _after_value(data: mmap.mmap, at: int, kind: int, depth: int) -> int:
    if kind in SIZES:
        return at + SIZES[kind]
    if kind == STRING:
        return _after_string(data, at)
    if kind != ARRAY or depth == 0:
        raise ValueError(f"a value of type {kind}" if depth else "arrays in arrays")
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    _check_room(len(data) - at, count, SIZES.get(inner, 8), "elements of an array")
    if inner in SIZES:
        return at + count * SIZES[inner]
    for _ in range(count):
        at = _after_value(data, at, inner, depth - 1)
    return at


def _check_room(left: int, count: int, size: int, what: str) -> None:
    if count * size > left:
        raise ValueError(f"{count} {what} where {max(0, left)} bytes are left")
