"""Graphs of PyTorch/XLA: their counters, the shapes that are compiled, and the devices of one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qat.backend.tracing import Counts, Tracing
from qat.errors import ConfigError
from qat.extensions.xla.compiling import CompileLog, Graphs

HOST_READS = ("aten::_local_scalar_dense", "aten::equal")
"""Counters of reads (`item`, `torch.equal`), listed by PyTorch/XLA among operators it lacks."""
SHORTEST, MOST_SEQUENCES = 64, 2**14
"""The shortest length that rows are padded to; the largest batch that a search tries."""


def _metric(name: str) -> tuple[int, float]:
    """Return how often a metric was measured, and its total in nanoseconds."""
    from torch_xla.debug import metrics

    return (metrics.metric_data(name) or (0, 0.0))[:2]


def _counter(name: str) -> int:
    from torch_xla.debug import metrics

    return metrics.counter_value(name) or 0


def _graphs() -> Graphs:
    return Graphs(_counter("UncachedCompile"), _metric("CompileTime")[0])


COMPILE_LOG = CompileLog(_graphs)


class XlaTracing(Tracing):
    """The graphs of this process, which are those of all its XLA devices."""

    def counts(self) -> Counts:
        """See `Tracing`."""
        from torch_xla.debug import metrics

        lacking = [name for name in metrics.counter_names() if name.startswith("aten::")]
        compiles, compile_ns = _metric("CompileTime")
        return Counts(
            compiles,
            compile_ns / 1e9,
            sum(_metric(name)[0] for name in ("ExecuteTime", "ExecuteReplicatedTime")),
            _counter("PersistentCacheHit"),
            {name: metrics.counter_value(name) for name in lacking if name not in HOST_READS},
        )

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """See `Tracing`."""
        return COMPILE_LOG.about(what)

    def place(self, model: nn.Module, device: torch.device) -> None:
        """See `Tracing`."""
        model.to(device)
        model.tie_weights()

    def check_optimizer(self, name: str, latent_dtype: str) -> None:
        """See `Tracing`."""
        if name == "adamw8bit":
            raise ConfigError(
                "optimizer=adamw8bit, but torchao's step with moments of 8 bits is not made for "
                "XLA devices; use --optimizer adamw (and --shard-latents over several devices)"
            )
        if latent_dtype == "bf16":
            raise ConfigError(
                "latent_dtype=bf16, but XLA devices have no random bits to round its steps by; use "
                "--latent-dtype fp32 (and --shard-latents over several devices)"
            )

    def checkpoint_fn(self) -> Callable:
        """See `Tracing`; barriers keep the compiler from merging the recomputation."""
        return _recomputed

    def filled_length(self, length: int) -> int:
        """See `Tracing`: 64, 96, 128, 192, 256, 384, ..."""
        filled = SHORTEST
        while filled < length:
            filled *= 2
        return filled * 3 // 4 if SHORTEST < filled and length <= filled * 3 // 4 else filled

    def sizes_tried(self) -> tuple[int, ...]:
        """See `Tracing`: four per octave, multiples of the number of devices."""
        count = self.divisions()
        parts = {part * 2**power // 4 for part in (4, 5, 6, 7) for power in range(32)}
        return tuple(size for size in sorted(parts) if size <= MOST_SEQUENCES and not size % count)

    def divisions(self) -> int:
        """See `Tracing`."""
        from torch_xla.distributed import spmd

        mesh = spmd.get_global_mesh()
        return 1 if mesh is None else mesh.size()

    def divided(self, tensor: Tensor) -> Tensor:
        """See `Tracing`: over all devices, if there are several.

        Raises:
            ConfigError: the number of rows is not a multiple of the number of devices.
        """
        count = self.divisions()
        if count == 1 or tensor.numel() == 0:
            return tensor
        if tensor.shape[0] % count:
            raise ConfigError(
                f"{tensor.shape[0]} sequences in a batch, expected a multiple of the {count} XLA "
                "devices; choose another --batch-size"
            )
        _shard_rows(tensor)
        return tensor

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """See `Tracing`; rows are padded to a multiple of the number of devices."""
        if self.divisions() > 1:
            synchronize()
            for tensor in tensors:
                _shard_rows(tensor)


def _recomputed(forward: Callable, hidden: Tensor, **kwargs: Any) -> Tensor:  # noqa: ANN401
    from torch_xla.utils.checkpoint import checkpoint

    if not hidden.requires_grad:  # with no gradient to produce, backward would skip the layer
        hidden = hidden.detach().requires_grad_()
    return checkpoint(partial(forward, **kwargs), hidden, preserve_rng_state=False)


def synchronize() -> None:
    """Wait until all recorded work is done."""
    import torch_xla
    from torch_xla.core import xla_model

    torch_xla.sync()
    xla_model.wait_device_ops()


def _shard_rows(tensor: Tensor) -> None:
    from torch_xla.distributed import spmd

    rows = ("data", *[None] * (tensor.dim() - 1))
    spmd.mark_sharding(tensor, spmd.get_global_mesh(), rows)
