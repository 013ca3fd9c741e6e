"""A sample of what `measure_mutations.py` runs thousands of."""

import measure_mutations
import pytest


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> list:
    return measure_mutations.make_subjects(tmp_path_factory.mktemp("subjects"))


@pytest.mark.slow
def test_some_mutants_of_each_subject(subjects: list) -> None:
    outcomes = measure_mutations.fuzz(subjects, range(36))
    assert outcomes.total() == 36
    assert {name.partition(" ")[0] for name, _ in outcomes} == {s.name for s in subjects}
    assert {outcome for _, outcome in outcomes} <= {"read", "refused", "read as another one"}


@pytest.mark.slow
def test_many_mutants(subjects: list) -> None:
    outcomes = measure_mutations.fuzz(subjects, range(36, 336))
    assert not [end for _, end in outcomes if end.startswith("WRONG")]
