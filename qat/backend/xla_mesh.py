"""The XLA devices of one process as a mesh of one axis; `qat.backend.xla` is its only user."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from qat.errors import ConfigError

GATHERED_BYTES = 2**28
"""Most bytes that copies of shared tensors to the host take on each device at a time."""


def share_devices() -> None:
    """Let several devices work on one batch: the compiler divides what the program says once."""
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    count = runtime.global_runtime_device_count()
    if count == 1:
        return
    runtime.use_spmd()
    spmd.set_global_mesh(spmd.Mesh(list(range(count)), (count,), ("data",)))


class XlaMesh:
    """The part of a backend that says what lies where."""

    def divided(self, tensor: Tensor) -> Tensor:
        """See `Backend`: over all devices if there are several, whose number divides the rows.

        Raises:
            ConfigError: it does not.
        """
        count = self.divisions()
        if count == 1 or tensor.numel() == 0:
            return tensor
        if tensor.shape[0] % count:
            raise ConfigError(
                f"{tensor.shape[0]} sequences in a batch, expected a multiple of the {count} XLA "
                "devices; choose another --batch-size"
            )
        _share_rows(tensor)
        return tensor

    def divisions(self) -> int:
        """See `Backend`."""
        from torch_xla.distributed import spmd

        mesh = spmd.get_global_mesh()
        return 1 if mesh is None else mesh.size()

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """See `Backend`; rows that the number of devices does not divide are filled up."""
        if self.divisions() > 1:
            self.synchronize()
            for tensor in tensors:
                _share_rows(tensor)


def is_shared(tensor: Tensor) -> bool:
    """Whether each device holds a part of a tensor that was computed."""
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor).startswith("{devices")


def whole(tensor: Tensor) -> Tensor:
    """The same after a new first dimension, all of it on every device.

    A copy to the host of what is shared would compile a graph for each tensor, every time.
    """
    from torch_xla.distributed import spmd

    mesh = spmd.get_global_mesh()
    if mesh is None:
        return tensor
    # a view, because what is marked already cannot be marked otherwise
    return spmd.mark_sharding_with_gradients(tensor[None], mesh, (None,) * (tensor.dim() + 1))


def gathered(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, those that are shared made whole, `GATHERED_BYTES` at a time."""
    group: list[Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.nbytes if is_shared(tensor) else 0
        if group and size and held + size > GATHERED_BYTES:
            yield group
            group, held = [], 0
        group.append(whole(tensor) if size else tensor)
        held += size
    if group:
        yield group


def _share_rows(tensor: Tensor) -> None:
    from torch_xla.distributed import spmd

    rows = ("data", *[None] * (tensor.dim() - 1))
    spmd.mark_sharding(tensor, spmd.get_global_mesh(), rows)
