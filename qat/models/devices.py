"""Peak rates of devices, from their makers' data sheets.

Dense peaks without sparsity, boost clock; FLOP/s are those with float32 accumulation, in which
training computes: GeForce boards run fp16 and bf16 with it at half their fp16-accumulation rate,
professional boards of the same chips at the full rate. Memory is the size that a driver reports,
a little less than the advertised one.

Sources: NVIDIA data sheets of V100 (2020), T4, L4, L40S, A10, A40, A100 (2021), H100 (SXM5 and
PCIe), H200, HGX B200, RTX A6000; NVIDIA white papers GA102, Ada (also of RTX 6000) and RTX
Blackwell (also of RTX PRO 6000), appendix tables; AMD's data sheet of Instinct MI300X; Google
Cloud's documentation of TPU v4, v5e, v5p and v6e. A dash there is None here: no native units.
"""

from dataclasses import dataclass

from qat.errors import ConfigError, nearest

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """Peak rates of one kind of device."""

    name: str
    marks: tuple[str, ...]
    """Lower-case words that must all be in its reported name."""
    memory_gib: float
    peak_tflops: dict[str, float | None]
    """Dense peak of fp32, tf32, bf16 and fp16 matmuls; None if not native."""
    bandwidth_gb_s: float
    dtype: str
    """The dtype to train in."""

    def peak_flops(self, dtype: str) -> float | None:
        """Return peak FLOP/s in `dtype` (fp32, tf32, bf16, fp16), or None if it is not native."""
        tera = self.peak_tflops.get(dtype)
        return None if tera is None else tera * TERA

    @property
    def bandwidth(self) -> float:
        """Peak memory bandwidth in bytes per second."""
        return self.bandwidth_gb_s * GIGA


def _peaks(fp32: float | None, tf32: float | None, bf16: float | None, fp16: float | None) -> dict:
    return {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}


DEVICES = (
    Device("T4", ("tesla t4",), 14.6, _peaks(8.1, None, None, 65), 320, "fp16"),
    Device("L4", ("nvidia l4",), 22.0, _peaks(30.3, 60, 121, 121), 300, "bf16"),
    Device("A10", ("nvidia a10",), 22.0, _peaks(31.2, 62.5, 125, 125), 600, "bf16"),
    Device("V100-PCIe", ("v100", "pcie"), 15.7, _peaks(14, None, None, 112), 900, "fp16"),
    Device("V100-16", ("v100", "16gb"), 15.7, _peaks(15.7, None, None, 125), 900, "fp16"),
    Device("V100-32", ("v100", "32gb"), 31.7, _peaks(15.7, None, None, 125), 900, "fp16"),
    Device("A40", ("nvidia a40",), 44.4, _peaks(37.4, 74.8, 149.7, 149.7), 696, "bf16"),
    Device("L40S", ("l40s",), 44.4, _peaks(91.6, 183, 362.05, 362.05), 864, "bf16"),
    Device("A6000", ("rtx a6000",), 47.4, _peaks(38.7, 77.4, 154.8, 154.8), 768, "bf16"),
    Device("RTX6000-Ada", ("rtx 6000 ada",), 47.4, _peaks(91.1, 182.1, 364.2, 364.2), 960, "bf16"),
    Device("RTX6000-PRO", ("rtx pro 6000",), 94.9, _peaks(126, 251.9, 503.8, 503.8), 1792, "bf16"),
    Device("A100-40", ("a100", "40gb"), 39.4, _peaks(19.5, 156, 312, 312), 1555, "bf16"),
    Device("A100-80", ("a100", "80gb"), 79.2, _peaks(19.5, 156, 312, 312), 2039, "bf16"),
    Device("RTX3090", ("rtx 3090",), 23.6, _peaks(35.6, 35.6, 71, 71), 936, "bf16"),
    Device("RTX4090", ("rtx 4090",), 23.5, _peaks(82.6, 82.6, 165.2, 165.2), 1008, "bf16"),
    Device("RTX5090", ("rtx 5090",), 31.4, _peaks(104.8, 104.8, 209.5, 209.5), 1792, "bf16"),
    Device("H100-PCIe", ("h100", "pcie"), 79.1, _peaks(51, 378, 756, 756), 2000, "bf16"),
    Device("H100", ("h100",), 79.1, _peaks(67, 494.7, 989.4, 989.4), 3350, "bf16"),
    Device("H200", ("h200",), 139.8, _peaks(67, 494.7, 989.4, 989.4), 4800, "bf16"),
    Device("B200", ("b200",), 178.4, _peaks(75, 1125, 2250, 2250), 7700, "bf16"),
    Device("MI300X", ("mi300x",), 191.5, _peaks(163.4, 653.7, 1307.4, 1307.4), 5300, "bf16"),
    Device("TPU-v5e", ("tpu v5 lite",), 15.7, _peaks(None, None, 197, None), 819, "bf16"),
    Device("TPU-v4", ("tpu v4",), 31.2, _peaks(None, None, 275, None), 1228, "bf16"),
    Device("TPU-v5p", ("tpu v5p",), 94.7, _peaks(None, None, 459, None), 2765, "bf16"),
    Device("TPU-v6e", ("tpu v6 lite",), 31.2, _peaks(None, None, 918, None), 1640, "bf16"),
)


def device_called(reported: str) -> Device | None:
    """Return the entry for a name as a driver reports it (`NVIDIA H200`), or None if unknown.

    Marks are whole words, so that `NVIDIA A10` does not match `NVIDIA A100`.
    """
    words = f" {reported.lower().replace('-', ' ')} "
    for device in DEVICES:
        if all(f" {mark} " in words for mark in device.marks):
            return device
    return None


def devices_named(names: tuple[str, ...]) -> tuple[Device, ...]:
    """Return the entries called `names` (in any case), or all if `names` is empty.

    Raises:
        ConfigError: a name is not in the table.
    """
    known = {device.name.lower(): device for device in DEVICES}
    for name in names:
        if name.strip().lower() not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"plan={name} is no device of the table; choose among "
                f"{', '.join(device.name for device in DEVICES)}, or compile for v4, v5e, v5p, v6e"
                + (f"; did you mean {known[near[0]].name}?" if near else "")
            )
    return tuple(known[name.strip().lower()] for name in names) or DEVICES
