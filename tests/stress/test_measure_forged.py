"""A sample of the forged inputs."""

import measure_forged
import pytest

from qat.data import remote
from qat.hub import web


@pytest.mark.parametrize(("source", "count"), [("answers", 8), ("archives", 20), ("caches", 20)])
def test_a_sample_is_refused(source: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in ((web, ("PAUSE_S", "TIMEOUT_S", "PATIENCE_S")), (remote, ("STREAMS",))):
        for name in names:  # which the sources change
            monkeypatch.setattr(owner, name, getattr(owner, name))
    outcomes = measure_forged.attack(source, range(count))
    assert outcomes.total() == count
    assert [end for _, end in outcomes if end.startswith("WRONG")] == []
    assert "refused" in {end for _, end in outcomes}
