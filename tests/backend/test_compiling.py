"""Which steps are refused because each compiles anew."""

from pathlib import Path

import pytest
import torch

from qat.backend.base import Backend
from qat.backend.compiling import MOST_IN_A_ROW, Steadiness
from qat.backend.device import select
from qat.errors import ConfigError
from qat.process import is_out_of_memory


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


def test_what_is_compiled_is_kept_by_xla_alone() -> None:
    cpu = select("cpu")
    with pytest.raises(ConfigError, match="xla_cache_dir=kept is for XLA devices, but device=cpu"):
        cpu.session(Path("kept")).__enter__()
    with cpu.session(None), cpu.waiting_for("nothing"):
        assert (cpu.compile_count(), cpu.counts(), cpu.host_fallbacks()) == (0, {}, {})
        assert cpu.filled_length(65) == 65


@pytest.mark.parametrize("words", ["RESOURCE_EXHAUSTED: hbm", "Out of memory allocating 9 bytes"])
def test_xla_runs_out_of_memory_in_words_of_its_own(words: str) -> None:
    assert is_out_of_memory(RuntimeError(f"Bad StatusOr access: {words}"))
