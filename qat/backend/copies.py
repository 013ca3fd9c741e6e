"""Copies of tensors to the host while the device keeps computing, and pinned memory for them."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

SMALL_BYTES = 2**20
"""Largest tensor that is copied jointly with others; a copy of its own would cost the host more."""


class Copying:
    """Copies of tensors to the host, made on `stream` concurrently with other work if it is given.

    Small tensors are joined on their device first, in memory that is free again after `wait`.
    """

    def __init__(
        self, tensors: Sequence[Tensor], stream: "torch.cuda.Stream | None" = None
    ) -> None:
        groups = _groups(tensors)
        # GPU sources stay referenced: their memory must not be reused before the copies are done
        self._sources = [_joined([tensors[place] for place in group]) for group in groups]
        self._event: torch.cuda.Event | None = None
        beside = nullcontext() if stream is None else torch.cuda.stream(stream)
        if stream is not None:  # the joined tensors must exist before the copies begin
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self.copies = list(tensors)
        sizes = [source.nbytes for source in self._sources if source.is_cuda]
        rooms = iter(pinned_rooms(sizes))
        with beside:
            for group, source in zip(groups, self._sources, strict=True):
                is_new = len(group) > 1 and source.device.type == "cpu"
                copy = source if is_new else _on_host(source, rooms)
                parts = copy.split([tensors[place].numel() for place in group])
                for place, part in zip(group, parts, strict=True):
                    self.copies[place] = part.view(tensors[place].shape)
        if stream is not None:
            self._event = stream.record_event()

    def hold(self) -> None:
        """Make the device's later work start after the copies; the host does not wait."""
        if self._event is not None:
            self._event.wait()

    def wait(self) -> None:
        """Block the calling thread until the copies can be read."""
        if self._event is not None:
            self._event.synchronize()
        self._sources = []


class _Kept(NamedTuple):
    source: Tensor
    """Referenced, so that no other tensor can be allocated at its address."""
    version: int
    copy: Tensor


class KeptCopies:
    """A cache of host copies of tensors that rarely change; each is made once."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def missing(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors without a copy, or modified since by a PyTorch operator."""
        return {name: tensor for name, tensor in tensors.items() if not self._has(name, tensor)}

    def keep(self, tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
        """Store these copies; a tensor on the host may be its own copy."""
        for name, tensor in tensors.items():
            self._kept[name] = _Kept(tensor, tensor._version, copies[name])

    def of(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the stored copies by name."""
        return {name: self._kept[name].copy for name in names}

    def _has(self, name: str, tensor: Tensor) -> bool:
        kept = self._kept.get(name)
        return kept is not None and (
            (kept.source.data_ptr(), kept.source.shape, kept.source.dtype, kept.version)
            == (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor._version)
        )


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of tensors that are copied together: small ones by device and dtype.

    Each larger tensor is copied alone.
    """
    groups: list[list[int]] = []
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.nbytes <= SMALL_BYTES:
            small.setdefault((tensor.device, tensor.dtype), []).append(place)
        else:
            groups.append([place])
    return groups + list(small.values())


def _joined(tensors: list[Tensor]) -> Tensor:
    """Concatenate the flattened tensors; a single tensor is not copied."""
    flat = [tensor.flatten() for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def _on_host(tensor: Tensor, rooms: Iterator[Tensor]) -> Tensor:
    """Return a copy of a tensor; one of a GPU's is only begun, in the next of the `rooms`."""
    if tensor.is_cuda:
        return next(rooms).view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")


PIECE_BYTES = 2**30
"""Bytes of one piece of pinned memory, which holds many tensors."""
ALIGNED = 256
"""Alignment in bytes of each tensor in a piece."""


def pinned_rooms(sizes: Sequence[int]) -> list[Tensor]:
    """Return pinned memory of these many bytes each, in a few allocations: pinning takes long."""
    places, pieces = placed(sizes)
    whole = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in pieces]
    found = zip(places, sizes, strict=True)
    return [whole[piece][begin : begin + size] for (piece, begin), size in found]


def placed(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Place blocks of these sizes; return each block's piece and offset, and the pieces' sizes.

    PyTorch rounds each allocation of pinned memory up to a power of two, to almost twice the need.
    Therefore a piece is a power of two, at most 1 GiB unless a block is larger. The largest blocks
    are placed first, each in the first piece with enough room.
    """
    places, ends, rooms = [(0, 0)] * len(sizes), [], []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = -(-sizes[number] // ALIGNED) * ALIGNED
        fitting = (piece for piece, end in enumerate(ends) if end + size <= rooms[piece])
        piece = next(fitting, len(ends))
        if piece == len(ends):
            ends.append(0)
            rooms.append(max(PIECE_BYTES, _power_of_two(size)))
        places[number] = piece, ends[piece]
        ends[piece] += size
    return places, [_power_of_two(end) for end in ends]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
