"""A driver and GPUs made up of a directory of devices, a version file and a fake nvidia-smi."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qat.backend import device, nvidia
from qat.backend.base import Launch
from qat.backend.nvidia import Gpu, build_for, present, unused
from qat.errors import ConfigError

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
PIP = f"{sys.executable} -m pip"
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  "
    "(dvs-builder@U22-I3)"
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a GPU: nothing on PATH, no device, no driver."""
    for name in ("dev", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(nvidia, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(nvidia, "VERSION", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device._warn_of_idle_gpu.cache_clear()
    yield tmp_path
    device._warn_of_idle_gpu.cache_clear()


def has_driver(machine: Path, text: str, *, gpus: int = 1) -> None:
    (machine / "version").write_text(text)
    for number in range(gpus):
        (machine / "dev" / f"nvidia{number}").touch()


def has_smi(machine: Path, answer: str, status: int = 0) -> None:
    smi = machine / "bin" / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{answer}\nEND\nexit {status}\n")
    smi.chmod(0o755)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU that is used")
def test_no_gpu_no_word(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert present() is None
    assert device.select("auto").device.type == "cpu"
    assert not caplog.records


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "535.104.05"), (OPEN, "580.65.06")])
def test_the_kernel_tells_the_driver_and_smi_all_gpus(
    machine: Path, text: str, version: str
) -> None:
    has_driver(machine, text, gpus=0)  # a container without the devices
    assert present() is None
    has_driver(machine, text)
    assert present() == Gpu(version)
    has_smi(machine, "570.86.10, 9.0\n570.86.10, 12.0")
    assert present() == Gpu("570.86.10", ((9, 0), (12, 0)))


@pytest.mark.parametrize(
    "answer",
    [
        ("Failed to initialize NVML: Driver/library version mismatch", 18),
        ('Field "compute_cap" is not a valid field to query.', 2),
        ("No devices were found", 0),
        ("", 0),
    ],
)
def test_smi_that_fails_is_not_believed(machine: Path, answer: tuple[str, int]) -> None:
    has_smi(machine, *answer)
    assert present() is None
    has_driver(machine, CLOSED)
    assert present() == Gpu("535.104.05")


BUILDS = [
    (Gpu("580.65.06"), "cu130"),
    (Gpu("610.10", ((9, 0),)), "cu130"),
    (Gpu("580.65.06", ((7, 0),)), "cu126"),  # a V100
    (Gpu("580.65.06", ((7, 0), (9, 0))), "cu126"),
    (Gpu("575.57.08", ((9, 0),)), "cu126"),
    (Gpu("570.86.10", ((12, 0),)), "cu128"),
    (Gpu("535.104.05"), "cu126"),
    (Gpu("525.60.13", ((8, 0),)), "cu126"),
    (Gpu("515.105.01"), None),
]


def test_the_build_that_a_driver_runs() -> None:
    for gpu, build in BUILDS:
        found = build_for(gpu)
        assert (found and found.name) == build, gpu


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            (Gpu("535.104.05"), "2.13.0+cpu", None),
            "an NVIDIA GPU is here (driver 535.104.05), but torch 2.13.0+cpu is built without "
            f"CUDA; install a build that this driver runs: {PIP} install --force-reinstall torch "
            "--index-url https://download.pytorch.org/whl/cu126",
        ),
        (
            (Gpu("535.104.05"), "2.13.0+cu130", "13.0"),
            "but torch 2.13.0+cu130 needs driver 580 or newer; install a build",
        ),
        (
            (Gpu("570.86.10", ((12, 0),)), "2.13.0+cu130", "13.0"),
            "pip install --force-reinstall 'torch<2.12' --index-url",
        ),
        (
            (Gpu("515.105.01"), "2.13.0+cu126", "12.6"),
            "torch 2.13.0+cu126 needs driver 525 or newer; update the driver, to 525 at least",
        ),
        (
            (Gpu("580.65.06"), "2.13.0+cu130", "13.0", "out of memory"),
            "but torch 2.13.0+cu130 cannot use it (out of memory); see what nvidia-smi says",
        ),
    ],
)
def test_the_way_out_is_in_the_line(arguments: tuple, line: str) -> None:
    assert line in unused(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU that is used")
def test_auto_says_once_which_gpu_it_leaves(machine: Path, monkeypatch, caplog) -> None:
    has_driver(machine, CLOSED)
    device.select("cpu")
    assert not caplog.records
    for _ in range(2):
        assert device.select("auto").device.type == "cpu"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the CPU computes: an NVIDIA GPU is here (driver 535.104.05)" in record.message
    assert record.message.endswith("or say --device cpu to silence this line")
    with pytest.raises(ConfigError, match="device=cuda: an NVIDIA GPU is here .* --device cpu"):
        device.select("cuda")


@pytest.mark.parametrize("silenced_by", ["another rank", "CUDA_VISIBLE_DEVICES"])
def test_the_other_ranks_are_silent(machine: Path, monkeypatch, caplog, silenced_by: str) -> None:
    has_driver(machine, CLOSED)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if silenced_by == "another rank":
        monkeypatch.setattr(device, "launched", lambda: Launch(rank=1, world=2))
    else:
        monkeypatch.setenv(silenced_by, "")
    device.select("auto")
    assert not caplog.records


def test_any_python_can_run_the_file_before_an_installation(machine: Path) -> None:
    has_smi(machine, "570.86.10, 12.0")
    command = [sys.executable, "-S", nvidia.__file__]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "https://download.pytorch.org/whl/cu128 torch<2.12\n"
    has_smi(machine, "470.10, 7.5")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == "driver 470.10 is too old for torch; update it, to 525 at least\n"


@pytest.mark.parametrize(
    ("cuda", "driver", "line"),
    [
        ("None", "580.65.06", "but torch 2.13.0 is built without CUDA; install a build"),
        ("'13.0'", "535.104.05", "but torch 2.13.0 needs driver 580 or newer; install a build"),
        ("'12.6'", "535.104.05", ""),
    ],
)
def test_a_shell_asks_what_idles_without_importing_torch(
    cuda: str, driver: str, line: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-S", nvidia.__file__, "idle"]
    has_smi(machine, f"{driver}, 9.0")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
    (machine / "torch").mkdir()
    (machine / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (machine / "torch" / "version.py").write_text(
        f"__version__ = '2.13.0'\ncuda = {cuda}\nhip = None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(machine))
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert line in said and bool(said) == bool(line)
