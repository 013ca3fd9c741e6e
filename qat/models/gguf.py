"""Fast reading of GGUF files on all cores, for transformers too.

transformers opens a GGUF file with the package `gguf`, which takes minutes for a vocabulary of
150,000 tokens and dequantizes 16 rows at a time on one core; transformers also rebuilds the table
of tensor names for each module of the model. `quick_gguf` lends both functions that give the same
results, bit-exact, without that overhead.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qat.errors import CheckpointError
from qat.models.gguf_header import (
    NEWER,
    StoredTensor,
    block_size,
    read_header,
    read_metadata,
)
from qat.process import cores

CHUNK_WEIGHTS = 2**18
"""Weights dequantized per call: 1 MiB in float32, which fits in a cache with its temporaries."""

_LENDING = threading.RLock()
"""Held while the libraries are patched: patches are visible to all threads."""


class ReaderTensor(NamedTuple):
    """A tensor in the form of a `gguf.gguf_reader.ReaderTensor`."""

    name: str
    tensor_type: str
    """Name of the ggml type."""
    data: NDArray[np.uint8]
    """The bytes of each row, a view of the file."""


class GgufFile:
    """The part of the interface of `gguf.GGUFReader` that transformers reads."""

    def __init__(self, path: Path) -> None:
        """Parse the file.

        Raises:
            CheckpointError: it is damaged, or holds a type that is not supported.
        """
        self.fields = read_metadata(path)
        octets = np.asarray(np.memmap(path, np.uint8, "r"))
        self.tensors = [
            ReaderTensor(name, each.type, np.ndarray(each.byte_shape, np.uint8, octets, each.place))
            for name, each in read_header(path).items()
        ]


def type_number(name: str) -> int:
    """Return the number of the ggml type `name` in GGUF."""
    import gguf

    return NEWER[name][0] if name in NEWER else gguf.GGMLQuantizationType[name]


def dequantize(data: NDArray[np.uint8], type: str) -> NDArray[np.float32]:
    """Return the weights in rows of a ggml type, with its blocks divided among all cores.

    `(..., bytes of a row)` to `(..., weights of a row)`, as `gguf.quants.dequantize` gives them.

    Raises:
        NotImplementedError: `gguf` does not dequantize that type.
    """
    import gguf

    weights, octets = block_size(type)
    read = READERS.get(type) or partial(gguf.quants.dequantize, qtype=type_number(type))
    blocks = data.reshape(-1, octets)
    values = np.empty((len(blocks), weights), np.float32)
    step = max(1, CHUNK_WEIGHTS // weights)

    def fill(start: int) -> None:
        # as one long row, because gguf takes 16 rows at a time, however short they are
        row = np.ascontiguousarray(blocks[start : start + step]).reshape(1, -1)
        values[start : start + step] = read(row).reshape(-1, weights)

    starts = range(0, len(blocks), step)
    if len(starts) <= 1:  # threads do not pay off for a small tensor
        [*map(fill, starts)]
    else:
        with ThreadPoolExecutor(min(cores(), len(starts))) as pool:
            [*pool.map(fill, starts)]
    return values.reshape(*data.shape[:-1], -1)


def _few_bits(row: NDArray[np.uint8], bits: int, step: int) -> NDArray[np.float32]:
    """Dequantize blocks of `NEWER` types: codes of `bits`, `step` integers apart from -1 on."""
    blocks = row.reshape(-1, 2 + 16)
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    codes = (blocks[:, 2:, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & (2**bits - 1)
    return scale * (step * codes.reshape(len(blocks), -1).astype(np.float32) - 1)


READERS = {"Q1_0": partial(_few_bits, bits=1, step=2), "Q2_0": partial(_few_bits, bits=2, step=1)}


def read_rows(path: Path, tensor: StoredTensor, rows: range) -> Tensor:
    """Return the `rows` of a matrix in the GGUF file at `path`, `(n, I)` float32.

    Raises:
        CheckpointError: `gguf` cannot dequantize their type.
    """
    octets = np.memmap(path, np.uint8, "r", tensor.place, tensor.byte_shape)
    try:
        return torch.from_numpy(dequantize(np.asarray(octets[rows]), tensor.type))
    except NotImplementedError:
        raise CheckpointError(
            f"{path} holds a tensor of type {tensor.type}, expected one that gguf "
            "dequantizes; start from the float model"
        ) from None


@contextmanager
def quick_gguf(path: Path, advance: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let transformers read the file `path` quickly in the block; `advance` is called per tensor.

    Other threads that enter such a block wait until it ends.
    """
    import gguf

    @cache  # transformers asks for configuration, tokenizer and weights one by one
    def reader() -> GgufFile:
        return GgufFile(path)

    def dequantized(data: NDArray[np.uint8], type: str) -> NDArray[np.float32]:
        values = dequantize(data, type)
        advance()
        return values

    lent = {
        "GGUFReader": lambda _path: reader(),
        "dequantize": dequantized,
        "get_tensor_name_map": cache(gguf.get_tensor_name_map),
    }
    own = {name: getattr(gguf, name) for name in lent}
    with _LENDING:
        vars(gguf).update(lent)
        try:
            yield
        finally:
            vars(gguf).update(own)
