"""The errors that a user can cause and mend. Everything else is our bug and keeps its traceback.

A message has three parts: what was found, what was expected, what to do.
"""

import shlex
import sys
from pathlib import Path

DISTRIBUTION = "qat-distill"
"""What pip calls this package; `qat` on the package index is somebody else's."""
HOME = Path(__file__).parents[1]
"""A clone, or the folder of installed packages."""


def how_to_install(extra: str) -> str:
    """The command that adds an extra to the Python that runs this, whatever folder one is in.

    It names the clone, if there is one: the package is on no index. Installed in another way, pip
    takes what the extra asks for from the installation.
    """
    from importlib.metadata import distributions  # takes a moment, and most runs need no hint

    is_clone = (HOME / "pyproject.toml").is_file()
    what = ["-e", f"{HOME}[{extra}]"] if is_clone else [f"{DISTRIBUTION}[{extra}]"]
    pip = [sys.executable, "-m", "pip", "install"]
    # not by find_spec, after which setuptools no longer replaces distutils, and the compiler fails
    if not [*distributions(name="pip")]:  # an environment that uv made
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *what])


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
