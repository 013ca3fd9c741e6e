"""Where Triton's interpreter does not compute as a GPU does, and how a test mends it."""

import inspect
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType

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


@cache
def _languages(function: FunctionType) -> frozenset[ModuleType]:
    """The modules of Triton's language that a kernel's code sees."""
    values = function.__globals__.values()
    return frozenset(one for one in (tl, tl.core) if any(value is one for value in values))


@cache
def _builtins(language: ModuleType | type) -> list[str]:
    """What the interpreter replaces of a module or class of Triton's language, by name."""
    return [name for name, member in inspect.getmembers(language) if tl.core.is_builtin(member)]


def _patch_builtin(language: ModuleType | type, builder: object, scope: object) -> None:
    for name in _builtins(language):
        member = getattr(language, name)
        if tl.core.is_builtin(member):  # some stay replaced after a launch
            interpreter._patch_attr(language, name, member, builder, scope)


def without_waste() -> None:
    """Let Triton's interpreter compute the same in less than half of the time.

    A kernel's launch puts the interpreter in place of Triton's language. So did each call of a
    device function, which looked through the whole language for what the launch had replaced. And
    each sum of integers was computed in 64 bits too, for a check that only debugging makes.
    """
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    patch, patched = interpreter._patch_lang, set()

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(function: FunctionType) -> interpreter._LangPatchScope:
        languages, scope = _languages(function), Launch()
        if not languages <= patched:
            scope._changes = patch(function)._changes
            patched.update(languages)
        return scope

    interpreter._patch_lang, interpreter._patch_builtin = patch_once, _patch_builtin
