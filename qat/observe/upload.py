"""Brings a run's best checkpoint, its logs and its newest state to a folder that may fail any time.

FOLDER/RUN/  best.tar.lz4 (at the end {quant}_{scope}_{loss}_{dtype}.tar.lz4), resume.tar.lz4, logs

`resume.tar.lz4` is what a lost run comes back from: its files of numbers, its newest checkpoint
with the trainer's state, and of its best one, where that is another, the student alone.
"""

import logging
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path

from qat.errors import ConfigError, HubError
from qat.files import LEAVING, check_free, held, is_real, real_files
from qat.hub.files import atomic_directory
from qat.hub.push import pack, put
from qat.hub.unpack import extract
from qat.logs import (
    EVENTS,
    FACTS,
    HEARTBEATS,
    METRICS,
    RECIPE,
    STATE_TENSORS,
    SUMMARY,
    TRAINING_CSV,
    VAL_CSV,
)
from qat.models.directory import pointed
from qat.observe.trackers import FOLDER

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
        files = real_files(run / checkpoint, error=HubError)
        if not files:
            raise FileNotFoundError(run / checkpoint)
        for file in files:
            inside = file.relative_to(run / checkpoint)
            if not (checkpoint != pointers["latest"] and inside.as_posix() == STATE_TENSORS):
                link(file, staged / checkpoint / inside)
    for name, checkpoint in pointers.items():
        if checkpoint is not None:
            (staged / name).write_text(f"{checkpoint}\n", encoding="utf-8")
    for path in (path for pattern in NUMBERS for path in run.glob(pattern) if is_real(path, run)):
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


logger = logging.getLogger(__name__)

LOGS = (RECIPE, FACTS, METRICS, TRAINING_CSV, VAL_CSV, SUMMARY, "report.html")
LOGS_OF_RANKS = (HEARTBEATS, EVENTS)
"""Names, and patterns of names."""
BEST = "best.tar.lz4"
WORKSHOP = "upload-"
LOGS_EVERY_S, STATE_EVERY_S = 30.0, 600.0
GIB = 2**30
LONGEST_PAUSE_S = 60.0
LAST_PAUSES_S = (0, 1, 2, 4, 8)


