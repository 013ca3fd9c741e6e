"""The lock of the tests' environment lists what pyproject.toml asks for, each file by its hash."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "speedrun/locked.txt").read_text(encoding="utf-8")


def test_every_dependency_of_the_tests_is_locked_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    left_out = set(project["tool"]["uv"]["pip"]["no-emit-package"])
    wanted, left = [], [*project["project"]["dependencies"], *extras["dev"]]
    while left:
        one = Requirement(left.pop())
        if one.name == project["project"]["name"]:
            left += [each for extra in one.extras for each in extras[extra]]
        elif one.name not in left_out and (not one.marker or one.marker.evaluate()):
            wanted.append(one)
    locked = {}
    for entry in re.findall(r"^[a-z0-9].*?(?= \\$)", LOCK, re.MULTILINE):
        one = Requirement(entry)
        if not one.marker or one.marker.evaluate():
            locked[canonicalize_name(one.name)] = next(iter(one.specifier)).version
    missing = [each for each in wanted if locked.get(canonicalize_name(each.name)) is None]
    assert not missing, "renew speedrun/locked.txt with the command in its first lines"
    assert [e for e in wanted if not e.specifier.contains(locked[canonicalize_name(e.name)])] == []
    assert not left_out & locked.keys()


def test_every_entry_has_hashes_and_no_address() -> None:
    entries = re.split(r"^(?=[a-z0-9])", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) > 100
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", e, re.MULTILINE) for e in entries)
    assert "://" not in LOCK


def test_it_is_installed_first_and_by_hash(tmp_path: Path) -> None:
    python, lock = tmp_path / "python", tmp_path / "lock"
    python.write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/log"\n')
    python.chmod(0o755)
    lock.write_text("")
    run = f'source speedrun/setup_env.sh; PYTHON="{python}"; MARK="{tmp_path}/mark"; '
    run += f'install_package dev "{lock}"'
    subprocess.run(["bash", "-c", run], cwd=ROOT, check=True, capture_output=True)
    installs = [x for x in (tmp_path / "log").read_text().splitlines() if "pip install" in x]
    assert installs[0].endswith(f"--require-hashes --no-deps -r {lock}")
    assert installs[1].endswith(f" -e {ROOT}[dev]") and len(installs) == 2
