"""What NVIDIA's driver tells of a machine's GPUs, and which builds of torch run there.

Imported or run, it needs the standard library alone, so that `python3 qat/backend/nvidia.py` can
tell the build before anything is installed: it prints the index that pip finds it in, and
`torch<2.12` behind it where that build has ended since; nothing on a machine without such a GPU. A
driver too old for all of them is an error. `python3 qat/backend/nvidia.py idle` says why torch does
not use a GPU.
"""

import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

logger = logging.getLogger(__name__)

DEVICES = Path("/dev")
VERSION = Path("/proc/driver/nvidia/version")
"""What the kernel's module says of itself, also in a container that was given no GPU."""
SMI_TIMEOUT_S = 30
WHEELS = "https://download.pytorch.org/whl/{}"
UNKNOWN = dict.fromkeys(("gpu_util_pct", "gpu_power_w", "gpu_temp_c"))
"""The health of a GPU that tells nothing."""
Number = tuple[int, ...]


class Gpu(NamedTuple):
    """What decides which builds of torch run on a machine."""

    driver: str
    """Its version, such as 535.104.05."""
    capabilities: tuple[Number, ...] = ()
    """Compute capabilities of the GPUs, such as (9, 0); empty where nobody tells."""


class Build(NamedTuple):
    """A build of torch that its makers offer."""

    name: str
    """Part of its index's address."""
    driver: int
    """The oldest branch of the driver that runs it."""
    oldest: Number
    newest: Number
    """Compute capabilities from the first up to the second, which it lacks, have kernels in it."""
    limit: str = ""
    """The releases of torch that it was made of, where newer ones are not."""


BUILDS = (
    Build("cu130", 580, (7, 5), (99,)),
    Build("cu126", 525, (5, 0), (10, 0)),
    Build("cu128", 570, (7, 5), (99,), "torch<2.12"),
)
"""The first that fits is taken. A driver runs every minor version of CUDA 12 from branch 525 on and
of CUDA 13 from 580 on (NVIDIA's CUDA Compatibility, minor version compatibility), but GPUs with
capability 10 and up only from 570 on. Architectures are those of the support matrix in RELEASE.md
of PyTorch 2.11 to 2.13; 2.12 has no cu128 any more."""


def present() -> Gpu | None:
    """The machine's NVIDIA GPUs; None where it has none or this container was given none."""
    told = _ask_smi()
    if told:
        return Gpu(told[0][0], tuple(_number(capability) for _, capability in told))
    if not list(DEVICES.glob("nvidia[0-9]*")) or not VERSION.exists():
        return None
    found = re.search(r"Kernel Module\D*(?:x86_64|aarch64)?\s+(\d+\.[\d.]+)", VERSION.read_text())
    return Gpu(found[1]) if found else None


def _ask_smi() -> list[list[str]]:
    """Driver and compute capability of each GPU as nvidia-smi tells them; empty if it does not."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        asked = subprocess.run(
            query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in asked.stdout.splitlines()]
    is_whole = all(len(row) == 2 and all(cell[:1].isdigit() for cell in row) for row in rows)
    return rows if asked.returncode == 0 and is_whole else []


def build_for(gpu: Gpu) -> Build | None:
    """The build of torch to install for `gpu`; None if its driver is too old for all."""
    driver = _number(gpu.driver)[0]
    for build in BUILDS:
        is_made = all(build.oldest <= found < build.newest for found in gpu.capabilities)
        if driver >= build.driver and is_made:
            return build
    return None


def unused(gpu: Gpu, torch_version: str, cuda: str | None, said: str = "") -> str:
    """Why a torch that sees no GPU does not use this one, and the way out, as one line.

    Args:
        gpu: what the machine has.
        torch_version: as torch calls itself.
        cuda: version of CUDA that torch was built for; None if it was built for none.
        said: torch's own words, for a build that should run here.
    """
    found = f"an NVIDIA GPU is here (driver {gpu.driver}), but torch {torch_version}"
    if cuda is None:
        reason = "is built without CUDA"
    elif not _has_driver_for(gpu, cuda):
        reason = f"needs driver {_oldest_driver(f'cu{_number(cuda)[0]}')} or newer"
    else:
        return f"{found} cannot use it ({said or 'without a reason'}); see what nvidia-smi says"
    build = build_for(gpu)
    if build is None:
        return f"{found} {reason}; update the driver, to {_oldest_driver('cu')} at least"
    address, wanted = WHEELS.format(build.name), f"'{build.limit}'" if build.limit else "torch"
    python = shlex.quote(sys.executable)
    install = f"{python} -m pip install --force-reinstall {wanted} --index-url {address}"
    return f"{found} {reason}; install a build that this driver runs: {install}"


def hidden() -> bool:
    """Whether somebody hides all GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}