class Upload:
    """Follows `best`, `latest` and the logs. What arrives was read back before it has its name.

    Of the states to go on from one is there, the newest sent; it is replaced at most every
    `STATE_EVERY_S`, and is never larger than `state_gib`.
    """

    name = "gdrive-dir"
    limit_s = 600.0

    def __init__(self, run: Path, folder: Path, state_gib: float) -> None:
        self.run = run
        self.folder = folder
        self.target = folder / run.resolve().name
        self._logs: dict[str, tuple[int, int]] = {}
        self._best: str | None = None
        self._state: str | None = None
        self._most_bytes = state_gib * GIB
        self._is_told_of_size = False
        self._is_open = False
        self._failures = 0
        self._due = self._logs_due = self._state_due = 0.0

    def begin(self, label: str) -> None:
        """Nothing: the folder's part is made with the first file."""

    def poll(self) -> None:
        """Send what is new, unless a failure is too recent; the logs now and then."""
        now = time.monotonic()
        if now < self._due:
            return
        with_logs = now >= self._logs_due
        if with_logs:
            self._logs_due = now + LOGS_EVERY_S
        self._attempt(with_logs=with_logs, with_state=now >= self._state_due)

    def end(self, *, failed: bool) -> None:
        """Send what is left, with a few attempts; what is missing then is said.

        Of a finished run the best checkpoint gets its final name.
        """
        if self._lacks_best() or self._lacks_state():
            logger.info("--gdrive-dir: sending what is left, for at most %.0f s", self.limit_s)
        name = None if failed else self._final()
        for pause_s in LAST_PAUSES_S:
            time.sleep(pause_s)
            if self._attempt(with_logs=True, with_state=True, name=name):
                return
        logger.warning(
            "--gdrive-dir: gave up after %d attempts; %s", len(LAST_PAUSES_S), self.missing()
        )

    def missing(self) -> str:
        """What the folder lacks, and the command that brings it there."""
        commands, state, target = [], "", shlex.quote(str(self.target))
        if self._lacks_state():
            state = f"{named(self.run, 'latest')} cannot be gone on from there"
        if self._lacks_best():
            student = self.run / (self._final() or named(self.run, "best") or "")
            commands.append(f"qat hub push {shlex.quote(str(student))} {target}")
        logs = [str(self.run / name) for name in self._new_logs()]
        if logs:
            commands.append(f"cp {shlex.join(logs)} {target}")
        mkdir = f"mkdir -p {target}"
        by_hand = "by hand: " + " && ".join([mkdir, *commands]) if commands else ""
        return "; ".join(filter(None, (state, by_hand))) or "nothing is missing"

    def _attempt(self, *, with_logs: bool, with_state: bool, name: str | None = None) -> bool:
        """Whether everything that is wanted there is there."""
        try:
            self._open_target()
            for log in self._new_logs() if with_logs else ():
                self._send_log(log)
            if self._lacks_best():
                self._send_best()
            if name is not None and self._best is not None and (self.target / BEST).exists():
                (self.target / BEST).replace(self.target / f"{name}.tar.lz4")
            if with_state and self._lacks_state():
                self._send_state()
        except (OSError, HubError) as error:
            if self._failures == 0:
                logger.warning("--gdrive-dir: %s; trying again", " ".join(str(error).split()))
            self._failures += 1
            self._due = time.monotonic() + min(2.0**self._failures, LONGEST_PAUSE_S)
            return False
        self._failures = 0
        return True

    def _open_target(self) -> None:
        if not self.folder.is_dir():  # else a folder of that name would be made on the local disk
            raise FileNotFoundError(f"{self.folder} is gone (is the Drive still mounted?)")
        if not self._is_open:
            self.target.mkdir(exist_ok=True)
            for partial in self.target.glob(".*.part-*"):
                if LEAVING.fullmatch(partial.name):  # of a run that was killed
                    partial.unlink()
            for workshop in (self.run / FOLDER).glob(f"{WORKSHOP}{'?' * 8}"):
                if is_real(workshop, self.run):
                    shutil.rmtree(workshop)
            self._is_open = True

    def _new_logs(self) -> list[str]:
        found = (path.name for pattern in LOGS_OF_RANKS for path in self.run.glob(pattern))
        stamps = {name: _stamp(self.run / name) for name in (*LOGS, *sorted(found))}
        return [name for name, now in stamps.items() if now not in (None, self._logs.get(name))]

    def _send_log(self, name: str) -> None:
        """Send the log as it is now; it may grow meanwhile."""
        stamp = _stamp(self.run / name)
        with self._workshop() as place:
            snapshot = Path(place, name)
            shutil.copyfile(self.run / name, snapshot)
            put(snapshot, self.target / name, replace=True)
        self._logs[name] = stamp

    def _lacks_best(self) -> bool:
        return named(self.run, "best") not in (None, self._best)

    def _lacks_state(self) -> bool:
        return self._most_bytes > 0 and named(self.run, "latest") not in (None, self._state)

    def _send_best(self) -> None:
        """Pack and send the best checkpoint, which the trainer may delete at any time."""
        pointer = named(self.run, "best")
        with self._workshop() as place:
            student = Path(place, self.run.resolve().name)
            try:
                # without the trainer's state, which lies in a directory of its own
                for file in real_files(self.run / pointer, error=HubError):
                    if file.parent == self.run / pointer:
                        link(file, student / file.name)
            except FileNotFoundError:
                if named(self.run, "best") != pointer:  # send the better one that took its place
                    return
                raise
            archive = Path(place, BEST)
            pack(student, archive)
            put(archive, self.target / BEST, replace=True)
        self._best = pointer

    def _send_state(self) -> None:
        """Pack and send what `--resume` goes on from, unless it is larger than allowed."""
        pointers = named(self.run, "latest"), named(self.run, "best")
        self._state_due = time.monotonic() + STATE_EVERY_S  # also after a failure: packing takes
        with self._workshop() as place:
            staged = Path(place, self.run.resolve().name)
            try:
                stage_run(self.run, staged)
            except FileNotFoundError:
                if (named(self.run, "latest"), named(self.run, "best")) != pointers:
                    self._state_due = 0.0  # newer ones took their place: send those next
                    return
                raise
            size = sum(path.stat().st_size for path in real_files(staged, error=HubError))
            if size <= self._most_bytes:
                archive = Path(place, STATE)
                pack(staged, archive)
                put(archive, self.target / STATE, replace=True)
            elif not self._is_told_of_size:
                self._is_told_of_size = True
                logger.warning(
                    "--gdrive-dir: what --resume goes on from takes %.3g GiB, more than "
                    "--gdrive-state-gib %.3g: it is not sent, and a lost machine loses the run",
                    size / GIB,
                    self._most_bytes / GIB,
                )
        self._state = pointers[0]

    def _workshop(self) -> tempfile.TemporaryDirectory:
        (self.run / FOLDER).mkdir(exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=WORKSHOP, dir=self.run / FOLDER)

    def _final(self) -> str | None:
        """The name of the finished run's checkpoint."""
        found = sorted(self.run.glob("[!.]*/config.json"), key=lambda path: path.stat().st_mtime_ns)
        return found[-1].parent.name if found else None


def check_folder(run: Path, folder: Path) -> None:
    """Refuse a folder that cannot take this run.

    Raises:
        ConfigError: it is not there, not writable, or holds another run of this name.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"gdrive_dir={folder} is not there, expected a folder (is the Drive mounted?); mount "
            "it, make the folder, or leave --gdrive-dir out"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"gdrive_dir={folder} cannot be written to, expected a folder that can; choose another"
        )
    target = folder / run.resolve().name
    is_new = not (run / RECIPE).exists()
    if is_new and target.exists() and any(target.iterdir()):
        way = "go on with it by --resume, " if (target / STATE).exists() else ""
        raise ConfigError(
            f"{target} holds a run of this name, but {run} none, expected neither; {way}choose "
            "another --out or move that one"
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    """The size and time of a log; None if there is none, or a link stands in its place."""
    if path.is_symlink() or not path.is_file():
        return None
    found = path.stat()
    return found.st_size, found.st_mtime_ns
