"""What fails leaves no empty folders behind."""

from pathlib import Path

import pytest

from qat.files import whole_directory
from qat.folders import parents_of
from qat.lock import held


def test_folders_stay_where_something_came_of_them(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "a/b/out") as partial:
        (partial / "file").write_text("x")
    assert (tmp_path / "a/b/out/file").is_file()


@pytest.mark.parametrize("place", [parents_of, whole_directory, held])
def test_folders_go_with_what_failed(tmp_path: Path, place) -> None:
    (tmp_path / "old").mkdir()
    for path in ("a/b/out", "old/out", "old/new/out"):
        with pytest.raises(KeyError), place(tmp_path / path):
            raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


def test_a_folder_that_is_used_by_then_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyError), parents_of(tmp_path / "a/b/c/out"):
        (tmp_path / "a/theirs").write_text("x")
        raise KeyError
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "theirs"]
