"""A CPU that is as strict as a device whose operators only record.

Whatever comes from a tensor on the device is on the device, and pending until `step_end`. Reading a
pending value fails, wherever that happens, and so does whatever needs values to know a shape.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qat.backend import device as backend
from qat.backend.cpu import CpuBackend
from qat.backend.tracing import Counts, Tracing
from qat.data.packing import Batch

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
UNKNOWN_SHAPES = {aten.nonzero, aten.masked_select, aten.bucketize, aten.repeat_interleave}
MISSING = {aten.searchsorted, aten.exp2, aten.logaddexp}
"""Operators that XLA lacks, so that the host would compute them."""
METHODS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__)


class Book:
    """The storages on the device, those of them that are pending, and all requests to read.

    The operators and shapes recorded between two step ends form a graph; a graph that was not seen
    before must be compiled.
    """

    def __init__(self) -> None:
        self._graph: list[tuple] = []
        self._known: set[int] = set()
        self._held: dict[int, StorageWeakRef] = {}
        self._pending: set[int] = set()
        self.step_ends = 0
        self.compiles = 0
        self.reads = 0

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors as known and on the device."""
        for tensor in tensors:
            ref = _key(tensor)
            self._held[ref.cdata] = ref

    def note(self, tensors: Iterable[Tensor], *, is_device: bool) -> None:
        """Note tensors just computed; a weak reference keeps their storage's id unique."""
        for tensor in tensors:
            ref = _key(tensor)
            if is_device:
                self._held[ref.cdata] = ref
                self._pending.add(ref.cdata)

    def is_held(self, tensor: Tensor) -> bool:
        return _key(tensor).cdata in self._held

    def check_known(self, tensors: Iterable[Tensor], what: object) -> None:
        """Fail if any of them is pending."""
        pending = [tensor for tensor in tensors if _key(tensor).cdata in self._pending]
        assert not pending, f"{what} reads {pending[0].shape} before the step's end"

    def on_host(self, copy: Tensor) -> Tensor:
        """Mark a copy as on the host."""
        self._held.pop(_key(copy).cdata, None)
        self._pending.discard(_key(copy).cdata)
        return copy

    def record(self, operator: object, inputs: Iterable[Tensor]) -> None:
        """Record an operator of the device and its inputs."""
        self._graph.append((str(operator), *((*t.shape, str(t.dtype)) for t in inputs)))

    def end(self) -> None:
        self.step_ends += 1
        self._pending.clear()
        graph = hash(tuple(self._graph))
        self.compiles += bool(self._graph) and graph not in self._known
        self._known.add(graph)
        self._graph.clear()


def _key(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Operators(TorchDispatchMode):
    def __init__(self, book: Book) -> None:
        super().__init__()
        self._book = book

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs, kind = _tensors((args, kwargs)), func.overloadpacket
        is_device = any(map(self._book.is_held, inputs))
        if is_device and kind in READS:
            self._book.check_known(inputs, func)
        by_mask = kind is aten.index and any(t.dtype == torch.bool for t in _tensors(args[1]))
        assert not (is_device and (kind in UNKNOWN_SHAPES or by_mask)), f"{func} needs values"
        is_missing = kind in MISSING or func is aten.view.dtype
        assert not (is_device and is_missing), f"{func} is missing"
        out = func(*args, **(kwargs or {}))
        if is_device:
            self._book.record(func, inputs)
        self._book.note(_tensors(out), is_device=is_device)
        return out


class _Methods(TorchFunctionMode):
    def __init__(self, book: Book) -> None:
        super().__init__()
        self._book = book

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in METHODS:
            self._book.check_known([args[0]], func)
        return func(*args, **(kwargs or {}))


def make_strict(monkeypatch: pytest.MonkeyPatch) -> Book:
    """Make the CPU strict about everything that runs `inside`, and return the book."""
    book = Book()

    class StrictTracing(Tracing):
        def counts(self) -> Counts:
            return Counts(book.compiles)

    class StrictBackend(CpuBackend):
        is_traced = True
        tracing = StrictTracing()

        def step_end(self) -> None:
            book.end()

        def read(self, tensors: Sequence[Tensor]) -> list[float | int | bool]:
            book.reads += 1
            return super().read(tensors)

        def to_host(self, tensor: Tensor) -> Tensor:
            book.check_known([tensor], "to_host")
            return book.on_host(tensor.clone())

        def copied_to_host(self, tensors: dict[str, Tensor]) -> tuple:
            book.end()
            copies, copying = super().copied_to_host(tensors)
            return {name: book.on_host(copy.clone()) for name, copy in copies.items()}, copying

    def to(batch: Batch, _device: torch.device) -> Batch:
        moved = Batch(*(tensor.clone() for tensor in batch))
        book.hold(moved)
        return moved

    monkeypatch.setitem(backend.KINDS, "cpu", StrictBackend)
    monkeypatch.setattr(Batch, "to", to)
    return book


@contextmanager
def inside(book: Book, model: torch.nn.Module) -> Iterator[None]:
    """A block in which `model` lies on the strict device."""
    book.hold([*model.parameters(), *model.buffers()])
    with _Methods(book), _Operators(book):
        yield
