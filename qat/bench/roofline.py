"""How fast this device really is: the rates that every benchmark measures before its cases."""

import math
from dataclasses import dataclass

import torch

from qat.backend.base import DTYPES, Backend
from qat.models.cost import device_called

LARGEST, SHORTEST_S, REPEATS = 8192, 2e-3, 10


@dataclass(frozen=True)
class Roofline:
    """How fast the device is, by its data sheet and by what was measured on the spot."""

    sheet_flops: float | None
    """Peak FLOP/s in the compute dtype, or None for a device outside the table."""
    matmul_flops: float
    """FLOP/s of a large square matmul in the compute dtype."""
    copy_bytes: float
    """Bytes per second read and written by a large copy."""

    def mfu(self, flops_per_s: float) -> dict[str, float | None]:
        """The share of each peak that `flops_per_s` is."""
        sheet = self.sheet_flops
        return {
            "mfu_frac": None if sheet is None else flops_per_s / sheet,
            "mfu_of_matmul_frac": flops_per_s / self.matmul_flops,
        }


def measure_roofline(backend: Backend, dtype: str) -> Roofline:
    """Peaks of the device for the compute dtype called `dtype`."""
    device = device_called(backend.name())
    with backend.matmul_precision(dtype):
        matmul = _measure_matmul(backend, DTYPES[dtype])
    sheet = None if device is None else device.peak_flops(dtype)
    return Roofline(sheet, matmul, _measure_copy(backend))


def _measure_matmul(backend: Backend, dtype: torch.dtype) -> float:
    n, best = 256, math.inf
    while True:
        a, b = (torch.randn(n, n, device=backend.device).to(dtype) for _ in range(2))
        out = a @ b
        best = _fastest(backend, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        if best >= SHORTEST_S or n >= LARGEST:
            return 2 * n**3 / best
        n *= 2


def _measure_copy(backend: Backend) -> float:
    count = 2**20
    while True:
        source = torch.ones(count, device=backend.device)
        target = torch.empty_like(source)
        best = _fastest(backend, lambda t=target, s=source: t.copy_(s))
        if best >= SHORTEST_S or count >= 2**28:
            return 2 * source.nbytes / best
        count *= 4


def _fastest(backend: Backend, run: object) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        times.append(backend.seconds_of(run))
    return min(times)
