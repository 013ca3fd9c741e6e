"""No more threads than cores that the process may use, whatever the machine has."""

import os
from pathlib import Path

import pytest

from qat import process
from qat.backend.threads import keep_to_own_cores

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
