"""A sample of the archive fuzz, and that the fuzz would notice what it looks for."""

from pathlib import Path
from types import ModuleType

import pytest

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import fuzz_archives

    return fuzz_archives


def test_a_sample_of_mutants(script) -> None:
    with script.workplace() as place:
        outcomes = script.fuzz(place, range(154))
    assert sum(outcomes.values()) == 154
    assert [outcome for _, outcome in outcomes if outcome.startswith("WRONG")] == []
    assert {kind for kind, _ in outcomes} == set(script.make.__globals__["KINDS"])


@pytest.mark.parametrize("fault", ["raises", "writes beside", "leaves half", "hangs", "loses"])
def test_every_fault_is_noticed(fault: str, script, monkeypatch) -> None:
    def unpack(archive: Path, out: Path, **limits: object) -> None:
        if not limits:  # the honest archive
            return honest(archive, out)
        if fault == "raises":
            raise ValueError
        if fault == "hangs":
            while True:
                pass
        if fault == "writes beside":
            (out.parent / "other").write_text("")
        out.mkdir()
        (out / "half").write_text("")
        if fault == "leaves half":
            raise script.QatError("refused")
        return None

    honest = script.unpack
    monkeypatch.setattr(script, "unpack", unpack)
    monkeypatch.setattr(script, "TIME_S", 0.02)
    with script.workplace() as place:
        outcomes = script.fuzz(place, range(3, 4))
    (outcome,) = [outcome for _, outcome in outcomes]
    assert outcome.startswith("WRONG: seed 3")
