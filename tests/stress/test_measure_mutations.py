"""A sample of what `measure_mutations.py` runs thousands of."""

from pathlib import Path

import measure_mutations
import pytest


@pytest.mark.slow
def test_some_mutants_of_each_subject(tmp_path: Path) -> None:
    subjects = measure_mutations.make_subjects(tmp_path)
    outcomes = measure_mutations.fuzz(subjects, range(336))
    assert outcomes.total() == 336
    assert {name.partition(" ")[0] for name, _ in outcomes} == {s.name for s in subjects}
    assert {outcome for _, outcome in outcomes} <= {"read", "refused", "read as another one"}
