"""The XLA devices of one process as a mesh of one axis; `qat.backend_xla` is its only user."""

from collections.abc import Sequence

from torch import Tensor

from qat.errors import ConfigError


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


def _share_rows(tensor: Tensor) -> None:
    from torch_xla.distributed import spmd

    rows = ("data", *[None] * (tensor.dim() - 1))
    spmd.mark_sharding(tensor, spmd.get_global_mesh(), rows)
