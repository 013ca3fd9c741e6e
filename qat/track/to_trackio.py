"""A run in trackio's local database (`trackio show --project qat`)."""

import logging
from collections.abc import Mapping
from importlib import import_module

from qat.track.tracker import Sample, Start

logger = logging.getLogger(__name__)

TALKATIVE = ("trackio", "trackio.run", "trackio.utils")
"""Its modules that print; there is no switch for that."""


class Trackio:
    """Logs into the run of this name; a run that was followed before goes on."""

    def __init__(self, start: Start) -> None:
        import trackio

        for module in TALKATIVE:  # stdout is the verb's own, and other threads write to it
            vars(import_module(module))["print"] = _log
        self._table = trackio.Table
        self._run = trackio.init(
            project=start.project,
            name=start.name,
            config=start.config,
            resume="never" if start.id is None else "allow",
            embed=False,
        )
        self.id = self._run.name

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point of each curve."""
        self._run.log(dict(numbers), step=step)

    def samples(self, rows: list[Sample]) -> None:
        """The table of the latest samples."""
        table = self._table(columns=[*Sample._fields], data=[list(row) for row in rows])
        self._run.log({"eval/samples": table}, step=rows[-1].step)

    def flush(self) -> None:
        """Nothing: a thread of trackio's own writes every half second."""

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Write out what is left."""
        self._run.finish()


def _log(*words: object, **_: object) -> None:
    logger.debug("trackio: %s", " ".join(map(str, words)))
