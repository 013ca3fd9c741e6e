"""What is said of a compiler that a program waits for, and which steps are refused for it."""

import logging
from pathlib import Path

import pytest
import torch

from qat.backend import compiling
from qat.backend.base import GIB, Backend
from qat.backend.compiling import MOST_IN_A_ROW, Graphs, Steadiness, Teller
from qat.backend.device import select
from qat.backend.xla import XlaBackend
from qat.errors import ConfigError


class Compiler(Backend):
    """One that says what a test lets it."""

    def __init__(self, **fallbacks: int) -> None:
        super().__init__(torch.device("cpu"))
        self.__dict__.update(graphs=0, fallbacks=fallbacks)

    def compile_count(self) -> int:
        return self.graphs

    def compile_seconds(self) -> float:
        return 2.0 * self.graphs

    def host_fallbacks(self) -> dict[str, int]:
        return self.fallbacks

    def counts(self) -> dict[str, object]:
        return {"xla_compiles": self.graphs}


def take(steadiness: Steadiness, compiler: Compiler, *graphs: int) -> None:
    for count in graphs:
        with steadiness.step((4, 64)):
            compiler.__dict__["graphs"] += count


def test_steps_that_compile_without_end_are_refused() -> None:
    compiler = Compiler(**{"aten::nonzero": 7})
    steadiness = Steadiness(compiler)
    take(steadiness, compiler, *[1] * MOST_IN_A_ROW, 0, *[1] * MOST_IN_A_ROW)
    with pytest.raises(ConfigError, match="last 5 steps compiled .* 4 x 64 .* aten::nonzero on"):
        take(steadiness, compiler, 1)


def test_graphs_of_steps_are_counted_apart() -> None:
    compiler = Compiler()
    steadiness = Steadiness(compiler)
    take(steadiness, compiler, 1, 1, 0)
    compiler.__dict__["graphs"] += 5  # an evaluation's
    take(steadiness, compiler, 0, 1)
    assert (steadiness.compiled, steadiness.anew) == (3, 1)
    assert steadiness.facts() == {"step_compile_s": 6.0, "xla_compiles": 8}
    steadiness.expect_none()
    assert (steadiness.compiled, steadiness.anew) == (3, 0)
    take(steadiness, compiler, 1)
    assert steadiness.anew == 1


def test_a_long_graph_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    now, graphs = 0.0, Graphs(1, 1)
    teller = Teller(lambda: graphs, lambda: now)
    course = {0: (1, 1), 1: (2, 1), 12: (2, 1), 20: (2, 1), 50: (2, 1), 60: (2, 2), 65: (3, 2)}
    with caplog.at_level(logging.INFO):
        for now, (begun, done) in course.items():
            graphs = Graphs(begun, done)
            with teller.about("the training step" if now < 60 else "an evaluation"):
                teller.look()
    assert caplog.messages == [
        "compiling the training step: 11 s so far (graph 2)",
        "compiling the training step: 49 s so far (graph 2)",
        "compiled the training step in 59 s",
    ]


def test_it_looks_from_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "LOOK_S", 1e-3)
    teller, looks = Teller(lambda: Graphs(0, 0)), []
    monkeypatch.setattr(teller, "look", lambda: looks.append(1))
    with teller.telling():
        while len(looks) < 2:
            pass
    seen = len(looks)
    assert looks[seen:] == []


def test_what_is_compiled_is_kept_by_xla_alone() -> None:
    cpu = select("cpu")
    with pytest.raises(ConfigError, match="xla_cache_dir=kept is for XLA devices, but device=cpu"):
        cpu.session(Path("kept")).__enter__()
    with cpu.session(None), cpu.waiting_for("nothing"):
        assert (cpu.compile_count(), cpu.counts(), cpu.host_fallbacks()) == (0, {}, {})
        assert cpu.filled_length(65) == 65


def test_rows_are_filled_up_to_few_lengths() -> None:
    xla = XlaBackend(torch.device("cpu"))
    found = {xla.filled_length(length) for length in range(1, 4097)}
    assert sorted(found) == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert all(xla.filled_length(length) >= length for length in range(1, 4097))


class Chip(XlaBackend):
    """A device that says what a test lets it."""

    SAYS = {"bytes_used": GIB, "peak_bytes_used": 2 * GIB, "bytes_limit": 16 * GIB}

    def told(self) -> dict[str, int] | None:
        return self.SAYS

    def is_host(self) -> bool:
        return False

    def name(self) -> str:
        return "xla tpu"


def test_a_runtime_tells_of_memory_and_of_no_lower_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip(torch.device("meta"))
    assert (chip.peak_memory_gib(), chip.held_memory_gib(), chip.memory_gib()) == (2.0, 1.0, 16.0)
    chip.reset_peak_memory()
    assert chip.peak_memory_gib() is None and not chip.overcommits()
    monkeypatch.setattr(Chip, "SAYS", Chip.SAYS | {"peak_bytes_used": 3 * GIB})
    assert chip.peak_memory_gib() == 3.0
    with pytest.raises(ConfigError, match="memory_limit=8GiB, but no limit can be set on xla tpu"):
        chip.limit_memory(8)
    monkeypatch.setattr(Chip, "SAYS", None)
    assert (chip.peak_memory_gib(), chip.held_memory_gib(), chip.memory_gib()) == (None,) * 3


@pytest.mark.parametrize("words", ["RESOURCE_EXHAUSTED: hbm", "Out of memory allocating 9 bytes"])
def test_xla_runs_out_of_memory_in_words_of_its_own(words: str) -> None:
    assert select("cpu").is_out_of_memory(RuntimeError(f"Bad StatusOr access: {words}"))
