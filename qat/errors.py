"""Errors that a user can cause and fix. All other errors are our bugs and keep their traceback.

A message has three parts: what was found, what was expected, what to do.
"""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

DISTRIBUTION = "qat-distill"
"""The name of this package for pip; `qat` on the package index is another project."""
VERSION = "0.2.0"
HOME = Path(__file__).parents[1]
"""The clone, or the directory of installed packages."""
AS_NEAR_AS = 2
"""Edit distance assigned to a name that has the same words but not all of their letters."""


def how_to_install(extra: str) -> str:
    """Return a command that installs an extra for this Python, from any directory.

    It uses the clone, if there is one, else the packages of the extra from this package's metadata
    for this platform: the package itself is on no index.
    """
    from importlib.metadata import distributions  # slow to import, and most runs need no hint

    pip = [sys.executable, "-m", "pip", "install"]
    # not find_spec: after it setuptools does not replace distutils, and the compiler fails
    if not [*distributions(name="pip")]:  # environments made by uv have no pip
        pip = ["uv", "pip", "install", "--python", sys.executable]
    what = ["-e", f"{HOME}[{extra}]"] if _is_clone() else packages(extra)
    return shlex.join([*pip, *what])


def is_installed(library: str) -> bool:
    """Return whether Python finds a library, and not just a folder of that name."""
    from importlib.util import find_spec

    try:
        found = find_spec(library)
    except ModuleNotFoundError:  # what the library is a part of
        return False
    return found is not None and found.origin is not None


def _is_clone() -> bool:
    """Return whether qat runs from a clone; other packages may have a pyproject.toml there."""
    project = HOME / "pyproject.toml"
    return project.is_file() and f'name = "{DISTRIBUTION}"' in project.read_text(encoding="utf-8")


def packages(extra: str, of: str = DISTRIBUTION) -> list[str]:
    """Return an extra's requirements on this platform for pip: `["compressed-tensors>=0.12"]`."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, requires(of) or []):
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            found.append(str(requirement))
    return found


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return up to `most` of the `known` names that `name` probably means, best first.

    A name matches if few letters differ (at most a third of those of `name`), or if it has all
    words of `name`, possibly longer: `--seq-len` is `--sequence-length`. Case, and `-` or `_`
    between words, do not matter.
    """
    typed = _folded(name)
    if not typed:
        return []
    limit = len(typed) // 3
    found = []
    for each in dict.fromkeys(known):
        other = _folded(each)
        difference = abs(len(other) - len(typed))
        order = other[:1] != typed[:1], difference, each
        if difference <= limit and (edits := _edits(typed, other)) <= limit:
            found.append((edits, *order))
        elif _has_words(other, typed, least=2) or _has_words(typed, other, least=4):
            found.append((AS_NEAR_AS, *order))
    return [each for *_, each in sorted(found)][:most]


def _folded(name: str) -> str:
    return name.strip("-").casefold().replace("_", "-")


def _has_words(name: str, words: str, least: int) -> bool:
    """Return whether `name` has all `words` in order; those of `least` letters may be prefixes."""
    parts = iter(name.split("-"))
    return all(
        any(part == word or (len(word) >= least and part.startswith(word)) for part in parts)
        for word in words.split("-")
    )


def _edits(a: str, b: str) -> int:
    """Return the optimal string alignment distance of two words.

    It counts letters to add, drop or change, and neighbours to swap.
    """
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                least = min(least, older[j - 2] + 1)
            row.append(least)
    return row[-1]


class QatError(Exception):
    """An error in the input: the command line prints it as one line and exits with its code."""

    exit_code = 1


class ConfigError(QatError):
    """A setting, a recipe or a combination of flags that cannot work."""


class DataError(QatError):
    """A dataset or text file that cannot be read in its stated format."""


class CacheError(QatError):
    """A teacher cache that is missing, damaged, or not the one that this student needs."""


class CheckpointError(QatError):
    """A model directory that is missing, damaged, or of an unknown format."""


class ExportError(QatError):
    """A model that the requested deployable form cannot hold."""


class TrainingError(QatError):
    """A run that cannot continue: its loss is no longer a number."""


class Stopped(QatError):
    """A run that was stopped by request after it saved; the exit code depends on the request."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class BenchError(QatError):
    """A measurement whose subject fails its correctness check."""


class HubError(QatError):
    """An archive, a mirror or a registry that does not provide what it should."""


class ComparisonError(QatError):
    """Measurements that cannot be compared; code 1 is reserved for a regression that was found."""

    exit_code = 2
