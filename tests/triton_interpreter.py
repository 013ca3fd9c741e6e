"""Patches for Triton's interpreter, where it does not compute as a GPU does."""

import inspect
from dataclasses import replace
from functools import cache
from math import prod
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
    """Return the names that the interpreter replaces in a module or class of Triton's language."""
    return [name for name, member in inspect.getmembers(language) if tl.core.is_builtin(member)]


def _patch_builtin(language: ModuleType | type, builder: object, scope: object) -> None:
    for name in _builtins(language):
        member = getattr(language, name)
        if tl.core.is_builtin(member):  # some stay replaced after a launch
            interpreter._patch_attr(language, name, member, builder, scope)


def _patch_attr(
    owner: object, name: str, member: FunctionType, builder: object, scope: object
) -> None:
    function = getattr(member, "__wrapped__", member)  # not the check that a kernel calls it

    def call(*args: object, **kwargs: object) -> object:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _know_types() -> None:
    """Keep one type of each element and shape, which knows its tensors' shape and size."""
    core, block_type = tl.core, tl.core.block_type
    make_type, make_dtype = block_type.__init__, interpreter._get_np_dtype
    blocks, dtypes, of_scalar = {}, {}, _shape_and_size(())

    def new_type(cls: type, element: tl.dtype, shape: list) -> tl.block_type:
        sizes = tuple([s.value if type(s) is tl.constexpr else s for s in shape])
        key = element.name, sizes
        if key not in blocks:
            known = object.__new__(cls)
            make_type(known, element, shape)
            known.sizes, known.of_tensor = sizes, _shape_and_size(sizes)
            blocks[key] = known
        return blocks[key]

    def init_tensor(self: tl.tensor, handle: interpreter.TensorHandle, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else of_scalar

    def np_dtype(dtype: tl.dtype) -> np.dtype:
        scalar = dtype.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = make_dtype(scalar)
        return dtypes[scalar.name]

    block_type.__new__, block_type.__init__ = new_type, lambda *given: None
    core.tensor.__init__, interpreter._get_np_dtype = init_tensor, np_dtype


def _shape_and_size(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(prod(sizes))


def _know_constants() -> None:
    """Make a constant once, and nothing of operands whose types and shapes agree."""
    semantic = interpreter.interpreter_semantic
    check_types, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    constants = {}

    def check_once(lhs: object, rhs: object, *given: bool) -> tuple[tl.tensor, tl.tensor]:
        if not isinstance(lhs, tl.tensor):
            return check_types(lhs, rhs, *given)
        is_pointer = lhs.dtype.is_ptr()
        if isinstance(rhs, tl.tensor):
            divides = len(given) > 2  # of half precision: in float32
            is_alike = lhs.type is rhs.type and not is_pointer and not divides
            return (lhs, rhs) if is_alike else check_types(lhs, rhs, *given)
        key = lhs.type.name, type(rhs), repr(rhs), given  # -0.0 equals 0.0
        if key not in constants:
            constants[key] = check_types(lhs, rhs, *given)[1]
        constant = constants[key]
        return lhs if is_pointer else semantic.cast(lhs, constant.dtype), constant

    def broadcast_once(lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        return (lhs, rhs) if blocks and lhs.type.sizes == rhs.type.sizes else broadcast(lhs, rhs)

    semantic.binary_op_type_checking_impl = check_once
    semantic.broadcast_impl_value = broadcast_once


def without_waste() -> None:
    """Let Triton's interpreter compute the same in a fifth of the time.

    A kernel's launch puts the interpreter in place of Triton's language. So did each call of a
    device function, which looked through the whole language for what the launch had replaced. Each
    sum of integers was computed in 64 bits too, for a check that only debugging makes. And each
    operation made its types, shapes and constants anew: several times the work of its arithmetic.
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
    interpreter._patch_attr = _patch_attr
    _know_types()
    _know_constants()
