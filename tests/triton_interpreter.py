"""Where Triton's interpreter does not compute as a GPU does, and how a test mends it."""

import inspect
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from qat.kernels.dispatch import IS_COMPILED


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
            scope.set_attr(language, name, _interpreted(member))


def _interpreted(member: FunctionType) -> FunctionType:
    """A function of the language that asks the interpreter what it means."""
    inner = getattr(member, "__wrapped__", member)  # around it, only that question is checked

    def call(*args: object, **kwargs: object) -> object:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    return call


def _work_out_types_once() -> None:
    init, find_dtype = tl.block_type.__init__, interpreter._get_np_dtype
    broadcast = interpreter.TritonSemantic.broadcast_impl_value
    blocks, dtypes, shapes = {}, {}, {}
    scalar = tl.tuple([]), tl.constexpr(1)

    def block(self: tl.block_type, element_ty: tl.dtype, shape: Iterable) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = element_ty.name, sizes
        if key not in blocks:
            init(self, element_ty, list(sizes))
            of_tensors = tl.tuple([*map(tl.constexpr, sizes)]), tl.constexpr(self.numel)
            self.of_tensors = shapes.setdefault(sizes, of_tensors)
            blocks[key] = self.__dict__
        self.__dict__ = {**blocks[key], "element_ty": element_ty}

    def tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else scalar

    def np_dtype(kind: tl.dtype) -> np.dtype:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(kind)
        return dtypes[name]

    def broadcast_where_shapes_differ(
        self: interpreter.TritonSemantic, lhs: tl.tensor, rhs: tl.tensor
    ) -> tuple[tl.tensor, tl.tensor]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor
    interpreter._get_np_dtype = np_dtype
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_where_shapes_differ


def without_waste() -> None:
    """Let Triton's interpreter compute the same in a third of the time.

    A kernel's launch puts the interpreter in place of Triton's language. So did each call of a
    device function, which looked through the whole language for what the launch had replaced. And
    each sum of integers was computed in 64 bits too, for a check that only debugging makes. Each
    tensor wrote its shape and the name of its type anew.
    """
    if not IS_COMPILED:  # the compiler has the same types
        _work_out_types_once()
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