def _has_driver_for(gpu: Gpu, cuda: str) -> bool:
    return _number(gpu.driver)[0] >= _oldest_driver(f"cu{_number(cuda)[0]}")


def _oldest_driver(name: str) -> int:
    """The oldest branch that runs a build whose name begins so; 0 if there is none."""
    return min((build.driver for build in BUILDS if build.name.startswith(name)), default=0)


def _number(version: str) -> Number:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def gpu_health(uuid: str) -> dict[str, float | None]:
    """Load (%), power (W) and temperature (C) of the GPU with this UUID; None where nobody tells.

    The load is the share of the driver's last sample, of up to a second. Takes milliseconds.
    """
    nvml = _management_library()
    if nvml is None:
        return UNKNOWN
    try:
        return _health(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except nvml.NVMLError:
        return UNKNOWN


def gpu_samples() -> list[dict[str, float | None]]:
    """Health of every GPU, its memory in use (MiB) and clock (MHz); empty where nobody tells."""
    nvml = _management_library()
    if nvml is None:
        return []

    def sample(index: int) -> dict[str, float | None]:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        return {
            "gpu": index,
            **_health(nvml, gpu),
            # in version 2 as nvidia-smi tells it, without what the driver keeps to itself
            "gpu_mem_mib": _told(
                nvml,
                lambda: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used // 2**20,
            ),
            "gpu_clock_mhz": _told(
                nvml, lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
            ),
        }

    try:
        return [sample(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def _health(nvml: ModuleType, gpu: object) -> dict[str, float | None]:
    """Load (%), power (W) and temperature (C) of a GPU; None for what it does not tell."""
    return {
        "gpu_util_pct": _told(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "gpu_power_w": _told(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),  # of mW
        "gpu_temp_c": _told(
            nvml,
            # the one thermometer that every GPU has
            lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        ),
    }


@cache
def _management_library() -> ModuleType | None:
    """NVIDIA's management library, a part of every driver, begun; None where it cannot be used."""
    try:
        import pynvml
    except ModuleNotFoundError:
        logger.warning(
            "the GPU's load, power and temperature stay unknown: nvidia-ml-py is not installed; "
            "install it with: %s",
            shlex.join([sys.executable, "-m", "pip", "install", "nvidia-ml-py"]),
        )
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _told(nvml: ModuleType, ask: Callable[[], float]) -> float | None:
    """What a GPU answers; None if it has no such sensor."""
    try:
        return ask()
    except nvml.NVMLError:
        return None


def idle_of_torch() -> str | None:
    """Why this Python's torch leaves the GPU that is here alone; None if it does not, or is none.

    It reads the version that torch wrote down and imports nothing, so a shell can ask each time.
    """
    gpu, torch = None if hidden() else present(), find_spec("torch")
    if gpu is None or torch is None or torch.origin is None:
        return None
    told = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    cuda = told["cuda"]
    if told["hip"] is not None or (cuda is not None and _has_driver_for(gpu, cuda)):
        return None
    return unused(gpu, told["__version__"], cuda)


def main() -> None:
    """Print the index and the releases of torch for this machine; with `idle`, what idles here."""
    if sys.argv[1:] == ["idle"]:
        sys.stdout.write(idle_of_torch() or "")
        return
    gpu = present()
    if gpu is None:
        return
    build = build_for(gpu)
    if build is None:
        wanted = f"update it, to {_oldest_driver('cu')} at least"
        sys.exit(f"driver {gpu.driver} is too old for torch; {wanted}")
    sys.stdout.write(f"{WHEELS.format(build.name)} {build.limit}".strip() + "\n")


if __name__ == "__main__":
    main()
