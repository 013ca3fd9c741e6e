"""What must hold before libtpu loads, which `import torch` alone can bring about.

torch_tpu loads with torch wherever it is installed. Without libtpu the process then ends at once;
beside a torch that it was not made for, `import torch` fails; and libtpu loads even where there is
no TPU. So this module imports no torch.
"""

import os
from collections.abc import Mapping
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path

from qat.errors import how_to_install

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
"""Which device it is, as torch_xla 2.9 and torch_tpu 0.2 tell TPUs apart, and what drivers call it:
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
    """Let torch_tpu load with torch only where it can, and where there is a TPU for it.

    And whichever package brings libtpu, let that ask nobody without a TPU.
    """
    has_eager, has_lazy = (find_spec(name) is not None for name in ("torch_tpu", "torch_xla"))
    if has_eager or has_lazy:  # both load with torch
        ask_nobody_without_a_tpu()
    if has_eager and (tpu_name() is None or torch_tpu_obstacle() is not None):
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def torch_tpu_obstacle() -> str | None:
    """What keeps torch_tpu from loading here: what was found, what was expected, what to do."""
    if find_spec("torch_tpu") is None:
        return f"torch_tpu is not installed; install it with: {how_to_install('tpu')}"
    ours, theirs = version("torch"), version("torch_tpu")
    wanted = _wanted_torch()
    if not _is_in(ours, wanted):
        return (
            f"torch_tpu {theirs} is not made for torch {ours}, expected torch{wanted}; install "
            f"both, in an environment without torch_xla, with: {how_to_install('tpu')}"
        )
    if find_spec("libtpu") is None:
        return (
            f"torch_tpu {theirs} is installed without libtpu, without which it ends the process; "
            f"install it with: {how_to_install('tpu')}"
        )
    return None


def _wanted_torch() -> str:
    """The versions of torch that torch_tpu names in what it requires, such as `>=2.11,<=2.15`."""
    from packaging.requirements import Requirement

    wanted = map(Requirement, requires("torch_tpu") or ())
    return next((str(each.specifier) for each in wanted if each.name == "torch"), "")


def _is_in(number: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(versions).contains(number, prereleases=True)
