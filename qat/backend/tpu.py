"""Detection of a TPU by the device ids on the PCI bus, without loading a library."""

from collections.abc import Mapping
from pathlib import Path

PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""PCI vendor id of Google, which also makes network cards and disks."""
CHIPS: Mapping[str, str] = {
    "0x0027": "TPU v2 or v3",
    "0x0056": "TPU v4",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5 lite",
    "0x006f": "TPU v6 lite",
    "0x0076": "TPU v7",
}
"""TPU generation by PCI device id, from torch_xla 2.9, with the drivers' names.

v5e and v6e are called `lite`.
"""


def tpu_name() -> str | None:
    """Return the kind of this machine's TPU; None if its PCI bus has none."""
    for vendor in sorted(PCI.glob("*/vendor")):
        if vendor.read_text().strip() == GOOGLE:
            name = CHIPS.get(vendor.with_name("device").read_text().strip())
            if name is not None:
                return name
    return None
