"""Reads pickled tensors of the reference system: the only unpickling in `qat`.

`torch.load(weights_only=True)` builds tensors, numbers, text and containers of them, nothing else.
Files in PyTorch's zip format are memory-mapped, so that unused tensors are not read.
"""

import pickle
import re
import struct
import tarfile
import warnings
import zipfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

from qat.errors import QatError

UNREADABLE = (
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    AssertionError,
    ArithmeticError,
    pickle.UnpicklingError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions of PyTorch's reader for bytes that are not a pickle of tensors, from fuzzing."""

DTYPES = frozenset(
    {
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""The dtypes that the reference system writes, and related ones."""


def read_pickle(path: Path, error: type[QatError]) -> dict[str, object]:
    """Return the dictionary in a `.pt` file; its tensors are on the CPU.

    Raises:
        error: there is no such file, it holds no dictionary with string keys, or it holds more than
            data.
    """
    if not path.is_file():
        raise error(f"{path} is no file, expected tensors that torch.save wrote; check the path")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            found = torch.load(
                str(path), weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path)
            )
    except UNREADABLE as reason:
        raise error(
            f"{path} is no file of pickled tensors that can be read without running code "
            f"({_reason(reason)}); expected what torch.save writes of a state dict: copy it anew"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise error(
            f"{path} holds a {type(found).__name__}, expected a dictionary of named tensors; "
            "name the file of a state dict"
        )
    return dict(found)


def _reason(reason: Exception) -> str:
    """Return PyTorch's message in one line, without its advice to allow the classes of the file."""
    said = str(reason)
    inner = re.search(r"WeightsUnpickler error:\s*(.+)", said)
    said = (inner[1] if inner else said.strip()).partition("\n")[0].partition(" was not an ")[0]
    return said[:120] if re.search("[a-z]", said) else type(reason).__name__


def check_sums(path: Path, error: type[QatError]) -> None:
    """Verify the checksum of every member of a zip file, which PyTorch does not.

    Raises:
        error: a member changed since it was written, or is compressed, which PyTorch never writes.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            is_plain = all(m.compress_type == zipfile.ZIP_STORED for m in archive.infolist())
            damaged = archive.testzip() if is_plain else "a compressed member"
    except UNREADABLE as reason:
        damaged = f"an unreadable member ({str(reason)[:80]})"
    if damaged is not None:
        raise error(
            f"{path} is damaged: {damaged} is not what was written, expected its checksum; copy "
            "the file anew"
        )


def check_tensors(path: Path, tensors: dict[str, object], error: type[QatError]) -> None:
    """Raise `error` for the first value that is not a plain tensor of a usual dtype, in memory."""
    for name, value in tensors.items():
        fault = _tensor_fault(value)
        if fault is not None:
            raise error(
                f"{path}: {name} is {fault}, expected a plain tensor; copy the file anew or save "
                "it again"
            )


def _tensor_fault(value: object) -> str | None:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        return f"a tensor of layout {value.layout} on {value.device}"
    if value.dtype not in DTYPES:
        return f"a tensor of {value.dtype}"
    # a stride of zero may claim any size over a few bytes; `torch.save` writes none
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"a tensor of shape {tuple(value.shape)} over too few bytes"
    return None
