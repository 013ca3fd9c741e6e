"""A sample of what `fuzz_legacy.py` runs thousands of, and whether it notices what is wrong."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from qat.errors import CheckpointError


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "speedrun"))
    import fuzz_legacy

    yield fuzz_legacy
    for name in ("fuzz_legacy", "legacy_mutants"):
        sys.modules.pop(name)


@pytest.mark.slow
def test_a_hundred_mutants(script: ModuleType, tmp_path: Path) -> None:
    outcomes = script.fuzz(tmp_path, range(100))
    assert sum(outcomes.values()) == 100
    assert {outcome for _, outcome in outcomes} == {"imported", "refused"}


def test_it_notices(script: ModuleType, tmp_path: Path, monkeypatch) -> None:
    def leave_something(mutant: object, source: Path, base: Path, out: Path) -> None:
        out.mkdir()
        raise CheckpointError("x, expected y")

    monkeypatch.setattr(script, "take", leave_something)
    outcomes = script.fuzz(tmp_path, range(1))
    assert [outcome for _, outcome in outcomes] == ["WRONG: seed 0: refused, yet something is left"]
