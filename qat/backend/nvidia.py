"""NVIDIA's GPUs as reported by the driver, and the builds of torch that run on them.

It uses only the standard library, so that `python3 qat/backend/nvidia.py` can choose the build
before anything is installed: it prints the index URL for pip, followed by `torch<2.12` if that
build has been discontinued since; it prints nothing on a machine without such a GPU. A driver too
old for every build is an error. `python3 qat/backend/nvidia.py idle` prints why torch does not use
the GPU.
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
"""The kernel module's version; also readable in a container that was given no GPU."""
SMI_TIMEOUT_S = 30
WHEELS = "https://download.pytorch.org/whl/{}"
"""Address of pip's index for a build, with a place for the build's name."""
UNKNOWN = dict.fromkeys(("gpu_util_pct", "gpu_power_w", "gpu_temp_c"))
"""Health of a GPU without readable sensors."""
Number = tuple[int, ...]


class Gpu(NamedTuple):
    """The driver and GPUs of a machine, which decide which builds of torch run there."""

    driver: str
    """The driver's version, such as 535.104.05."""
    capabilities: tuple[Number, ...] = ()
    """Compute capabilities of the GPUs, such as (9, 0); empty if unknown."""


class Build(NamedTuple):
    """A build of torch offered by PyTorch."""

    name: str
    """Last part of its index's URL."""
    driver: int
    """The oldest driver branch that runs it."""
    oldest: Number
    newest: Number
    """It has kernels for compute capabilities from `oldest` up to, but excluding, `newest`."""
    limit: str = ""
    """Requirement that pins torch to releases with this build, if newer ones lack it."""


BUILDS = (
    Build("cu130", 580, (7, 5), (99,)),
    Build("cu126", 525, (5, 0), (10, 0)),
    Build("cu128", 570, (7, 5), (99,), "torch<2.12"),
)
"""Builds in order of preference; the first that fits is used.

A driver runs every minor version of CUDA 12 from branch 525 on and of CUDA 13 from 580 on (NVIDIA's
CUDA Compatibility, minor version compatibility), but GPUs with capability 10 and up only from 570
on. Architectures are those of the support matrix in RELEASE.md of PyTorch 2.11 to 2.13; 2.12 has no
cu128 any more.
"""


def present() -> Gpu | None:
    """Return the machine's NVIDIA GPUs; None where it has none or this container was given none."""
    rows = _query_smi()
    if rows:
        return Gpu(rows[0][0], tuple(_number(capability) for _, capability in rows))
    if not list(DEVICES.glob("nvidia[0-9]*")) or not VERSION.exists():
        return None
    found = re.search(r"Kernel Module\D*(?:x86_64|aarch64)?\s+(\d+\.[\d.]+)", VERSION.read_text())
    return Gpu(found[1]) if found else None


def _query_smi() -> list[list[str]]:
    """Return driver and compute capability of each GPU from nvidia-smi; empty if it fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    is_whole = all(len(row) == 2 and all(cell[:1].isdigit() for cell in row) for row in rows)
    return rows if answer.returncode == 0 and is_whole else []


def build_for(gpu: Gpu) -> Build | None:
    """Return the build of torch to install for `gpu`; None if its driver is too old for all."""
    driver = _number(gpu.driver)[0]
    for build in BUILDS:
        is_made = all(build.oldest <= found < build.newest for found in gpu.capabilities)
        if driver >= build.driver and is_made:
            return build
    return None


def unused(gpu: Gpu, torch_version: str, cuda: str | None, error: str = "") -> str:
    """Return one line that says why torch does not use this GPU, and how to fix it.

    Args:
        gpu: the machine's driver and GPUs.
        torch_version: torch's own version string.
        cuda: version of CUDA that torch was built for; None for a build without CUDA.
        error: torch's error message, for a build that should run here.
    """
    found = f"an NVIDIA GPU is here (driver {gpu.driver}), but torch {torch_version}"
    if cuda is None:
        reason = "is built without CUDA"
    elif not _has_driver_for(gpu, cuda):
        reason = f"needs driver {_oldest_driver(f'cu{_number(cuda)[0]}')} or newer"
    else:
        return f"{found} cannot use it ({error or 'without a reason'}); see what nvidia-smi says"
    build = build_for(gpu)
    if build is None:
        return f"{found} {reason}; update the driver, to {_oldest_driver('cu')} at least"
    address, wanted = WHEELS.format(build.name), f"'{build.limit}'" if build.limit else "torch"
    python = shlex.quote(sys.executable)
    install = f"{python} -m pip install --force-reinstall {wanted} --index-url {address}"
    return f"{found} {reason}; install a build that this driver runs: {install}"


def hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}


def _has_driver_for(gpu: Gpu, cuda: str) -> bool:
    return _number(gpu.driver)[0] >= _oldest_driver(f"cu{_number(cuda)[0]}")


def _oldest_driver(name: str) -> int:
    """Return the oldest driver branch of builds whose name starts so; 0 if there is none."""
    return min((build.driver for build in BUILDS if build.name.startswith(name)), default=0)


def _number(version: str) -> Number:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def gpu_health(uuid: str) -> dict[str, float | None]:
    """Return load (%), power (W) and temperature (C) of the GPU with this UUID; None where unknown.

    The load covers the driver's last sample period, up to a second. The call takes milliseconds.
    """
    nvml = _management_library()
    if nvml is None:
        return UNKNOWN
    try:
        return _health(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except nvml.NVMLError:
        return UNKNOWN


def gpu_samples() -> list[dict[str, float | None]]:
    """Return health, memory in use (MiB) and clock (MHz) of every GPU; empty where unknown."""
    nvml = _management_library()
    if nvml is None:
        return []

    def sample(index: int) -> dict[str, float | None]:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        return {
            "gpu": index,
            **_health(nvml, gpu),
            # version 2 agrees with nvidia-smi: it excludes memory that the driver reserves
            "gpu_mem_mib": _read_sensor(
                nvml,
                lambda: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used // 2**20,
            ),
            "gpu_clock_mhz": _read_sensor(
                nvml, lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
            ),
        }

    try:
        return [sample(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def _health(nvml: ModuleType, gpu: object) -> dict[str, float | None]:
    """Return load (%), power (W) and temperature (C) of a GPU; None for a missing sensor."""
    return {
        "gpu_util_pct": _read_sensor(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "gpu_power_w": _read_sensor(
            nvml, lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
        ),  # from mW
        "gpu_temp_c": _read_sensor(
            nvml,
            # the only temperature sensor that every GPU has
            lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        ),
    }


@cache
def _management_library() -> ModuleType | None:
    """Return NVIDIA's management library, a part of every driver, initialised; else None."""
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


def _read_sensor(nvml: ModuleType, read: Callable[[], float]) -> float | None:
    """Return a sensor's value; None if the GPU has no such sensor."""
    try:
        return read()
    except nvml.NVMLError:
        return None


def idle_of_torch() -> str | None:
    """Return why this Python's torch does not use the GPU; None if it does or there is no GPU.

    It reads torch's version file and does not import torch, so a shell can call it each time.
    """
    gpu, torch = None if hidden() else present(), find_spec("torch")
    if gpu is None or torch is None or torch.origin is None:
        return None
    version = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    cuda = version["cuda"]
    if version["hip"] is not None or (cuda is not None and _has_driver_for(gpu, cuda)):
        return None
    return unused(gpu, version["__version__"], cuda)


def main() -> None:
    """Print the index and releases of torch for this machine; with `idle`, why a GPU is unused."""
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
