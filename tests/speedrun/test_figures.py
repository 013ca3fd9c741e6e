"""Figures of measuring scripts, and the commit that they are of."""

import json
import subprocess
from pathlib import Path

import figures

GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]


def test_a_tree_without_history_or_git_has_no_commit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    ask = figures.commit.__wrapped__
    assert ask() == "unknown"
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*GIT, *command], cwd=tmp_path, check=True)
    assert len(ask()) == 12
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask() == "unknown"


def test_the_commit_is_asked_for_before_anything_is_measured(tmp_path: Path, monkeypatch) -> None:
    assert figures.commit.cache_info().currsize == 1
    monkeypatch.setattr(figures.subprocess, "run", None)
    figures.record(tmp_path / "figures.jsonl", "speed", 1.0, "s", "<= 2")
    (line,) = (tmp_path / "figures.jsonl").read_text().splitlines()
    assert json.loads(line)["commit"] == figures.commit()
