"""A sample of the forged inputs, and that what believes one would be noticed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from qat.data import remote
from qat.errors import HubError
from qat.hub import web


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "speedrun"))
    for owner, names in ((web, ("PAUSE_S", "TIMEOUT_S", "PATIENCE_S")), (remote, ("STREAMS",))):
        for name in names:  # which the sources change
            monkeypatch.setattr(owner, name, getattr(owner, name))
    before = {*sys.modules}
    import measure_forged

    yield measure_forged
    for name in {*sys.modules} - before:
        if name.startswith(("forged_", "measure_", "fuzz", "kill_case")):
            sys.modules.pop(name)


@pytest.mark.parametrize(("source", "count"), [("answers", 8), ("archives", 20), ("caches", 20)])
def test_a_sample_is_refused(source: str, count: int, script: ModuleType) -> None:
    outcomes = script.attack(source, range(count))
    assert outcomes.total() == count
    assert [end for _, end in outcomes if end.startswith("WRONG")] == []
    assert "refused" in {end for _, end in outcomes}


def test_what_believes_is_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> str:
        raise HubError("forged, expected nothing of the kind")

    def of_two_lines() -> str:
        raise HubError("forged\nexpected nothing of the kind")

    def outside() -> str:
        place.with_name("other").touch()
        return "harmless"

    def hangs() -> str:
        while True:
            pass

    acts = [refuses, of_two_lines, outside, hangs, lambda: 1 / 0, lambda: "WRONG: believed"]
    place = None

    @contextmanager
    def opened(work: Path) -> Iterator[object]:
        nonlocal place
        place = work
        yield lambda seed: script.Forged("kind", acts[seed])

    monkeypatch.setattr(script, "TIME_S", 0.02)
    monkeypatch.setitem(script.SOURCES, "mine", opened)
    ends = [next(iter(script.attack("mine", [seed])))[1] for seed in range(len(acts))]
    assert ends[0] == "refused"
    expected = ["several lines", "outside; harmless", "TookTooLong", "ZeroDivision", "believed"]
    for end, words in zip(ends[1:], expected, strict=True):
        assert end.startswith("WRONG: seed ") and words in end
