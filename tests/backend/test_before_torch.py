"""The set-up before torch is imported: threads as the process has cores, and no TPU look-up."""

import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_case import call

from qat import process
from qat.backend import before_torch, tpu
from qat.backend.before_torch import keep_to_own_cores
from qat.backend.device import select

AUTOLOAD, ASKING = "TORCH_DEVICE_BACKEND_AUTOLOAD", "TPU_SKIP_MDS_QUERY"


def put(bus: Path, slot: str, vendor: str, device: str) -> None:
    (bus / slot).mkdir()
    (bus / slot / "vendor").write_text(f"{vendor}\n")
    (bus / slot / "device").write_text(f"{device}\n")


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PCI bus of this machine, with a network card that Google made."""
    monkeypatch.setattr(tpu, "PCI", tmp_path)
    for name in (AUTOLOAD, ASKING, "PJRT_DEVICE"):
        monkeypatch.setenv(name, "set, so that it is put back")
        monkeypatch.delenv(name)
    put(tmp_path, "0", "0x1ae0", "0x0042")
    return tmp_path


def test_a_tpu_is_told_from_google_s_other_devices(bus: Path) -> None:
    assert tpu.tpu_name() is None
    put(bus, "1", "0x10de", "0x006f")
    assert tpu.tpu_name() is None
    put(bus, "2", "0x1ae0", "0x006f")
    assert tpu.tpu_name() == "TPU v6 lite"


@pytest.mark.parametrize(
    ("installed", "machine_has", "told"),
    [
        ((), None, (None, None)),
        (("torch_xla",), "chip", (None, None)),
        (("torch_xla",), None, (None, "1")),
        (("torch_tpu", "libtpu"), None, ("0", "1")),
        (("torch_tpu", "libtpu"), "PJRT_DEVICE", ("0", None)),
    ],
)
def test_torch_tpu_does_not_load_and_libtpu_asks_only_where_a_tpu_is(
    bus: Path, monkeypatch, installed: tuple, machine_has: str | None, told: tuple
) -> None:
    monkeypatch.setattr(before_torch, "find_spec", lambda name: name in installed or None)
    if machine_has == "chip":
        put(bus, "1", "0x1ae0", "0x0063")
    elif machine_has is not None:
        monkeypatch.setenv(machine_has, "TPU")
    before_torch.before_torch()
    assert (os.environ.get(AUTOLOAD), os.environ.get(ASKING)) == told


def test_the_command_looks_before_torch_is_loaded(monkeypatch, capsys) -> None:
    looks: list[str] = []
    names = ["before_torch", "collect_rarely", "keep_bytecode", "keep_to_own_cores"]
    for name in names:
        monkeypatch.setattr(f"qat.cli.{name}", lambda name=name: looks.append(name))
    assert call(monkeypatch, "--version") == 0
    assert sorted(looks) == names


@pytest.mark.parametrize("has_third", [True, False])  # Python 3.14 has two thresholds
def test_what_was_imported_is_no_garbage(monkeypatch, has_third: bool) -> None:
    monkeypatch.setattr(process.gc, "freeze", lambda: frozen.append(gc.get_threshold()))
    read = gc.get_threshold
    if not has_third:
        monkeypatch.setattr(process.gc, "get_threshold", lambda: (*read()[:2], 0))
    usual, frozen = gc.get_threshold(), []
    monkeypatch.setattr(process, "USUAL", usual)
    select("cpu")
    assert not frozen
    process.collect_rarely()
    assert gc.get_threshold()[:2] == process.RARE[:2]
    select("cpu")
    assert len(frozen) == 1 and gc.get_threshold() == usual


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("is_told", "home"), [(False, "own"), *((True, h) for h in ("own", "other's", "none", "full"))]
)
def test_bytecode_is_kept_where_python_would_keep_none(
    tmp_path: Path, monkeypatch, is_told: bool, home: str, is_compiled: bool
) -> None:
    cached = tmp_path / "torch" / "__pycache__" / "torch.pyc"
    cached.parent.mkdir(parents=True)
    if is_compiled:
        cached.touch()
    spec = SimpleNamespace(cached=str(cached))
    monkeypatch.setattr(before_torch, "find_spec", lambda _: spec)
    if home == "other's":
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if home == "none":
        (tmp_path / ".cache").touch()
    if home == "full":
        monkeypatch.setattr(before_torch, "ROOM_BYTES", 2**80)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "set, so that it is put back")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", is_told)
    before_torch.keep_bytecode()
    place = f"{tmp_path}/.cache/qat/bytecode"
    is_ours = is_told and not is_compiled and home == "own"
    assert sys.pycache_prefix == (place if is_ours else None)
    assert sys.dont_write_bytecode is (is_told and not is_ours)
    assert (os.environ["PYTHONPYCACHEPREFIX"] == place) is is_ours
    assert ("PYTHONDONTWRITEBYTECODE" in os.environ) is not is_ours


THREADS, WAITING = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
SHARES = {
    "no limit": ({"cpu.max": "max 100000\n"}, 8),
    "a share": ({"cpu.max": "400000 100000\n"}, 4),
    "a share and a part": ({"cpu.max": "250000 100000\n"}, 3),
    "less than one": ({"cpu.max": "50000 100000\n"}, 1),
    "more than pinned": ({"cpu.max": "1600000 100000\n"}, 8),
    "version 1": ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    "version 1, none": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    "no cgroups": ({}, 8),
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of 64 cores, on eight of which this process may run."""
    monkeypatch.setattr(process, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in (THREADS, WAITING):
        monkeypatch.setenv(name, "set, so that it is put back")
        monkeypatch.delenv(name)
    return tmp_path


def write(files: dict[str, str], cgroup: Path) -> None:
    for name, text in files.items():
        (cgroup / name).parent.mkdir(exist_ok=True)
        (cgroup / name).write_text(text)


@pytest.mark.parametrize("name", SHARES)
def test_cores_are_those_of_the_container(machine: Path, name: str) -> None:
    files, expected = SHARES[name]
    write(files, machine)
    assert process.cores() == expected
    keep_to_own_cores()
    assert os.environ[THREADS] == str(expected)
    assert os.environ[WAITING] == "passive"


STAT = "anon 1\ninactive_file 536870912\ntotal_inactive_file 1073741824\n"
LEFT_GIB = {
    "no limit": ({"memory.max": "max\n"}, 64.0),
    "a limit": (
        {"memory.max": f"{8 * 2**30}\n", "memory.current": f"{3 * 2**30}", "memory.stat": STAT},
        5.5,
    ),
    "version 1": (
        {
            "memory/memory.limit_in_bytes": f"{8 * 2**30}\n",
            "memory/memory.usage_in_bytes": f"{3 * 2**30}\n",
            "memory/memory.stat": STAT,
        },
        6.0,
    ),
    "no cgroups": ({}, 64.0),
}


@pytest.mark.parametrize("name", LEFT_GIB)
def test_memory_is_what_the_container_has_left(machine: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(process, "MEMINFO", machine / "meminfo")
    assert process.available_gib() is None
    files, expected = LEFT_GIB[name]
    write({"meminfo": f"MemAvailable: {64 * 2**20} kB\n", **files}, machine)
    assert process.available_gib() == expected


def test_a_system_without_pinning_has_all_cores(machine: Path, monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert process.cores() == 64
    keep_to_own_cores()
    assert THREADS not in os.environ


def test_what_somebody_set_stays(machine: Path, monkeypatch) -> None:
    monkeypatch.setenv(THREADS, "5")
    monkeypatch.setenv(WAITING, "active")
    keep_to_own_cores()
    assert os.environ[THREADS] == "5"
    assert os.environ[WAITING] == "active"
