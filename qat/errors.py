"""The errors that a user can cause and mend. Everything else is our bug and keeps its traceback.

A message has three parts: what was found, what was expected, what to do.
"""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

DISTRIBUTION = "qat-distill"
"""What pip calls this package; `qat` on the package index is somebody else's."""
HOME = Path(__file__).parents[1]
"""A clone, or the folder of installed packages."""
AS_NEAR_AS = 2
"""Edits that a name with the same words, but not all of their letters, counts as."""


def how_to_install(extra: str) -> str:
    """Return the command that adds an extra to the Python that runs this, from any folder.

    It names the clone, if there is one, else the packages of the extra, as this package's own
    metadata lists them for this platform: the package itself is on no index.
    """
    from importlib.metadata import distributions  # takes a moment, and most runs need no hint

    pip = [sys.executable, "-m", "pip", "install"]
    # not by find_spec, after which setuptools no longer replaces distutils, and the compiler fails
    if not [*distributions(name="pip")]:  # an environment that uv made
        pip = ["uv", "pip", "install", "--python", sys.executable]
    what = ["-e", f"{HOME}[{extra}]"] if _is_clone() else _packages(extra)
    return shlex.join([*pip, *what])


def is_installed(library: str) -> bool:
    """Return whether Python finds a library, not just a folder of its name where it runs."""
    from importlib.util import find_spec

    found = find_spec(library)
    return found is not None and found.origin is not None


def _is_clone() -> bool:
    """Return whether qat runs from a clone; other packages leave a pyproject.toml there, too."""
    project = HOME / "pyproject.toml"
    return project.is_file() and f'name = "{DISTRIBUTION}"' in project.read_text(encoding="utf-8")


def _packages(extra: str) -> list[str]:
    """List what an extra adds on this platform, as pip takes it: `["compressed-tensors>=0.12"]`."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, requires(DISTRIBUTION) or []):
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            found.append(str(requirement))
    return found


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return up to `most` of the `known` names that `name` was probably meant to be, best first.

    A name is near if few letters differ (at most a third of those of `name`), or if it has all
    words of `name`, perhaps in full: `--seq-len` is `--sequence-length`. Case, and whether words
    are joined by `-` or `_`, do not matter.
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
    """Return whether `name` has all `words` in order; words of `least` letters may be cut short."""
    parts = iter(name.split("-"))
    return all(
        any(part == word or (len(word) >= least and part.startswith(word)) for part in parts)
        for word in words.split("-")
    )


def _edits(a: str, b: str) -> int:
    """Number of letters to add, drop or change, or neighbours to swap, between two words.

    The optimal string alignment distance.
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
    """A mistake in the input: the command line prints it as one line and exits with its code."""

    exit_code = 1


class ConfigError(QatError):
    """A setting, a recipe or a combination of flags that cannot work."""


class DataError(QatError):
    """A dataset or text file that cannot be read as what it was said to be."""


class CacheError(QatError):
    """A teacher cache that is missing, damaged, or not the one that this student needs."""


class CheckpointError(QatError):
    """A model directory that is missing, damaged, or of an unknown format."""


class ExportError(QatError):
    """A model that the wished deployable form cannot hold."""


class TrainingError(QatError):
    """A run that cannot go on: its loss is no longer a number."""


class Stopped(QatError):
    """A run that saved and ended because somebody asked it to; its code says who asked."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class BenchError(QatError):
    """A measurement whose subject fails what it is measured for."""


class HubError(QatError):
    """An archive, a mirror or a registry that does not give what it should."""


class ComparisonError(QatError):
    """Measurements that cannot be compared; 1 is left for a comparison that found a regression."""

    exit_code = 2
