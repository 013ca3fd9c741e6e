"""Reads GGUF files at the speed of all cores, for transformers too.

transformers opens a GGUF file by means of the package `gguf`. Most of the minutes that this takes
for a vocabulary of 150,000 are not arithmetic: every token is cut out of the file by several views
of a memory map, once for each of configuration, tokenizer and weights; the table of tensor names is
built again for each module of the model; and blocks are dequantized 16 rows at a time on one core.
`quick_gguf` lends both libraries functions with the same results, to the bit, without that work.
"""

import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qat.process import cores

CHUNK_WEIGHTS = 2**18
"""Weights that one call dequantizes: 1 MiB in float32, which with its temporaries a cache holds."""
ARRAY, STRING = 9, 8
SCALARS = {
    0: np.uint8,
    1: np.int8,
    2: np.uint16,
    3: np.int16,
    4: np.uint32,
    5: np.int32,
    6: np.float32,
    7: np.bool_,
    10: np.uint64,
    11: np.int64,
    12: np.float64,
}
"""The types of metadata by their numbers in GGUF; `gguf.GGUFValueType` has the same."""
MAPPED_READER = "transformers.integrations.gguf.reader"
"""The module with the metadata reader that transformers has from release 5.17 on."""

_LENDING = threading.RLock()


def open_gguf(path: str | Path) -> Any:
    """Return a `gguf.GGUFReader` of the file, whose long arrays were parsed in one pass.

    An array of metadata that does not fit into the file is left to the original, which raises.
    """
    return _reader_class()(path)


@cache
def _reader_class() -> type:
    from gguf import GGUFValueType
    from gguf.gguf_reader import GGUFReader  # not gguf.GGUFReader, which `quick_gguf` replaces

    class QuickReader(GGUFReader):
        """The reader of `gguf` without a view of the file for each element of an array."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
            is_quick = raw_type == ARRAY and self.byte_order == "I"
            found = _read_array(memoryview(self.data), int(orig_offs)) if is_quick else None
            if found is None:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, size, values = found
            types = [GGUFValueType(ARRAY), GGUFValueType(kind)]
            return size, values, [*range(len(values))], types if values else types[:1]

    return QuickReader


def _read_array(data: memoryview, start: int) -> tuple[int, int, list] | None:
    """The type, size in bytes and elements of an array of metadata.

    A string is its bytes, a number a tuple of itself. None if the array holds arrays, or if it
    reaches beyond the file.
    """
    begin = start + 12
    if begin > len(data):
        return None
    kind, count = struct.unpack_from("=IQ", data, start)
    if kind in SCALARS:
        dtype = np.dtype(SCALARS[kind])
        if count > (len(data) - begin) // dtype.itemsize:
            return None
        numbers = np.frombuffer(data, dtype, count, begin).tolist()
        return kind, 12 + count * dtype.itemsize, [(number,) for number in numbers]
    if kind != STRING:
        return None
    strings, at = [], begin
    for _ in range(count):
        if at + 8 > len(data):
            return None
        (length,) = struct.unpack_from("=Q", data, at)
        if length > len(data) - at - 8:
            return None
        strings.append(bytes(data[at + 8 : at + 8 + length]))
        at += 8 + length
    return kind, at - start, strings


def dequantize(data: NDArray[Any], kind: Any) -> NDArray[np.float32]:
    """`gguf.dequantize` of a whole tensor, its blocks divided among all cores."""
    from gguf import quants

    blocks_of = quants._type_traits.get(kind)  # noqa: SLF001
    if blocks_of is None:
        return quants.dequantize(data, kind)
    shape = quants.quant_shape_from_byte_shape(data.shape, kind)
    blocks = np.asarray(data).view(np.uint8).reshape(-1, blocks_of.type_size)
    values = np.empty((len(blocks), blocks_of.block_size), np.float32)
    blocks_of.init_grid()
    step = max(1, CHUNK_WEIGHTS // blocks_of.block_size)

    def fill(start: int) -> None:
        values[start : start + step] = blocks_of.dequantize_blocks(blocks[start : start + step])

    starts = range(0, len(blocks), step)
    if len(starts) <= 1:  # a thread costs more than a small tensor
        [*map(fill, starts)]
    else:
        with ThreadPoolExecutor(min(cores(), len(starts))) as pool:
            [*pool.map(fill, starts)]
    return values.reshape(shape)


@contextmanager
def quick_gguf(path: Path, advance: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A block in which transformers reads the file `path` quickly; `advance` follows each tensor.

    Another thread that reads one waits for the block to end.
    """
    import gguf

    @cache
    def reader() -> Any:
        return open_gguf(path)

    def dequantized(data: NDArray[Any], kind: Any) -> NDArray[np.float32]:
        values = dequantize(data, kind)
        advance()
        return values

    names = cache(gguf.get_tensor_name_map)
    with _LENDING, ExitStack() as stack:
        stack.enter_context(_lent(gguf, "GGUFReader", lambda _path: reader()))
        stack.enter_context(_lent(gguf, "dequantize", dequantized))
        stack.enter_context(_lent(gguf, "get_tensor_name_map", names))
        if find_spec(MAPPED_READER.rpartition(".")[0]) is not None:
            mapped = import_module(MAPPED_READER)
            # a plain array: each slice of a memory map runs Python of its own
            stack.enter_context(_lent(mapped, "_mapped", lambda path: np.asarray(_map(path))))
        yield


def _map(path: str) -> np.memmap:
    return np.memmap(path, np.uint8, "r")


@contextmanager
def _lent(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Have a module use `value` under `name` in the block; nothing where it knows no such name."""
    if not hasattr(module, name):
        yield
        return
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)
