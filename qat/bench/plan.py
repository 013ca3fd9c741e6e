"""What other devices would do, predicted from one measured run; never measured.

Memory: `largest = (memory - RESERVED_GIB - fixed) / per_sequence` of the fitted memory model.
Time: a token's time is split into its matmuls, `flops / measured matmul rate`, and the rest, which
is taken to be bound by memory traffic. The first scales with the peak of the device's own
dtype, the second with its bandwidth; both peaks count for what the measuring device reached of
its own (or `TYPICAL_SHARE` where that one is not in the table).
"""

from dataclasses import dataclass

from qat.bench.find_max import MemoryModel
from qat.bench.measure import Roofline
from qat.models.cost import Device

RESERVED_GIB = 0.8
"""Memory that a driver's context and libraries take."""
TYPICAL_SHARE = 0.8
"""Of a data sheet's peak, in a large matmul or copy."""


@dataclass(frozen=True)
class Prediction:
    """PREDICTED numbers of one device."""

    device: str
    dtype: str
    max_batch: int | None
    """None where no memory model was measured."""
    peak_gib: float | None
    """At that batch, what the driver takes included."""
    tokens_per_s: float


@dataclass(frozen=True)
class Measured:
    """The run that predictions rest on."""

    device: Device | None
    roofline: Roofline
    flops_per_token: float
    tokens_per_s: float
    memory: MemoryModel | None

    @property
    def matmul_s(self) -> float:
        """Seconds of a token's time that its matmuls take, at most all of it."""
        return min(self.flops_per_token / self.roofline.matmul_flops, 1 / self.tokens_per_s)

    @property
    def rest_s(self) -> float:
        """The rest of a token's time."""
        return 1 / self.tokens_per_s - self.matmul_s


def predict(measured: Measured, device: Device) -> Prediction:
    """What `device` would do at the same settings in its own best dtype."""
    own, roofline = measured.device, measured.roofline
    matmul_share = copy_share = TYPICAL_SHARE
    if own is not None:
        copy_share = roofline.copy_bytes / own.bandwidth
        if roofline.sheet_flops is not None:
            matmul_share = roofline.matmul_flops / roofline.sheet_flops
    matmul_flops = matmul_share * device.peak_flops(device.dtype)
    copy_bytes = copy_share * device.bandwidth
    matmul_s = measured.matmul_s * roofline.matmul_flops / matmul_flops
    rest_s = measured.rest_s * roofline.copy_bytes / copy_bytes
    largest = peak_gib = None
    if measured.memory is not None:
        largest = measured.memory.largest(device.memory_gib - RESERVED_GIB)
        peak_gib = RESERVED_GIB + measured.memory.peak_gib(largest)
    return Prediction(device.name, device.dtype, largest, peak_gib, 1 / (matmul_s + rest_s))
