"""The one place that says how an extra is installed, and what works where none is."""

import importlib
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from qat import errors
from qat.errors import DISTRIBUTION, HOME, how_to_install, is_installed, nearest

PROJECT = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_from_a_clone_the_clone_is_what_is_installed() -> None:
    expected = [sys.executable, "-m", "pip", "install", "-e", f"{HOME}[wandb]"]
    assert shlex.split(how_to_install("wandb")) == expected


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packages that qat runs from, as installed from a wheel."""
    listed = [
        f"{requirement}; {f'({marker}) and ' if marker else ''}extra == '{extra}'"
        for extra, needed in PROJECT["optional-dependencies"].items()
        for requirement, _, marker in (each.partition(";") for each in needed)
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["torch>=2.9", *listed])
    monkeypatch.setattr(errors, "HOME", tmp_path)
    return tmp_path


def test_installed_from_a_wheel_the_packages_are_named(wheel: Path) -> None:
    packages = shlex.split(how_to_install("ship"))[4:]
    assert packages == PROJECT["optional-dependencies"]["ship"]
    (wheel / "pyproject.toml").write_text('[project]\nname = "stray"\n')
    assert shlex.split(how_to_install("ship"))[4:] == packages


def test_every_extra_is_packages_of_an_index(wheel: Path) -> None:
    for extra in sorted(PROJECT["optional-dependencies"].keys() - {"dev"}):
        packages = [Requirement(each) for each in shlex.split(how_to_install(extra))[4:]]
        assert packages and not any(each.marker for each in packages)
        assert DISTRIBUTION not in {each.name for each in packages}


def test_an_environment_without_pip_is_ones_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: iter(()))
    expected = ["uv", "pip", "install", "--python", sys.executable, "-e", f"{HOME}[eval]"]
    assert shlex.split(how_to_install("eval")) == expected


def test_a_hint_leaves_the_compiler_what_it_imports() -> None:
    """Looking for the module of pip stops setuptools from replacing distutils, which it asserts."""
    pytest.importorskip("setuptools")
    code = """if True:
        from qat.errors import how_to_install
        how_to_install("eval")
        import distutils.core, setuptools
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


FLAGS = (
    "--keep",
    "--help",
    "--max-steps",
    "--batch-size",
    "--sequence-length",
    "--lr",
    "--teacher",
)


def test_the_nearest_name_is_near() -> None:
    for typed, known in (
        ("--hlep", "--help"),  # two letters changed places; --keep is as near by letters alone
        ("--hepl", "--help"),
        ("-lr", "--lr"),
        ("--Batch_Size", "--batch-size"),
        ("--batch", "--batch-size"),
        ("--seq-len", "--sequence-length"),
        ("--num-steps", "--max-steps"),
        ("--teacher-dir", "--teacher"),
        ("--zzzz", None),
        ("--ld", None),
        ("--output", None),
        ("--", None),
        ("", None),
    ):
        assert nearest(typed, FLAGS) == ([] if known is None else [known])


def test_the_nearest_names_are_ordered_by_their_edits() -> None:
    names = ["hard_arc", "arc_easly", "arc_easy", "arc"]
    assert nearest("arc_easy", names, 3) == ["arc_easy", "arc_easly", "arc"]
    assert nearest("arc_eays", names) == ["arc_easy"]


ALONE = Path(__file__).with_name("without_extras.py")


@pytest.mark.slow
def test_without_extras_every_module_is_imported_and_every_verb_says_its_help() -> None:
    command = [sys.executable, "-W", "error", str(ALONE)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    gone = set(found.stdout.split())
    assert {"gguf", "coremltools", "pytest"} <= gone and not {"torch", "qat"} & gone


@pytest.mark.parametrize("name", ["mlx_lm", "gguf", "lm_eval", "wandb"])
def test_a_folder_that_is_called_as_a_library_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert not any(map(is_installed, (name, "never_heard_of", "never_heard_of.part", "json.part")))
    assert is_installed("json.decoder")
    (tmp_path / name / "__init__.py").touch()
    importlib.invalidate_caches()
    assert is_installed(name)
