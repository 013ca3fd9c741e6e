"""The errors that a user can cause and mend. Everything else is our bug and keeps its traceback.

A message has three parts: what was found, what was expected, what to do.
"""


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
