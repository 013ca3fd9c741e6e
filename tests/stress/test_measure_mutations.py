"""A sample of what `measure_mutations.py` runs thousands of, and whether it notices errors."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from qat.errors import CacheError

OURS = ("measure_mutations", "mutants", "kill_case", "fuzzing")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "speedrun"))
        import measure_mutations

        yield measure_mutations
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def subjects(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list:
    return script.make_subjects(tmp_path_factory.mktemp("subjects"))


def test_some_mutants_of_each_subject(script: ModuleType, subjects: list) -> None:
    outcomes = script.fuzz(subjects, range(20))
    assert outcomes.total() == 20
    assert {name.partition(" ")[0] for name, _ in outcomes} == {s.name for s in subjects}
    assert {outcome for _, outcome in outcomes} <= {"read", "refused", "read as another one"}


@pytest.mark.slow
def test_many_mutants(script: ModuleType, subjects: list) -> None:
    outcomes = script.fuzz(subjects, range(20, 220))
    assert not [end for _, end in outcomes if end.startswith("WRONG")]


def ends(script: ModuleType, subject: object) -> str:
    return script.run(subject, {"manifest.json": b"{}"}, is_sealed=False)


def test_it_notices(script: ModuleType, subjects: list) -> None:
    def refuse(message: str) -> object:
        def read(root: Path) -> str:
            raise CacheError(message)

        return subjects[0]._replace(read=read)

    assert ends(script, refuse("x, expected y; restore it")) == "refused"
    assert "several lines" in ends(script, refuse("x, expected\ny"))
    assert "helps nobody" in ends(script, refuse("no"))
    silent = subjects[0]._replace(read=lambda root: "something else")
    assert ends(script, silent).startswith("WRONG: accepted silently")
    assert script.run(silent, {}, is_sealed=True) == "read as another one"
    broken = subjects[0]._replace(read=lambda root: 1 / 0)
    assert "ZeroDivisionError" in ends(script, broken)


def test_files_are_sound_again_after_each_case(script: ModuleType, subjects: list) -> None:
    for subject in subjects:
        script.run(subject, dict.fromkeys(subject.files, b"\0"), is_sealed=False)
        assert subject.read(subject.root) in subject.sound


def test_sealed_hashes_are_right(script: ModuleType, subjects: list) -> None:
    shard = next(name for name in subjects[0].files if name.endswith(".safetensors"))
    files = script.sealed(subjects[0].files, {shard: subjects[0].files[shard] + b"more"})
    assert set(files) == {shard, "manifest.json"}
    assert script.run(subjects[0], files, is_sealed=True) == "read"
