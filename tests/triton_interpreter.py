"""Where Triton's interpreter does not compute as a GPU does, and how a test mends it."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def round_to_nearest_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let float32 round to the nearest bfloat16, ties to even: the interpreter cuts bits off."""
    convert = interpreter._convert_float

    def converted(
        array: np.ndarray, source: object, target: object, rounding: object
    ) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(array, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
        return values.bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def round_fma_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a fused multiply-add of float32 round once: the interpreter rounds the product too."""

    def create_fma(
        self: object,
        x: interpreter.TensorHandle,
        y: interpreter.TensorHandle,
        z: interpreter.TensorHandle,
    ) -> interpreter.TensorHandle:
        with np.errstate(invalid="ignore"):  # infinity less infinity, as on a GPU
            total = x.data.astype(np.float64) * y.data + z.data  # the product is exact
        return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
