"""Directories appear whole or not at all, whoever else writes there; no empty ones are left."""

import errno
import os
from pathlib import Path

import pytest

from qat import files
from qat.errors import ConfigError
from qat.files import check_free, held, parents_of, parse_toml, whole_directory

NEW, OLD = {"a": "new", "b": "new"}, {"a": "old", "old": "old"}


def fill(directory: Path, content: dict[str, str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (directory / name).write_text(text)
    return directory


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def replaced(out: Path, **how: object) -> None:
    with whole_directory(out, replace=True, written=lambda out: {"a", "old"}, **how) as partial:
        fill(partial, NEW)


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def in_one_step(request: pytest.FixtureRequest, monkeypatch, tmp_path: Path) -> bool:
    """Both ways to replace a directory, where this disk knows both."""
    if not request.param:
        monkeypatch.setattr(files, "_is_exchanged", lambda *_: False)
    elif not files._is_exchanged(fill(tmp_path / "one", {}), fill(tmp_path / "two", {})):
        pytest.skip("this system exchanges no names")
    return request.param


def test_replacing_leaves_the_new_one_alone(tmp_path: Path, in_one_step: bool) -> None:
    place = tmp_path / "place"
    out = fill(place / "out", OLD | {"mine": "mine"})
    replaced(out)
    assert content(out) == NEW | {"mine": "mine"}
    assert os.listdir(place) == ["out"]


@pytest.mark.parametrize("is_empty", [False, True])
def test_what_somebody_put_there_meanwhile_is_not_replaced(tmp_path: Path, is_empty: bool) -> None:
    out = tmp_path / "out"
    if is_empty:
        out.mkdir()
    with pytest.raises(ConfigError, match="was filled by somebody else meanwhile, .*; remove it"):
        with whole_directory(out) as late:
            fill(late, NEW)
            with whole_directory(out) as first:
                fill(first, OLD)
    assert content(out) == OLD and os.listdir(tmp_path) == ["out"]


def test_what_comes_while_it_is_replaced_stays(tmp_path: Path, monkeypatch) -> None:
    out, kept = fill(tmp_path / "out", OLD), files._keep_foreign

    def kept_and_more(old: Path, *rest: object, **how: object) -> None:
        kept(old, *rest, **how)
        if old == out:
            fill(out, {"late": "mine"})

    monkeypatch.setattr(files, "_keep_foreign", kept_and_more)
    replaced(out)
    assert content(out) == NEW | {"late": "mine"} and os.listdir(tmp_path) == ["out"]


def test_files_of_others_are_overwritten_only_where_that_is_wished(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", OLD | {"b": "mine"})
    with pytest.raises(ConfigError, match="out/b would be replaced and was not written by qat"):
        replaced(out, overwrite=False)
    assert content(out) == OLD | {"b": "mine"} and os.listdir(tmp_path) == ["out"]
    replaced(out)
    assert content(out) == NEW


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_rename_that_fails_is_undone(tmp_path: Path, monkeypatch, failing: int) -> None:
    out, rename, calls = fill(tmp_path / "out", OLD), Path.rename, []

    def fail_once(path: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return rename(path, target)

    monkeypatch.setattr(files, "_is_exchanged", lambda *_: False)
    monkeypatch.setattr(Path, "rename", fail_once)
    if failing == 1:  # the first one finds out that something is there
        replaced(out)
        assert content(out) == NEW
    else:
        with pytest.raises(OSError, match="Input/output error"):
            replaced(out)
        assert content(out) == OLD
    assert os.listdir(tmp_path) == ["out"]


def test_one_that_cannot_be_undone_says_where_the_older_one_is(tmp_path: Path, monkeypatch) -> None:
    out, rename = fill(tmp_path / "out", OLD), Path.rename

    def taken_by_another(path: Path, target: Path) -> Path:
        done = rename(path, target)
        if path == out:
            fill(out, {"theirs": "theirs"})
        return done

    monkeypatch.setattr(files, "_is_exchanged", lambda *_: False)
    monkeypatch.setattr(Path, "rename", taken_by_another)
    with pytest.raises(ConfigError, match=r"what it held before is in (\S+):") as caught:
        replaced(out)
    old = Path(str(caught.value).split("before is in ")[1].split(":")[0])
    assert content(out) == {"theirs": "theirs"} and content(old) == OLD
    assert sorted(os.listdir(tmp_path)) == [old.name, "out"]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # it only renames
@pytest.mark.parametrize("killed_at", ["_keep_foreign", "_is_exchanged", "rmtree"])
def test_a_kill_leaves_an_old_or_a_new_one(tmp_path: Path, killed_at: str, monkeypatch) -> None:
    out = fill(tmp_path / "out", OLD)
    child = os.fork()
    if child == 0:
        place = files.shutil if killed_at == "rmtree" else files
        monkeypatch.setattr(place, killed_at, lambda *_, **__: os._exit(9))
        replaced(out)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert content(out) == (NEW if killed_at == "rmtree" else OLD)
    monkeypatch.undo()
    replaced(out)
    assert content(out) == NEW


def test_a_link_stays_and_what_is_behind_it_is_made(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("deep/out")
    with whole_directory(link) as partial:
        fill(partial, OLD)
    replaced(link)
    assert link.is_symlink() and content(tmp_path / "deep" / "out") == NEW
    assert os.listdir(tmp_path / "deep") == ["out"]


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


def test_nobodys_working_directory_is_replaced(tmp_path: Path, monkeypatch) -> None:
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    inode = place.stat().st_ino
    for out in (".", "..", "../b", "../../a", "link"):
        if out == "link":  # `.` is not empty, where it is one
            (place / "link").symlink_to(place)
        for replace in (False, True):
            with pytest.raises(ConfigError, match="is the working directory or above it"):
                with whole_directory(Path(out), replace=replace):
                    pytest.fail("nothing may be worked for it")
            assert Path.cwd().stat().st_ino == inode == place.stat().st_ino
    (place / "link").unlink()
    check_free(Path(), in_place=True, replace=True)


def test_bytes_are_on_the_disk_before_their_name_is(tmp_path: Path, flushed: list[int]) -> None:
    files.write_atomically(tmp_path / "a.json", "{}")
    assert flushed == [(tmp_path / "a.json").stat().st_ino]
    flushed.clear()
    with whole_directory(tmp_path / "out") as partial:
        fill(partial, NEW)
    written = [*(path.stat().st_ino for path in (tmp_path / "out").iterdir())]
    folders = [path.stat().st_ino for path in (tmp_path / "out", tmp_path)]
    assert {*written, *folders} == {*flushed} and flushed[-1] == folders[-1]


def test_a_byte_order_mark_before_toml_is_skipped() -> None:
    assert parse_toml("\ufeff[cache]\r\nheld_out = 0.2\r\n") == {"cache": {"held_out": 0.2}}
