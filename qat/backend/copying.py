"""Copies of tensors that are made while the device goes on."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

SMALL_BYTES = 2**20
"""Up to here a tensor travels joined with others: a copy of its own costs the host more."""


class Copying:
    """Copies of tensors on the host, made on `stream` beside a GPU's other work, if that is given.

    Small ones are joined on their device before, in memory that is free again after `wait`.
    """

    def __init__(
        self, tensors: Sequence[Tensor], stream: "torch.cuda.Stream | None" = None
    ) -> None:
        groups = _groups(tensors)
        # of a GPU: whose memory must not be given away before the end
        self._sources = [_joined([tensors[place] for place in group]) for group in groups]
        self._event: torch.cuda.Event | None = None
        beside = nullcontext() if stream is None else torch.cuda.stream(stream)
        if stream is not None:  # which must not begin before the joined ones are there
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self.copies = list(tensors)
        with beside:
            for group, source in zip(groups, self._sources, strict=True):
                is_new = len(group) > 1 and source.device.type == "cpu"
                copy = source if is_new else _on_host(source)
                parts = copy.split([tensors[place].numel() for place in group])
                for place, part in zip(group, parts, strict=True):
                    self.copies[place] = part.view(tensors[place].shape)
        if stream is not None:
            self._event = stream.record_event()

    def hold(self) -> None:
        """Let the device's later work begin after the copies; the host does not wait."""
        if self._event is not None:
            self._event.wait()

    def wait(self) -> None:
        """Wait on the host, in any thread, until the copies can be read."""
        if self._event is not None:
            self._event.synchronize()
        self._sources = []


class _Kept(NamedTuple):
    source: Tensor
    """Held, so that no other tensor comes to lie at its address."""
    version: int
    copy: Tensor


class KeptCopies:
    """Copies on the host of tensors that hardly ever change, each made once."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def missing(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those without a copy, or changed since by an operator of PyTorch."""
        return {name: tensor for name, tensor in tensors.items() if not self._has(name, tensor)}

    def keep(self, tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
        """Remember `copies` of these; what lies on the host is its own."""
        for name, tensor in tensors.items():
            self._kept[name] = _Kept(tensor, tensor._version, copies[name])

    def of(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The copies of these."""
        return {name: self._kept[name].copy for name in names}

    def _has(self, name: str, tensor: Tensor) -> bool:
        kept = self._kept.get(name)
        return kept is not None and (
            (kept.source.data_ptr(), kept.source.shape, kept.source.dtype, kept.version)
            == (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor._version)
        )


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors that travel together: small ones of a kind, every other alone."""
    groups: list[list[int]] = []
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.nbytes <= SMALL_BYTES:
            small.setdefault((tensor.device, tensor.dtype), []).append(place)
        else:
            groups.append([place])
    return groups + list(small.values())


def _joined(tensors: list[Tensor]) -> Tensor:
    """One after the other, flat: a copy of several, the tensor itself if it is alone."""
    flat = [tensor.flatten() for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    return tensor.to("cpu", non_blocking=tensor.is_cuda)
