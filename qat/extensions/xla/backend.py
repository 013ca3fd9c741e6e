"""PyTorch/XLA as a `Backend`: operators record, `step_end` compiles and executes.

One step is one graph. Reading a value before `step_end` creates a graph of its own, and every new
shape recompiles; `XlaTracing.counts` counts these.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from qat.backend.base import GIB, Backend, MemoryUse, launched
from qat.backend.before_torch import skip_tpu_metadata
from qat.backend.copies import Copying
from qat.backend.cpu import CpuBackend
from qat.backend.tpu import tpu_name
from qat.backend.tracing import Tracing
from qat.errors import ConfigError, how_to_install, is_installed
from qat.extensions.xla.tracing import COMPILE_LOG, XlaTracing, synchronize

logger = logging.getLogger(__name__)

HOST = CpuBackend(torch.device("cpu"))
PEAKS: dict[torch.device, int] = {}
"""A device's peak, in bytes, when `reset_peak_memory` was called."""
GATHERED_BYTES = 2**28
"""Most bytes per device that copies of sharded tensors to the host take at a time."""


@lru_cache(maxsize=1)
def open_backend() -> "XlaBackend":
    """Return the backend of this process's XLA devices, initialised.

    Call it before the first backward of the process: autograd counts the devices then.

    Raises:
        ConfigError: PyTorch/XLA is not installed, or was built for another PyTorch.
    """
    if not is_installed("torch_xla"):
        raise ConfigError(
            f"device=xla, but torch_xla is not installed; install it with: {how_to_install('xla')}"
        )
    ours, theirs = torch.__version__, version("torch_xla")
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        raise ConfigError(
            f"device=xla, but torch_xla {theirs} is not made for torch {ours}, expected the same "
            f"release of both; install torch=={theirs}"
        )
    # otherwise a scalar that happens to be 0 or 1, such as a learning rate, makes another graph
    os.environ.setdefault("XLA_NO_SPECIAL_SCALARS", "1")
    skip_tpu_metadata()
    if launched().world > 1:
        # one chip of this host for each process, as
        # `torch_xla._internal.tpu.configure_one_chip_topology` does for the first
        os.environ.setdefault("TPU_VISIBLE_CHIPS", str(launched().local_rank))
        os.environ.setdefault("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1")
        os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")
    import torch_xla
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    count = runtime.global_runtime_device_count()
    if count > 1:  # the compiler divides one program among all devices
        runtime.use_spmd()
        spmd.set_global_mesh(spmd.Mesh(list(range(count)), (count,), ("data",)))
    device = torch_xla.device()
    # keep float32 exact, also on units that multiply in bfloat16
    torch_xla._XLAC._xla_set_mat_mul_precision("highest")
    return XlaBackend(device)


