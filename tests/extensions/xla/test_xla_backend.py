"""The XLA backend on versions, dtypes, lengths, memory and graphs, without torch_xla."""

import logging
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from qat.backend.base import GIB, MemoryUse
from qat.errors import ConfigError
from qat.extensions.xla import backend as backend_xla
from qat.extensions.xla import compiling
from qat.extensions.xla.backend import XlaBackend
from qat.extensions.xla.compiling import CompileLog, Graphs
from qat.models.devices import device_called


def test_xla_that_is_not_there_or_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    backend_xla.open_backend.cache_clear()
    monkeypatch.setattr(backend_xla, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"torch_xla is not installed; .*\[xla\]"):
        backend_xla.open_backend()
    monkeypatch.setattr(backend_xla, "is_installed", lambda _: True)
    monkeypatch.setattr(backend_xla, "version", lambda _: "1.9.0")
    expected = rf"torch_xla 1.9.0 is not made for torch {re.escape(torch.__version__)}"
    with pytest.raises(ConfigError, match=expected):
        backend_xla.open_backend()


@pytest.mark.parametrize(
    ("kind", "called", "known"), [("TPU", "xla TPU v6 lite", "TPU-v6e"), ("CPU", "xla cpu", None)]
)
def test_xla_says_on_which_tpu(monkeypatch, kind: str, called: str, known: str | None) -> None:
    runtime = SimpleNamespace(device_type=lambda: kind)
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(backend_xla, "tpu_name", lambda: "TPU v6 lite")
    name = backend_xla.XlaBackend(torch.device("xla")).name()
    assert name == called
    assert getattr(device_called(name), "name", None) == known  # whose peak is known


@pytest.mark.parametrize("name", ["fp16", "tf32"])
def test_xla_refuses_dtypes_that_it_lacks(name: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype={name}, but XLA devices have no such units"):
        backend_xla.XlaBackend(torch.device("xla")).dtype(name)


def test_rows_are_filled_up_to_few_lengths() -> None:
    xla = XlaBackend(torch.device("cpu"))
    found = {xla.tracing.filled_length(length) for length in range(1, 4097)}
    assert sorted(found) == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert all(xla.tracing.filled_length(length) >= length for length in range(1, 4097))


class Chip(XlaBackend):
    """A device that says what a test lets it."""

    SAYS = {"bytes_used": GIB, "peak_bytes_used": 2 * GIB, "bytes_limit": 16 * GIB}

    def memory_counters(self) -> dict[str, int] | None:
        return self.SAYS

    def is_host(self) -> bool:
        return False

    def name(self) -> str:
        return "xla tpu"


def test_a_runtime_tells_of_memory_and_of_no_lower_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip(torch.device("meta"))
    assert (chip.memory_use(), chip.memory_gib()) == (MemoryUse(held_gib=1.0, peak_gib=2.0), 16.0)
    chip.reset_peak_memory()
    assert chip.memory_use().peak_gib is None and not chip.overcommits()
    monkeypatch.setattr(Chip, "SAYS", Chip.SAYS | {"peak_bytes_used": 3 * GIB})
    assert chip.memory_use().peak_gib == 3.0
    with pytest.raises(ConfigError, match="memory_limit=8GiB, but no limit can be set on xla tpu"):
        chip.limit_memory(8)
    monkeypatch.setattr(Chip, "SAYS", None)
    assert (chip.memory_use(), chip.memory_gib()) == (MemoryUse(), None)


def test_a_long_graph_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    now, graphs = 0.0, Graphs(1, 1)
    compile_log = CompileLog(lambda: graphs, lambda: now)
    course = {0: (1, 1), 1: (2, 1), 12: (2, 1), 20: (2, 1), 50: (2, 1), 60: (2, 2), 65: (3, 2)}
    with caplog.at_level(logging.INFO):
        for now, (begun, done) in course.items():
            graphs = Graphs(begun, done)
            with compile_log.about("the training step" if now < 60 else "an evaluation"):
                compile_log.poll()
    assert caplog.messages == [
        "compiling the training step: 11 s so far (graph 2)",
        "compiling the training step: 49 s so far (graph 2)",
        "compiled the training step in 59 s",
    ]


def test_it_looks_from_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "POLL_S", 1e-3)
    compile_log, polls = CompileLog(lambda: Graphs(0, 0)), []
    monkeypatch.setattr(compile_log, "poll", lambda: polls.append(1))
    with compile_log.running():
        while len(polls) < 2:
            pass
    seen = len(polls)
    assert polls[seen:] == []
