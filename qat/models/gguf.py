"""Fast reading of GGUF files on all cores, for transformers too.

transformers opens a GGUF file with the package `gguf`. Most of the minutes that this takes for a
vocabulary of 150,000 tokens are overhead: every token is cut out of the file by several views of a
memory map, once each for configuration, tokenizer and weights; the table of tensor names is rebuilt
for each module of the model; and blocks are dequantized 16 rows at a time on one core. `quick_gguf`
patches both libraries with functions that give the same results, bit-exact, without that overhead.
"""

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

from qat.models.gguf_header import ARRAY, read_array
from qat.process import cores

CHUNK_WEIGHTS = 2**18
"""Weights dequantized per call: 1 MiB in float32, which fits in a cache with its temporaries."""
MAPPED_READER = "transformers.integrations.gguf.reader"
"""The metadata reader of transformers from release 5.17 on."""

_LENDING = threading.RLock()
"""Held while the libraries are patched: patches are visible to all threads."""


def open_gguf(path: str | Path) -> Any:
    """Return a `gguf.GGUFReader` of the file that parses long arrays in one pass.

    Metadata arrays that do not fit into the file are left to the original reader, which raises.
    """
    return _reader_class()(path)


@cache
def _reader_class() -> type:
    from gguf import GGUFValueType
    from gguf.gguf_reader import GGUFReader  # gguf.GGUFReader itself may be patched by `quick_gguf`

    class QuickReader(GGUFReader):
        """A `gguf` reader that does not create a view of the file for each array element."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
            is_quick = raw_type == ARRAY and self.byte_order == "I"
            found = read_array(memoryview(self.data), int(orig_offs)) if is_quick else None
            if found is None:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, size, values = found
            types = [GGUFValueType(ARRAY), GGUFValueType(kind)]
            return size, values, [*range(len(values))], types if values else types[:1]

    return QuickReader


def dequantize(data: NDArray[Any], kind: Any) -> NDArray[np.float32]:
    """Return `gguf.dequantize` of a whole tensor, with its blocks divided among all cores."""
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
    if len(starts) <= 1:  # threads do not pay off for a small tensor
        [*map(fill, starts)]
    else:
        with ThreadPoolExecutor(min(cores(), len(starts))) as pool:
            [*pool.map(fill, starts)]
    return values.reshape(shape)


@contextmanager
def quick_gguf(path: Path, advance: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let transformers read the file `path` quickly in the block; `advance` is called per tensor.

    Other threads that enter such a block wait until it ends.
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
        stack.enter_context(_patched(gguf, "GGUFReader", lambda _path: reader()))
        stack.enter_context(_patched(gguf, "dequantize", dequantized))
        stack.enter_context(_patched(gguf, "get_tensor_name_map", names))
        if find_spec(MAPPED_READER.rpartition(".")[0]) is not None:
            mapped = import_module(MAPPED_READER)
            # a plain array, because slicing a memory map has Python overhead
            read = lambda path: np.asarray(np.memmap(path, np.uint8, "r"))  # noqa: E731
            stack.enter_context(_patched(mapped, "_mapped", read))
        yield


@contextmanager
def _patched(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Patch `name` of a module with `value` in the block; do nothing if it has no such name."""
    if not hasattr(module, name):
        yield
        return
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)
