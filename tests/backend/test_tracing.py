"""Steps of which each compiles anew are refused."""

from pathlib import Path

import pytest

from qat.backend.device import select
from qat.backend.tracing import MOST_IN_A_ROW, CompileWatch, Counts, Tracing
from qat.errors import ConfigError
from qat.process import is_out_of_memory


class Compiler(Tracing):
    """A compiler that reports the counts that a test sets."""

    def __init__(self, **fallbacks: int) -> None:
        self.graphs, self.fallbacks = 0, fallbacks

    def counts(self) -> Counts:
        return Counts(self.graphs, 2.0 * self.graphs, host_fallbacks=self.fallbacks)


def take(watch: CompileWatch, compiler: Compiler, *graphs: int) -> None:
    for count in graphs:
        with watch.step((4, 64)):
            compiler.graphs += count


def test_steps_that_compile_without_end_are_refused() -> None:
    compiler = Compiler(**{"aten::nonzero": 7})
    watch = CompileWatch(compiler)
    take(watch, compiler, *[1] * MOST_IN_A_ROW, 0, *[1] * MOST_IN_A_ROW)
    with pytest.raises(ConfigError, match="last 5 steps compiled .* 4 x 64 .* aten::nonzero on"):
        take(watch, compiler, 1)


def test_graphs_of_steps_are_counted_apart() -> None:
    compiler = Compiler()
    watch = CompileWatch(compiler)
    take(watch, compiler, 1, 1, 0)
    compiler.graphs += 5  # an evaluation's
    take(watch, compiler, 0, 1)
    assert (watch.compiled, watch.anew) == (3, 1)
    facts = watch.facts()
    assert (facts["step_compile_s"], facts["xla_compiles"], facts["host_fallbacks"]) == (6.0, 8, {})
    watch.expect_none()
    assert (watch.compiled, watch.anew) == (3, 0)
    take(watch, compiler, 1)
    assert watch.anew == 1


def test_what_is_compiled_is_kept_by_xla_alone() -> None:
    cpu = select("cpu")
    with pytest.raises(ConfigError, match="xla_cache_dir=kept is for XLA devices, but device=cpu"):
        cpu.session(Path("kept")).__enter__()
    with cpu.session(None), cpu.tracing.compiling("nothing"):
        assert CompileWatch(cpu.tracing).facts() == {}
        assert cpu.tracing.filled_length(65) == 65


@pytest.mark.parametrize("words", ["RESOURCE_EXHAUSTED: hbm", "Out of memory allocating 9 bytes"])
def test_xla_runs_out_of_memory_in_words_of_its_own(words: str) -> None:
    assert is_out_of_memory(RuntimeError(f"Bad StatusOr access: {words}"))
