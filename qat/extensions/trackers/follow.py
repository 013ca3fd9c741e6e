"""Trackers and uploads that follow a run directory while the trainer fills it.

Each follower has its own thread. None of them can stop, delay or change the run: one that fails
logs a warning and ends.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from qat.errors import ConfigError, how_to_install, is_installed
from qat.extensions.trackers.curves import (
    Curves,
    Mlflow,
    TensorBoard,
    Tracker,
    TrackerStart,
    Trackio,
    Wandb,
)
from qat.extensions.trackers.upload import Upload, check_folder, restore
from qat.logs import FACTS
from qat.observe.config import TrackConfig

__all__ = ["follow", "restore"]

logger = logging.getLogger(__name__)

POLL_S = 1.0
# by flag, which is also the name of the library and of qat's extra
TRACKERS: dict[str, Callable[[TrackerStart], Tracker]] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


class Follower(Protocol):
    """A reader that polls a run directory."""

    name: str  # the flag without dashes
    limit_s: float  # seconds that the end of the run waits for this follower

    def begin(self, label: str) -> None:
        """Start following: the run directory exists; `label` is the name of the run."""

    def poll(self) -> None:
        """Process what is new in the run directory."""

    def end(self, *, failed: bool) -> None:
        """Finish after the last `poll`; `failed` if the run ended with an error."""

    def missing(self) -> str:
        """Return a message about what would be missing if the follower stopped now."""


@contextmanager
def follow(run: Path, config: TrackConfig) -> Iterator[None]:
    """Follow the run that the block writes to `run`, and flush all followers at its end.

    Raises:
        ConfigError: before the block runs: a library or folder named by `config` is missing.
    """
    threads = [_Thread(follower, run, config) for follower in _followers(run, config)]
    for thread in threads:
        thread.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        for thread in threads:
            thread.stop(failed=failed)
        for thread in threads:
            thread.wait()


def _followers(run: Path, config: TrackConfig) -> list[Follower]:
    wanted = [flag for flag in TRACKERS if getattr(config, flag)]
    for flag in wanted:
        if not is_installed(flag):
            raise ConfigError(
                f"--{flag}, but the library {flag} is not installed; expected it beside qat; "
                f"run: {how_to_install(flag)}"
            )
    project = {"wandb": config.wandb_project}
    found: list[Follower] = [
        Curves(run, flag, TRACKERS[flag], project=project.get(flag, "qat")) for flag in wanted
    ]
    if config.gdrive_dir is not None:
        check_folder(run, config.gdrive_dir)
        found.append(Upload(run, config.gdrive_dir, config.gdrive_state_gib))
    return found


class _Thread(threading.Thread):
    """Polls one follower as soon as the run has begun or was resumed."""

    def __init__(self, follower: Follower, run: Path, config: TrackConfig) -> None:
        super().__init__(name=f"qat-{follower.name}", daemon=True)
        self._follower = follower
        self._facts = run / FACTS
        self._before = self._stamp()
        named = config.wandb_name if follower.name == "wandb" else None
        self._label = named or run.resolve().name
        self._over = threading.Event()
        self._failed = False

    def run(self) -> None:
        """Follow the run; an exception from a library ends only this thread."""
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "--%s stopped following the run, which goes on without it: %s: %s",
                self._follower.name,
                type(error).__name__,
                " ".join(str(error).split()),
            )

    def stop(self, *, failed: bool) -> None:
        """Let the thread process the rest and end."""
        self._failed = failed
        self._over.set()

    def wait(self) -> None:
        """Join the thread, for at most the follower's time limit."""
        limit_s = self._follower.limit_s
        self.join(limit_s)
        if self.is_alive():
            logger.warning(
                "--%s had not finished %.0f s after the run and was left; %s",
                self._follower.name,
                limit_s,
                self._follower.missing(),
            )

    def _follow(self) -> None:
        while not self._over.wait(POLL_S) and not self._has_begun():
            pass
        if not self._has_begun():
            return
        self._follower.begin(self._label)
        try:
            while not self._over.wait(POLL_S):
                self._follower.poll()
            self._follower.poll()
        finally:
            self._follower.end(failed=self._failed)

    def _has_begun(self) -> bool:
        """Return whether this run wrote its facts; from then on its files only grow."""
        return self._stamp() not in (None, self._before)

    def _stamp(self) -> tuple[int, int] | None:
        if not self._facts.exists():
            return None
        found = self._facts.stat()
        return found.st_ino, found.st_mtime_ns
