"""torch_tpu, Google's eager `tpu` device, behind the protocol of `Backend`. EXPERIMENTAL.

Written from the documentation and the Python sources of torch_tpu 0.2.0. It never ran on a TPU: its
tests run on a CPU that stands in for one. `qat.backend.xla` is the way whose device code CI runs.

As torch_tpu does by default (its `DEFER_NEVER`), operators are given to the chip one by one and the
host goes on; each is compiled once for its shapes, types and numbers of the host that it is given.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from qat.backend.by_shape import CompiledByShape
from qat.backend.copying import Copying
from qat.backend.device import launched
from qat.backend.libtpu import torch_tpu_obstacle, tpu_name
from qat.backend.memory import GIB
from qat.errors import ConfigError

logger = logging.getLogger(__name__)

FILLED = 64
"""Rows are filled up to a multiple of it."""


@lru_cache(maxsize=1)
def open_backend() -> "TpuBackend":
    """The backend of this process's TPU chip.

    Raises:
        ConfigError: torch_tpu, its libtpu or a TPU is missing, torch is of another release, or
            there are several processes.
    """
    obstacle = torch_tpu_obstacle()
    if obstacle is not None:
        raise ConfigError(f"device=tpu, but {obstacle}")
    world = launched().world
    if world > 1:
        raise ConfigError(
            f"device=tpu, but {world} processes were launched, expected one, which uses one chip; "
            "for several chips use one process with --device xla"
        )
    device = _loaded()
    torch.set_float32_matmul_precision("highest")  # else it would be multiplied as bfloat16
    logger.warning("--device tpu is experimental: written without a TPU, it never ran on one")
    return TpuBackend(device)


def _loaded() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type == "tpu":
        return device
    name = tpu_name()
    if name is None:
        raise ConfigError(
            "device=tpu, but this machine has no TPU on its PCI bus; use --device cpu, or a "
            "machine with a TPU (docs/tpu.md)"
        )
    raise ConfigError(
        f"device=tpu, but torch_tpu did not load with torch beside the {name} that is here; unset "
        "TORCH_DEVICE_BACKEND_AUTOLOAD and PJRT_DEVICE, and see that no other process uses the chip"
    )


def backend_on(device: torch.device) -> "TpuBackend":
    """The backend of a tensor on a TPU."""
    return TpuBackend(device)


@dataclass(frozen=True)
class TpuBackend(CompiledByShape):
    """One TPU chip, to which operators are given one by one. Never ran on one."""

    CALLED: ClassVar[str] = "TPUs"

    def check_optimizer(self, name: str, latent_dtype: str) -> None:
        """See `Backend`: what nobody tried there, and what would compile in each step."""
        if name != "adamw" or latent_dtype != "fp32":
            raise ConfigError(
                f"optimizer={name}, latent_dtype={latent_dtype}, but on TPUs only AdamW over "
                "float32 weights is made so that no step compiles; use --optimizer adamw "
                "--latent-dtype fp32"
            )

    def numbers_compile(self) -> bool:
        """See `Backend`."""
        return True

    def filled_length(self, length: int) -> int:
        """See `Backend`."""
        return -(-length // FILLED) * FILLED

    def to_device(self, tensor: Tensor) -> Tensor:
        """See `Backend`; waits for the copy, as the host may use its memory again."""
        return tensor.to(self.device)

    def read(self, tensors: Sequence[Tensor]) -> list[float | int | bool]:
        """See `Backend`: all copies are under way before the host waits."""
        copies = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
        self.synchronize()
        return [copy.item() for copy in copies]

    def equal(self, a: Tensor, b: Tensor) -> bool:
        """See `Backend`: compared on the host."""
        return torch.equal(a.cpu(), b.cpu())

    def copied_to_host(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Copying]:
        """See `Backend`; the copies are there when it returns."""
        sources = {id(tensor): tensor.detach() for tensor in tensors.values()}
        copies = {key: tensor.to("cpu", copy=True) for key, tensor in sources.items()}
        copied = {name: copies[id(tensor)] for name, tensor in tensors.items()}
        return copied, Copying(torch.device("cpu"), [])

    def finished(self) -> Callable[[], None]:
        """See `Backend`."""
        return self.synchronize

    def synchronize(self) -> None:
        """See `Backend`."""
        torch.accelerator.synchronize()

    def rng_state(self) -> dict[str, Tensor]:
        """See `Backend`."""
        return {"cpu": torch.get_rng_state(), "tpu": _generator().get_state()}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """See `Backend`."""
        torch.set_rng_state(state["cpu"])
        if "tpu" in state:
            _generator().set_state(state["tpu"])

    def name(self) -> str:
        """See `Backend`: such as `TPU v6 lite`."""
        return tpu_name() or "TPU"

    def peak_memory_gib(self) -> float:
        """See `Backend`."""
        return torch.accelerator.max_memory_allocated() / GIB

    def reset_peak_memory(self) -> None:
        """See `Backend`."""
        torch.accelerator.reset_peak_memory_stats()

    def held_memory_gib(self) -> float:
        """See `Backend`."""
        return torch.accelerator.memory_allocated() / GIB

    def memory_gib(self) -> float:
        """See `Backend`."""
        free, _ = torch.accelerator.get_memory_info()
        return free / GIB + self.held_memory_gib()

    @contextmanager
    def limit_memory(self, gib: float) -> Iterator[float]:
        """See `Backend`.

        Raises:
            ConfigError: always; torch_tpu has no such limit.
        """
        raise ConfigError(
            f"memory_limit={gib:.4g}GiB, but torch_tpu cannot limit a TPU's memory; use --device "
            "cpu or cuda, or plan with --plan v6e --memory-limit"
        )
        yield gib

    def compile_count(self) -> int:
        """See `Backend`: operators, each of which its cache did not have."""
        return torch.tpu._get_cache_misses()


def _generator() -> torch.Generator:
    # `torch.tpu.get_rng_state` serves torch alone, and what it tells others to take is not in 2.13
    return torch.tpu.default_generators[torch.accelerator.current_device_index()]
