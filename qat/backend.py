"""What the rest of the code may ask of a device; no other file names one.

CPU and CUDA are implemented here; MPS works through the same code.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from qat.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Backend:
    """One device and the things that differ between devices."""

    device: torch.device

    def dtype(self, name: str) -> torch.dtype:
        """The compute dtype called `name`; `auto` is bf16 where it is native, else fp32.

        Raises:
            ConfigError: the device cannot really compute in that dtype.
        """
        if name == "auto":
            return torch.bfloat16 if self.has_bf16() else torch.float32
        if name == "bf16" and self.device.type == "cuda" and not self.has_bf16():
            raise ConfigError("dtype=bf16, but this GPU has no bf16 units; use --dtype fp32")
        return DTYPES[name]

    def has_bf16(self) -> bool:
        """Whether bf16 arithmetic is native and worth its name here."""
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (
            8,
            0,
        )

    def autocast(self, dtype: torch.dtype) -> torch.autocast | nullcontext:
        """Mixed precision in `dtype`; nothing for float32."""
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_gib(self) -> float | None:
        """Most device memory held by tensors since the start, or None where nobody counts."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) / 2**30

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that device memory ran out."""
        return isinstance(error, torch.OutOfMemoryError)

    def workers(self) -> int:
        """Threads worth giving work to: one per core on the CPU, one for a device's one queue."""
        return (os.cpu_count() or 1) if self.device.type == "cpu" else 1

    def name(self) -> str:
        """What a record calls this device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def rng_state(self) -> dict[str, Tensor]:
        """The state of every random generator that a step may draw from."""
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `rng_state` gave."""
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def select(device: str = "auto") -> Backend:
    """The backend of `device` (`auto`, `cpu`, `cuda`, `cuda:1`, `mps`).

    Raises:
        ConfigError: the device is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    present = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if kind not in present or not (index or "0").isdecimal():
        raise ConfigError(f"device={device} is unknown; use auto, cpu, cuda, cuda:N or mps")
    if int(index or 0) >= present[kind]:
        raise ConfigError(
            f"device={device}, but {present[kind]} {kind.upper()} devices are visible here; use "
            "--device cpu or one that is there"
        )
    return Backend(torch.device(device))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under `seed` and put the generators back afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
