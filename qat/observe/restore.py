"""What of a run goes on elsewhere, as one archive, and how a lost run comes back from it.

A run needs its files of numbers, its newest checkpoint with the trainer's state, and of its best
one, where that is another, the student alone.
"""

import logging
import os
import shutil
from pathlib import Path

from qat.files import check_free
from qat.hub.files import atomic_directory
from qat.hub.unpack import extract
from qat.lock import held
from qat.logs import (
    EVENTS,
    FACTS,
    HEARTBEATS,
    METRICS,
    RECIPE,
    STATE_TENSORS,
    TRAINING_CSV,
    VAL_CSV,
)
from qat.models.source import pointed
from qat.observe.trackers import FOLDER

logger = logging.getLogger(__name__)

STATE = "resume.tar.lz4"
NUMBERS = (RECIPE, FACTS, METRICS, HEARTBEATS, EVENTS, TRAINING_CSV, VAL_CSV, f"{FOLDER}/*.json")


def stage_run(run: Path, staged: Path) -> None:
    """Fill the new directory `staged` with what the run in `run` goes on from.

    Checkpoints are links where that is possible, so that nothing that is deleted later is lost.

    Raises:
        FileNotFoundError: a checkpoint is being deleted, for a newer one took its place.
    """
    # `latest` first: a `best` that is newer than it does no harm, an older one would be taken for
    # what the newer state calls the best
    pointers = {name: named(run, name) for name in ("latest", "best")}
    for checkpoint in filter(None, dict.fromkeys(pointers.values())):
        files = sorted(path for path in (run / checkpoint).rglob("*") if path.is_file())
        if not files:
            raise FileNotFoundError(run / checkpoint)
        for file in files:
            inside = file.relative_to(run / checkpoint)
            if not (checkpoint != pointers["latest"] and inside.as_posix() == STATE_TENSORS):
                link(file, staged / checkpoint / inside)
    for name, checkpoint in pointers.items():
        if checkpoint is not None:
            (staged / name).write_text(f"{checkpoint}\n", encoding="utf-8")
    for path in (path for pattern in NUMBERS for path in run.glob(pattern)):
        copy = staged / path.relative_to(run)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def restore(run: Path, folder: Path) -> None:
    """Bring a run that is gone back from what an upload left in `folder`, if it is there.

    Raises:
        ConfigError: something else is in its place, or works there.
        HubError: the archive is damaged.
    """
    archive = folder / run.resolve().name / STATE
    if (run / RECIPE).exists() or not archive.exists():
        return
    with held(run):
        check_free(run)
        with atomic_directory(run) as partial:
            extract(archive, partial)
    logger.info("brought %s back from %s, as it was at %s", run, archive, named(run, "latest"))


def link(file: Path, target: Path) -> None:
    """Give a file another name, or copy it where links are not possible.

    Raises:
        FileNotFoundError: it is gone.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # no links here
        shutil.copyfile(file, target)


def named(run: Path, name: str) -> str | None:
    """The checkpoint that `best` or `latest` of a run names, relative to it; None for no name."""
    checkpoint = pointed(run, name)
    return None if checkpoint is None else checkpoint.relative_to(run).as_posix()
