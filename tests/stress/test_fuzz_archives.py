"""A sample of the archive fuzz."""

import fuzz_archives
from archive_mutants import KINDS


def test_a_sample_of_mutants() -> None:
    with fuzz_archives.workplace() as place:
        outcomes = fuzz_archives.fuzz(place, range(154))
    assert sum(outcomes.values()) == 154
    assert [outcome for _, outcome in outcomes if outcome.startswith("WRONG")] == []
    assert {kind for kind, _ in outcomes} == set(KINDS)
