"""Selection of the backend of a device; the only place that distinguishes kinds of device.

A device that torch does not know is one of an extension (`qat.devices` in `qat/hooks.py`).
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from qat.backend import nvidia
from qat.backend.base import Backend, launched
from qat.backend.cpu import CpuBackend, MpsBackend
from qat.backend.cuda import CudaBackend
from qat.backend.tpu import tpu_name
from qat.errors import ConfigError
from qat.hooks import extension, hooks
from qat.process import collect_as_usual

logger = logging.getLogger(__name__)

KINDS: dict[str, type[Backend]] = {
    "cpu": CpuBackend,
    "cuda": CudaBackend,
    "mps": MpsBackend,
}
"""Backend classes by torch's device type."""


def select(device: str = "auto") -> Backend:
    """Return the backend of `device` (`auto`, `cpu`, `cuda`, `cuda:1`, `mps`, `xla`).

    Under a launcher, `cuda` means the GPU with this process's local rank.

    Raises:
        ConfigError: the device does not exist here.
    """
    collect_as_usual()  # a verb that computes has imported what it needs
    if device == "auto":
        device = "cuda" if _has_cuda() else "cpu"
        if device == "cpu" and launched().rank == 0:
            _warn_of_idle_gpu()
    kind, _, index = device.partition(":")
    if kind not in KINDS and device in {"xla", *hooks("qat.devices")}:
        return extension("qat.devices", device).open_backend()
    if device == "cuda" and launched().world > 1:
        index = str(launched().local_rank)
        device = f"cuda:{index}"
    present = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if kind not in present or not (index or "0").isdecimal():
        raise ConfigError(f"device={device} is unknown; use auto, cpu, cuda, cuda:N, mps or xla")
    if int(index or 0) >= present[kind]:
        unused = idle_device() if kind == "cuda" and not present[kind] else None
        if unused is not None:
            raise ConfigError(f"device={device}: {unused}, or use --device cpu")
        raise ConfigError(
            f"device={device}, but {present[kind]} {kind.upper()} devices are visible here; use "
            "--device cpu or one that is there"
        )
    if kind == "cuda" and index:
        torch.cuda.set_device(int(index))  # kernels are launched on the current device
    return on(torch.device(device))


def idle_device() -> str | None:
    """Return why `auto` does not use this machine's accelerator and how to use it, or None."""
    gpu = None if nvidia.hidden() else nvidia.present()
    if gpu is not None and not _has_cuda():
        return nvidia.unused(gpu, torch.__version__, torch.version.cuda, _cuda_error())
    if torch.backends.mps.is_available():
        return "this machine's GPU waits to be asked for; use --device mps"
    if tpu_name() is not None:
        return f"this machine's {tpu_name()} waits to be asked for; use --device xla"
    return None


@cache
def _warn_of_idle_gpu() -> None:
    idle = idle_device()
    if idle is not None:
        logger.warning("the CPU computes: %s, or say --device cpu to silence this line", idle)


def _has_cuda() -> bool:
    """Return whether torch can use a GPU; `idle_device` reports the reason instead of a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA initialization")
        return torch.cuda.is_available()


def _cuda_error() -> str:
    """Return the first line of torch's error at the start of CUDA; empty for builds without it."""
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    except AssertionError:  # a build without CUDA
        pass
    return ""


def on(device: torch.device) -> Backend:
    """Return the backend of a tensor's device."""
    kind = KINDS.get(device.type, Backend)
    if device.type not in KINDS and device.type in hooks("qat.devices"):
        kind = extension("qat.devices", device.type).KIND
    return kind(device)


def devices(name: str) -> tuple[str, ...]:
    """Return the devices to spread work over: all GPUs for `cuda` or `auto`, else `name`."""
    if name == "cuda" or (name == "auto" and _has_cuda()):
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return (name,)


def profile_operators() -> torch.profiler.profile:
    """Return a profiler that records every operator called on the host, with shapes and dtypes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence its messages about start and end
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, record_shapes=True)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the block under `seed`, then restore the previous states of the random generators."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
