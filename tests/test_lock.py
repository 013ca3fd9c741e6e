"""One process in a directory at a time."""

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from qat import files as lock
from qat.errors import ConfigError


def test_a_second_one_is_told_who_was_first(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    with lock.held(out):
        who = rf"out=\S+run is in use by process {os.getpid()} on {socket.gethostname()} since \S+;"
        with pytest.raises(ConfigError, match=f"{who} wait for it, stop it, or choose another"):
            with lock.held(out):
                pass
        with lock.held(tmp_path / "other"):
            pass
        assert lock.is_held(out) and not lock.is_held(tmp_path / "other")
    with lock.held(out):
        pass
    assert not lock.is_held(out)
    assert not out.exists() and not list(out.parent.iterdir())


def test_all_names_of_a_directory_have_one_lock(tmp_path: Path) -> None:
    out, alias = tmp_path / "run", tmp_path / "elsewhere" / "alias"
    alias.parent.mkdir()
    alias.symlink_to("../run")
    (tmp_path / "folder").symlink_to(".")
    for first, second in ((out, alias), (alias, out), (alias, tmp_path / "folder" / "run")):
        with lock.held(first), pytest.raises(ConfigError, match="is in use by process"):
            with lock.held(second):
                pass
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="loop.run cannot be written"):
        with lock.held(tmp_path / "loop" / "run"):
            pass


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # it only takes a lock
def test_a_process_that_dies_lets_go(tmp_path: Path) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with lock.held(tmp_path / "run"):
            os.write(tell, b"x")
            os._exit(9)  # as killed: nothing is tidied up
    os.read(ready, 1)
    os.waitpid(child, 0)
    assert (tmp_path / ".run.lock").exists()
    with lock.held(tmp_path / "run"):
        pass
    os.close(ready)
    os.close(tell)


def test_a_lock_that_was_removed_under_us_is_taken_anew(tmp_path: Path, monkeypatch) -> None:
    real, asked = lock._is_there, []

    def removed_once(descriptor: int, path: Path) -> bool:
        asked.append(descriptor)
        if len(asked) == 1:
            path.unlink()
        return real(descriptor, path)

    monkeypatch.setattr(lock, "_is_there", removed_once)
    with lock.held(tmp_path / "run"):
        assert len(asked) == 2 and "process" in (tmp_path / ".run.lock").read_text()


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    message = r"out=\S+ cannot be written \(.*\), expected a directory of yours .*another --out"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=message), lock.held(tmp_path / "file" / "run"):
        pass
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="Permission denied: .*/run"), lock.held(tmp_path / "run"):
        pass


def test_without_locks_there_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with lock.held(tmp_path / "run"):
        assert "let no two processes work in it at once" in caplog.text
    monkeypatch.setattr(lock, "UNKNOWN", ())
    with pytest.raises(ConfigError, match="not here"), lock.held(tmp_path / "run"):
        pass