@dataclass(frozen=True)
class XlaBackend(Backend):
    """All of a process's XLA devices (of a TPU, or of XLA's CPU client) as one backend."""

    # compiling a new shape takes minutes, and the host would compute missing operators
    is_traced: ClassVar[bool] = True
    tracing: ClassVar[Tracing] = XlaTracing()

    def dtype_name(self, name: str) -> str:
        """See `Backend`; `auto` is bf16, the native dtype of TPUs."""
        if name in ("fp16", "tf32"):
            raise ConfigError(f"dtype={name}, but XLA devices have no such units; use --dtype bf16")
        return "bf16" if name == "auto" else name

    def has_bf16(self) -> bool:
        """See `Backend`."""
        return True

    def load_map(self) -> None:
        """See `Backend`: weights are loaded on the host, because moving them breaks ties."""

    @contextmanager
    def session(self, cache_dir: Path | None) -> Iterator[None]:
        """See `Backend`; logs the counters at the end.

        Raises:
            ConfigError: this process has already compiled without `cache_dir`.
        """
        if cache_dir is not None:
            self._keep_compiled(cache_dir)
        with COMPILE_LOG.running():
            try:
                yield
            finally:
                self._log_counts()

    def _keep_compiled(self, cache_dir: Path) -> None:
        import torch_xla
        from torch_xla import runtime

        if self.is_host():
            logger.warning(
                "xla_cache_dir=%s: the CPU client cannot read back what it compiled, so nothing is "
                "kept there; a TPU's is",
                cache_dir,
            )
            return
        if runtime.process_count() > 1:  # no process waits for another's file
            cache_dir = cache_dir / f"process-{runtime.process_index()}"
        directory = str(cache_dir.resolve())
        if os.environ.get("XLA_PERSISTENT_CACHE_PATH") == directory:
            return
        if torch_xla._XLAC._xla_computation_cache_is_initialized():
            raise ConfigError(
                f"xla_cache_dir={cache_dir}, but this process has compiled already and keeps it "
                "elsewhere, expected it before any work; start a new process"
            )
        cache_dir.mkdir(parents=True, exist_ok=True)
        runtime.initialize_cache(directory)

    def _log_counts(self) -> None:
        counts = self.tracing.counts()
        logger.info(
            "XLA: %d graphs compiled in %.1f s, %d executions",
            counts.compiles,
            counts.compile_s,
            counts.executions,
        )
        if counts.host_fallbacks:
            fallbacks = counts.host_fallbacks.items()
            names = ", ".join(f"{name} ({count} times)" for name, count in fallbacks)
            logger.warning(
                "XLA lacks %s: the host computed it, and the device waited each time; use other "
                "operators there",
                names,
            )

    def memory_counters(self) -> dict[str, int] | None:
        """Return the first device's memory counters; None if it reports none.

        They are `bytes_used`, `peak_bytes_used` and `bytes_limit`.
        """
        from torch_xla.core import xla_model

        try:
            return xla_model.get_memory_info(self.device)
        except RuntimeError as error:
            if "UNIMPLEMENTED" not in str(error):
                raise
            return None

    def is_host(self) -> bool:
        """Return whether the devices use the process's own memory: XLA's CPU client."""
        from torch_xla import runtime

        return runtime.device_type() == "CPU"

    def memory_use(self) -> MemoryUse:
        """See `Backend`; the peak is None also if it stayed below an earlier peak.

        The runtime reports only the peak of the whole process, so a lower one cannot be seen. On a
        CPU the device's share of what is held is not reported.
        """
        if self.is_host():
            return MemoryUse(peak_gib=HOST.memory_use().peak_gib)
        counters = self.memory_counters()
        if counters is None:
            return MemoryUse()
        peak = counters.get("peak_bytes_used", 0)
        is_seen = peak > PEAKS.get(self.device, 0)
        return MemoryUse(counters["bytes_used"] / GIB, peak / GIB if is_seen else None)

    def reset_peak_memory(self) -> None:
        """See `Backend`."""
        if self.is_host():
            HOST.reset_peak_memory()
        else:
            PEAKS[self.device] = (self.memory_counters() or {}).get("peak_bytes_used", 0)

    def memory_gib(self) -> float | None:
        """See `Backend`."""
        if self.is_host():
            return HOST.memory_gib()
        counters = self.memory_counters()
        return None if counters is None else counters["bytes_limit"] / GIB

    def limit_memory(self, gib: float) -> AbstractContextManager[float]:
        """See `Backend`; XLA has no limit, and its compiler would crash at a process limit.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"memory_limit={gib:.4g}GiB, but no limit can be set on {self.name()}, nor a search "
            "stay within it there; ask what fits with --plan, such as --plan v6e --memory-limit "
            "16GiB"
        )

    def overcommits(self) -> bool:
        """See `Backend`."""
        return self.is_host()

    def step_end(self) -> None:
        """See `Backend`; the host does not wait for the results."""
        import torch_xla

        torch_xla.sync()

    def step_results(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Backend`: one graph, including views, which `step_end` leaves out; waits."""
        found = self._on_host([_replicated(tensor) for tensor in tensors.values()])
        pairs = zip(tensors.items(), found, strict=True)
        return {name: host.view(tensor.shape) for (name, tensor), host in pairs}

    def read(self, tensors: Sequence[Tensor]) -> list[float | int | bool]:
        """See `Backend`: one transfer for all."""
        return [tensor.item() for tensor in self._on_host(tensors)]

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Backend`; waits for the device."""
        return self._on_host([tensor])[0]

    def copied_to_host(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Copying]:
        """See `Backend`; the copies are complete when it returns."""
        self.step_end()
        ours = [name for name, tensor in tensors.items() if tensor.device.type == "xla"]
        copies = {name: tensor.clone() for name, tensor in tensors.items() if name not in set(ours)}
        copies |= zip(ours, self._on_host([tensors[name] for name in ours]), strict=True)
        return {name: copies[name] for name in tensors}, Copying([])

    def _on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        import torch_xla

        groups = _replicated_groups([tensor.detach() for tensor in tensors])
        found = (host for group in groups for host in torch_xla._XLAC._xla_get_cpu_tensors(group))
        return [host.view(tensor.shape) for host, tensor in zip(found, tensors, strict=True)]

    def mark(self, after: Tensor | None = None) -> "Future[float]":
        """See `Backend`; a thread waits for `after`, which no later step may overwrite."""
        if after is not None:
            return _WAITER.submit(_time_of, after)
        self.synchronize()
        now: Future[float] = Future()
        now.set_result(time.perf_counter())
        return now

    def seconds_between(self, first: "Future[float]", last: "Future[float]") -> float:
        """See `Backend`."""
        return last.result() - first.result()

    def synchronize(self) -> None:
        """See `Backend`."""
        synchronize()

    def name(self) -> str:
        """See `Backend`: such as `xla TPU v6 lite` or `xla cpu`."""
        from torch_xla import runtime

        kind = runtime.device_type().lower()
        return f"xla {tpu_name() or kind}" if kind == "tpu" else f"xla {kind}"


KIND = XlaBackend
"""The class of these devices, for the group `qat.devices`."""


def _time_of(computed: Tensor) -> float:
    import torch_xla

    torch_xla._XLAC._xla_get_cpu_tensors([computed.detach()])
    return time.perf_counter()


_WAITER = ThreadPoolExecutor(1, "qat-xla-mark")  # one: marks end in the order of the steps


def _is_sharded(tensor: Tensor) -> bool:
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor).startswith("{devices")


def _replicated(tensor: Tensor) -> Tensor:
    """Return a view with a new first dimension, replicated on every device.

    Copying a sharded tensor to the host directly would compile a graph per tensor, every time.
    """
    from torch_xla.distributed import spmd

    mesh = spmd.get_global_mesh()
    if mesh is None:
        return tensor
    # a view, because a tensor that is marked already cannot be marked differently
    return spmd.mark_sharding_with_gradients(tensor[None], mesh, (None,) * (tensor.dim() + 1))


def _replicated_groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, with sharded ones replicated, `GATHERED_BYTES` at a time."""
    group: list[Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.nbytes if _is_sharded(tensor) else 0
        if group and size and held + size > GATHERED_BYTES:
            yield group
            group, held = [], 0
        group.append(_replicated(tensor) if size else tensor)
        held += size
    if group:
        yield group
