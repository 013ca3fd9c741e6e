"""Lets trackers and uploads read a run directory while something else fills it.

Each follower has a thread. None of them can stop, delay or change the run: one that fails says so
in a line and is gone.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from pydantic import Field

from qat.config import Settings, Trackers
from qat.errors import ConfigError, how_to_install, is_installed
from qat.logs import FACTS
from qat.observe import trackers
from qat.observe.trackers import Curves, Tracker, TrackerStart


class TrackConfig(Settings):
    """Who reads the run directory while a student trains; no part of the run's recipe."""

    wandb: Trackers[bool] = False
    """Follow the run with Weights & Biases; offline where nobody is logged in."""
    wandb_project: Trackers[str] = "qat"
    """Project there."""
    wandb_name: Trackers[str | None] = None
    """Name of the run there; by default that of the run directory."""
    tensorboard: Trackers[bool] = False
    """Write TensorBoard's event files into OUT/tracking/tensorboard."""
    trackio: Trackers[bool] = False
    """Write the run into trackio's local database, as project qat."""
    gdrive_dir: Trackers[Path | None] = None
    """Folder (of a mounted Drive, say) that gets the best checkpoint, the logs and what --resume
    goes on from while the run goes on, under the name of the run directory."""
    gdrive_state_gib: Trackers[float] = Field(16.0, ge=0)
    """Most that may take there what --resume goes on from; 0 sends none."""


logger = logging.getLogger(__name__)

POLL_S = 1.0
TRACKERS = {"wandb": "Wandb", "tensorboard": "TensorBoard", "trackio": "Trackio"}
"""By flag, which is also its library and its extra: the class in `qat.observe.trackers`."""


class Follower(Protocol):
    """Something that reads a run directory over and over."""

    name: str
    """Its flag, without dashes."""
    limit_s: float
    """How long the end of the run waits for it."""

    def begin(self, label: str) -> None:
        """The run directory is there; `label` is the run's name."""

    def poll(self) -> None:
        """Take what is new."""

    def end(self, *, failed: bool) -> None:
        """The run is over, by an error if `failed`; `poll` has taken everything."""

    def missing(self) -> str:
        """What would be missing if the follower stopped now."""


@contextmanager
def follow(run: Path, config: TrackConfig) -> Iterator[None]:
    """Follow the run that the block makes in `run`; at its end all is flushed, with a time limit.

    Raises:
        ConfigError: before the block: a library or a folder that `config` names is not there.
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
        Curves(run, flag, partial(_open_tracker, flag), project=project.get(flag, "qat"))
        for flag in wanted
    ]
    if config.gdrive_dir is not None:
        # imported here: what reaches for archives takes a tenth of the time that --help may
        from qat.observe.upload import Upload, check_folder

        check_folder(run, config.gdrive_dir)
        found.append(Upload(run, config.gdrive_dir, config.gdrive_state_gib))
    return found


def _open_tracker(flag: str, start: TrackerStart) -> Tracker:
    return getattr(trackers, TRACKERS[flag])(start)


class _Thread(threading.Thread):
    """Polls one follower from the moment on that the run has begun (or goes on)."""

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
        """Follow; whatever a library raises ends this thread and nothing else."""
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
        """Let the thread take the rest and end."""
        self._failed = failed
        self._over.set()

    def wait(self) -> None:
        """Wait for the thread, but not forever."""
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
        """Whether the run wrote its facts: from then on its files only grow."""
        return self._stamp() not in (None, self._before)

    def _stamp(self) -> tuple[int, int] | None:
        if not self._facts.exists():
            return None
        found = self._facts.stat()
        return found.st_ino, found.st_mtime_ns
