"""The names that a user may give a model, and what they stand for."""

from pathlib import Path

import pytest

from qat.errors import CheckpointError
from qat.models.directory import is_path, resolve


@pytest.fixture
def students(tmp_path: Path) -> Path:
    """A directory as `qat run` leaves it: a conversion, a run, and which of them is the student."""
    run = tmp_path / "trained"
    for model in (tmp_path / "converted", run / "checkpoints" / "step-000002"):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    (run / "best").write_text("checkpoints/step-000002\n")
    (tmp_path / "student").write_text("trained\n")
    return tmp_path


def test_a_directory_of_a_whole_run_is_its_student(students: Path) -> None:
    assert resolve(str(students)) == str(students / "trained/checkpoints/step-000002")
    (students / "student").write_text("converted\n")
    assert resolve(str(students)) == str(students / "converted")


def test_a_directory_of_several_models_names_them(students: Path) -> None:
    (students / "student").unlink()
    with pytest.raises(CheckpointError, match=r"name one that lies in it: \S+/converted, \S+/trai"):
        resolve(str(students))


def test_a_run_without_a_model_yet_goes_on(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(CheckpointError, match="none yet: the command that began it goes on"):
        resolve(str(tmp_path))


def test_an_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve("")


@pytest.mark.parametrize("name", ["", "..", "../x", "/etc", "checkpoints", "link", "x" * 9999])
def test_a_student_that_lies_elsewhere_is_refused(students: Path, name: str) -> None:
    (students / "link").symlink_to(students)
    (students / "student").write_text(name)
    with pytest.raises(CheckpointError, match="which is no directory there"):
        resolve(str(students))


@pytest.mark.parametrize("source", ["./x/y", "/x/y", "~/x", "model", "x/y/z", "https://x/y/z", ""])
def test_what_is_no_owner_and_name_of_a_hub_is_a_path(source: str) -> None:
    assert is_path(source)


def test_below_a_directory_that_is_there_all_is_a_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_path("owner/name")
    (tmp_path / "owner").mkdir()
    assert is_path("owner/name")
