"""PyTorch/XLA behind the protocol of `qat.backend`: operators record, `step_end` computes.

One step is one graph. Whatever reads a value before `step_end` makes a graph of its own, and every
new shape compiles anew; `compile_count`, `execution_count` and `host_fallbacks` tell.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from qat.backend import Backend
from qat.copying import Copying
from qat.errors import ConfigError
from qat.libtpu import ask_nobody_without_a_tpu

HOST_READS = ("aten::_local_scalar_dense",)
"""Counted by PyTorch/XLA like operators that it lacks, though reading a scalar is none."""


@lru_cache(maxsize=1)
def open_backend() -> "XlaBackend":
    """The backend of this process's XLA devices, initialised.

    To be called before any backward of the process: autograd counts the devices at its first one.

    Raises:
        ConfigError: PyTorch/XLA is not installed, or for another PyTorch.
    """
    _check_versions()
    # else a number that happens to be 0 or 1, such as a learning rate, makes another graph
    os.environ.setdefault("XLA_NO_SPECIAL_SCALARS", "1")
    ask_nobody_without_a_tpu()
    import torch_xla

    _share_devices()
    device = torch_xla.device()
    # float32 means float32, also where units multiply in bfloat16
    torch_xla._XLAC._xla_set_mat_mul_precision("highest")
    return XlaBackend(device)


def _share_devices() -> None:
    """Let several devices work on one batch: the compiler divides what the program says once."""
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    count = runtime.global_runtime_device_count()
    if count == 1:
        return
    runtime.use_spmd()
    spmd.set_global_mesh(spmd.Mesh(list(range(count)), (count,), ("data",)))


def backend_on(device: torch.device) -> "XlaBackend":
    """The backend of a tensor on an XLA device."""
    return XlaBackend(device)


def _check_versions() -> None:
    if find_spec("torch_xla") is None:
        raise ConfigError(
            "device=xla, but torch_xla is not installed; install it with pip install 'qat[xla]'"
        )
    ours, theirs = torch.__version__, version("torch_xla")
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        raise ConfigError(
            f"device=xla, but torch_xla {theirs} is not made for torch {ours}, expected the same "
            f"release of both; install torch=={theirs}"
        )


@dataclass(frozen=True)
class XlaBackend(Backend):
    """All of a process's XLA devices behind one: a TPU's, or the CPU client's."""

    def dtype_name(self, name: str) -> str:
        """See `Backend`; `auto` is bf16, which TPUs multiply in."""
        if name in ("fp16", "tf32"):
            raise ConfigError(f"dtype={name}, but XLA devices have no such units; use --dtype bf16")
        return "bf16" if name == "auto" else name

    def has_bf16(self) -> bool:
        """See `Backend`."""
        return True

    def matmul_precision(self, name: str) -> nullcontext:
        """See `Backend`: always the highest."""
        return nullcontext()

    def autocast(self, dtype: torch.dtype) -> torch.autocast | nullcontext:
        """See `Backend`."""
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast("xla", dtype=dtype, cache_enabled=False)

    def load_map(self) -> None:
        """See `Backend`: weights are read on the host, for moving them breaks ties."""

    def place(self, model: nn.Module) -> None:
        """See `Backend`."""
        model.to(self.device)
        model.tie_weights()

    def checkpoint_fn(self) -> Callable:
        """See `Backend`: with barriers, else the compiler joins the recomputation again."""
        return _recomputed

    def divided(self, tensor: Tensor) -> Tensor:
        """See `Backend`: over all devices if there are several, whose number divides the rows.

        Raises:
            ConfigError: it does not.
        """
        from torch_xla.distributed import spmd

        mesh = spmd.get_global_mesh()
        if mesh is None or tensor.numel() == 0:
            return tensor
        count = mesh.size()
        if tensor.shape[0] % count:
            raise ConfigError(
                f"{tensor.shape[0]} sequences in a batch, expected a multiple of the {count} XLA "
                "devices; choose another --batch-size"
            )
        spmd.mark_sharding(tensor, mesh, ("data", *[None] * (tensor.dim() - 1)))
        return tensor

    def step_end(self) -> None:
        """See `Backend`; the host does not wait for what it gives."""
        import torch_xla

        torch_xla.sync()

    def read(self, tensors: Sequence[Tensor]) -> list[float | int | bool]:
        """See `Backend`: one transfer for all."""
        return [tensor.item() for tensor in self._on_host(tensors)]

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Backend`; waits."""
        return self._on_host([tensor])[0]

    def copied_to_host(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Copying]:
        """See `Backend`; the copies are there when it returns."""
        self.step_end()
        ours = [name for name, tensor in tensors.items() if tensor.device.type == "xla"]
        copies = {name: tensor.clone() for name, tensor in tensors.items() if name not in set(ours)}
        copies |= zip(ours, self._on_host([tensors[name] for name in ours]), strict=True)
        return {name: copies[name] for name in tensors}, Copying(torch.device("cpu"), [])

    def _on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        import torch_xla

        return torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])

    def finished(self) -> Callable[[], None]:
        """See `Backend`."""
        return lambda: None

    def equal(self, a: Tensor, b: Tensor) -> bool:
        """See `Backend`: compared on the host."""
        return torch.equal(*self._on_host([a, b]))

    def fixed_shapes(self) -> bool:
        """See `Backend`."""
        return True

    def compares(self) -> bool:
        """See `Backend`: `bucketize` would run on the host."""
        return True

    def mark(self) -> float:
        """See `Backend`: the host's time, which waits for nothing."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """See `Backend`."""
        import torch_xla
        from torch_xla.core import xla_model

        torch_xla.sync()
        xla_model.wait_device_ops()

    def name(self) -> str:
        """See `Backend`: such as `xla tpu` or `xla cpu`."""
        from torch_xla import runtime

        return f"xla {runtime.device_type().lower()}"

    def compile_count(self) -> int:
        """Graphs compiled so far in this process."""
        return _times("CompileTime")

    def execution_count(self) -> int:
        """Graphs executed so far in this process."""
        return _times("ExecuteTime") + _times("ExecuteReplicatedTime")

    def host_fallbacks(self) -> dict[str, int]:
        """Operators that XLA lacks and the host computed, and how often, in this process."""
        from torch_xla.debug import metrics

        names = [name for name in metrics.counter_names() if name.startswith("aten::")]
        return {name: metrics.counter_value(name) for name in names if name not in HOST_READS}


def _times(metric: str) -> int:
    from torch_xla.debug import metrics

    found = metrics.metric_data(metric)
    return 0 if found is None else found[0]


def _recomputed(forward: Callable, hidden: Tensor, **kwargs: Any) -> Tensor:  # noqa: ANN401
    from torch_xla.utils.checkpoint import checkpoint

    if not hidden.requires_grad:  # without a gradient to give, backward would skip the layer
        hidden = hidden.detach().requires_grad_()
    return checkpoint(partial(forward, **kwargs), hidden, preserve_rng_state=False)
