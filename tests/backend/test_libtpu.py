"""libtpu asks nobody where no TPU is, and torch_tpu, which nothing here uses, never loads."""

import os
from pathlib import Path

import pytest
from cli_case import call

from qat.backend import libtpu

AUTOLOAD, ASKING = "TORCH_DEVICE_BACKEND_AUTOLOAD", "TPU_SKIP_MDS_QUERY"


def put(bus: Path, slot: str, vendor: str, device: str) -> None:
    (bus / slot).mkdir()
    (bus / slot / "vendor").write_text(f"{vendor}\n")
    (bus / slot / "device").write_text(f"{device}\n")


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PCI bus of this machine, with a network card that Google made."""
    monkeypatch.setattr(libtpu, "PCI", tmp_path)
    for name in (AUTOLOAD, ASKING, "PJRT_DEVICE"):
        monkeypatch.setenv(name, "set, so that it is put back")
        monkeypatch.delenv(name)
    put(tmp_path, "0", "0x1ae0", "0x0042")
    return tmp_path


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """From now on these packages are the ones installed, beside torch."""
    monkeypatch.setattr(libtpu, "find_spec", lambda name: name in names or None)


def variables() -> tuple[str | None, str | None]:
    """What `before_torch` says to torch, and to libtpu."""
    libtpu.before_torch()
    return os.environ.get(AUTOLOAD), os.environ.get(ASKING)


def test_a_tpu_is_told_from_google_s_other_devices(bus: Path) -> None:
    assert libtpu.tpu_name() is None
    put(bus, "1", "0x10de", "0x006f")
    assert libtpu.tpu_name() is None
    put(bus, "2", "0x1ae0", "0x006f")
    assert libtpu.tpu_name() == "TPU v6 lite"


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
