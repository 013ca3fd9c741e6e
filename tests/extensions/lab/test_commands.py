"""Commands of records, found in the work tree, at another path or in an older commit."""

import subprocess
from pathlib import Path

import pytest

from qat.errors import ConfigError
from qat.extensions.lab.commands import current

OLD = """
@app.command(name="speed")
def _speed(*, steps: int, fast: bool = False) -> None: ...
"""
ARGUMENTS = 'parser.add_argument("--kill-after", type=int)\n'


def commit(root: Path, **scripts: str | None) -> str:
    """Write or delete scripts, commit, and return the commit."""
    for name, text in scripts.items():
        path = root / name.replace("__", "/")
        path = path.with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.unlink() if text is None else path.write_text(text)
    user = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for words in (("add", "-A"), (*user, "commit", "-q", "-m", "x")):
        subprocess.run(["git", *words], cwd=root, check=True)
    words = ("git", "rev-parse", "--short=8", "HEAD")
    return subprocess.check_output(words, cwd=root, text=True).strip()


def test_a_command_is_found_where_its_flags_are(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = commit(tmp_path, tools__gone=OLD, tools__less=OLD, tools__moved=ARGUMENTS)
    less = OLD.replace(", fast: bool = False", "")
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "wheel").write_text("#!/usr/bin/env bash\n")
    commit(tmp_path, tools__gone=None, tools__less=less, tools__moved=None, other__moved=ARGUMENTS)
    for command, now, at in (
        ("python tools/gone.py speed --steps 3", "tools/gone.py", first),
        ("python tools/less.py speed --steps=3", "tools/less.py", ""),
        ("A=1 python tools/less.py speed --no-fast", "tools/less.py", first),
        ("torchrun -n 2 tools/moved.py --kill-after 2", "other/moved.py", ""),
        (".ci/wheel FILE", "", ""),
        ("qat bench kernels --only top-k", "", ""),
    ):
        assert current(command, tmp_path) == (command.replace("tools/moved.py", now), at)
    for command in (
        "python tools/gone.py speeds --steps 3",
        "python tools/less.py speed --slow",
        "python tools/none.py",
        "make speed",
        ".ci/sheel FILE",
        "qat bench kernels --onyl top-k",
    ):
        with pytest.raises(ConfigError):
            current(command, tmp_path)
