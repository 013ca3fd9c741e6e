"""As many threads as the process has cores; libtpu asks nobody where no TPU is."""

import os
from pathlib import Path

import pytest
from cli_case import call

from qat import process
from qat.backend import before_torch
from qat.backend.before_torch import keep_to_own_cores

AUTOLOAD, ASKING = "TORCH_DEVICE_BACKEND_AUTOLOAD", "TPU_SKIP_MDS_QUERY"


def put(bus: Path, slot: str, vendor: str, device: str) -> None:
    (bus / slot).mkdir()
    (bus / slot / "vendor").write_text(f"{vendor}\n")
    (bus / slot / "device").write_text(f"{device}\n")


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PCI bus of this machine, with a network card that Google made."""
    monkeypatch.setattr(before_torch, "PCI", tmp_path)
    for name in (AUTOLOAD, ASKING, "PJRT_DEVICE"):
        monkeypatch.setenv(name, "set, so that it is put back")
        monkeypatch.delenv(name)
    put(tmp_path, "0", "0x1ae0", "0x0042")
    return tmp_path


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """From now on these packages are the ones installed, beside torch."""
    monkeypatch.setattr(before_torch, "find_spec", lambda name: name in names or None)


def variables() -> tuple[str | None, str | None]:
    """What `before_torch` says to torch, and to libtpu."""
    before_torch.before_torch()
    return os.environ.get(AUTOLOAD), os.environ.get(ASKING)


def test_a_tpu_is_told_from_google_s_other_devices(bus: Path) -> None:
    assert before_torch.tpu_name() is None
    put(bus, "1", "0x10de", "0x006f")
    assert before_torch.tpu_name() is None
    put(bus, "2", "0x1ae0", "0x006f")
    assert before_torch.tpu_name() == "TPU v6 lite"


def test_nothing_is_set_where_neither_is_installed(bus: Path, monkeypatch) -> None:
    install(monkeypatch)
    assert variables() == (None, None)


def test_torch_xla_may_ask_where_a_tpu_is(bus: Path, monkeypatch) -> None:
    put(bus, "1", "0x1ae0", "0x0063")
    install(monkeypatch, "torch_xla")
    assert variables() == (None, None)


def test_torch_tpu_does_not_load_and_libtpu_asks_nobody(bus: Path, monkeypatch) -> None:
    install(monkeypatch, "torch_tpu", "libtpu")
    assert variables() == ("0", "1")


def test_torch_xla_loads_without_a_tpu_too_but_asks_nobody(bus: Path, monkeypatch) -> None:
    install(monkeypatch, "torch_xla")
    assert variables() == (None, "1")


def test_the_command_looks_first(monkeypatch, capsys) -> None:
    looks: list[bool] = []
    monkeypatch.setattr("qat.cli.before_torch", lambda: looks.append(True))
    assert call(monkeypatch, "--version") == 0
    assert looks == [True]


def test_a_machine_that_is_said_to_have_a_tpu_may_ask(bus: Path, monkeypatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    install(monkeypatch, "torch_tpu", "libtpu")
    assert variables() == ("0", None)


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


def test_the_command_keeps_to_them_before_torch_is_loaded(monkeypatch) -> None:
    from cli_case import call

    looks: list[bool] = []
    monkeypatch.setattr("qat.cli.keep_to_own_cores", lambda: looks.append(True))
    assert call(monkeypatch, "--version") == 0
    assert looks == [True]
