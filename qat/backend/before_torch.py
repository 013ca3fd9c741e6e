"""What must be said to torch before it loads; so this module imports none.

How many threads it computes with, and whom libtpu may ask: that loads with torch wherever torch_xla
or torch_tpu is installed, even where there is no TPU.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from qat.process import cores

PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""Who made a device, also network cards and disks."""
CHIPS: Mapping[str, str] = {
    "0x0027": "TPU v2 or v3",
    "0x0056": "TPU v4",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5 lite",
    "0x006f": "TPU v6 lite",
    "0x0076": "TPU v7",
}
"""Which device it is, as torch_xla 2.9 tells TPUs apart, and what drivers call it:
`lite` is what is sold as v5e and v6e."""


def tpu_name() -> str | None:
    """The kind of this machine's TPU; None if its PCI bus has none."""
    for vendor in sorted(PCI.glob("*/vendor")):
        if vendor.read_text().strip() == GOOGLE:
            name = CHIPS.get(vendor.with_name("device").read_text().strip())
            if name is not None:
                return name
    return None


def keep_libtpu_offline() -> None:
    """Let libtpu, when it loads, look for no TPU: no metadata server, no lock on a chip."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # several plans may run beside each other
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def ask_nobody_without_a_tpu() -> None:
    """Let libtpu ask no metadata server, unless this machine has a TPU or is said to have one."""
    if os.environ.get("PJRT_DEVICE") != "TPU" and tpu_name() is None:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def take_one_chip(number: int) -> None:
    """Let libtpu see this host's chip `number` alone, as if nobody had others.

    As `torch_xla._internal.tpu.configure_one_chip_topology` does for the first one.
    """
    os.environ.setdefault("TPU_VISIBLE_CHIPS", str(number))
    os.environ.setdefault("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_PROCESS_BOUNDS", "1,1,1")


def before_torch() -> None:
    """Let libtpu ask nobody without a TPU, and torch_tpu not load, whoever installed it.

    Nothing here uses torch_tpu, another package for TPUs.
    """
    has_eager, has_lazy = (find_spec(name) is not None for name in ("torch_tpu", "torch_xla"))
    if has_eager or has_lazy:  # both load libtpu with torch
        ask_nobody_without_a_tpu()
    if has_eager:  # which ends the process without libtpu, and fails beside many a torch
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def keep_to_own_cores() -> None:
    """Before torch is loaded: as many threads as cores that this process may use, none that spins.

    PyTorch starts one for each core of the machine; in a container that may use a few of them they
    wait for one another. By default a thread that waits spins, on a core that another process may
    need. `OMP_NUM_THREADS` and `OMP_WAIT_POLICY` that somebody set stay.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if cores() < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
