"""Upload of the best checkpoint, the logs and the latest state to a folder that may fail any time.

FOLDER/RUN/  best.tar.lz4 (at the end {quant}_{scope}_{loss}_{dtype}.tar.lz4), resume.tar.lz4, logs

`resume.tar.lz4` restores a lost run. It holds the metrics files, the latest checkpoint with the
trainer's state, and the student of the best checkpoint if that is another one.
"""

import logging
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path

from qat.errors import ConfigError, HubError
from qat.extensions.trackers.curves import FOLDER
from qat.files import LEAVING, check_free, held, is_real, real_files
from qat.hub.files import atomic_directory
from qat.hub.push import pack, put
from qat.hub.unpack import extract
from qat.hub.web import pause_s
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
from qat.process import GIB

STATE = "resume.tar.lz4"
NUMBERS = (RECIPE, FACTS, METRICS, HEARTBEATS, EVENTS, TRAINING_CSV, VAL_CSV, f"{FOLDER}/*.json")


def stage_run(run: Path, staged: Path) -> None:
    """Fill the new directory `staged` with the files that resume the run in `run`.

    Checkpoints are hard links where possible: the trainer may delete its own names meanwhile.

    Raises:
        FileNotFoundError: a checkpoint was deleted because a newer one replaced it.
    """
    # `latest` first: a `best` that is newer than `latest` is harmless, but an older one would not
    # be the best that the newer state refers to
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
    """Restore a lost run from the upload in `folder`, if there is one.

    Raises:
        ConfigError: `run` is not empty, or another process uses it.
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
    """Hard-link a file, or copy it where links are not possible.

    Raises:
        FileNotFoundError: the file no longer exists.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no hard links
        shutil.copyfile(file, target)


def named(run: Path, name: str) -> str | None:
    """Return the checkpoint that pointer `name` of a run holds, relative to it; None without."""
    checkpoint = pointed(run, name)
    return None if checkpoint is None else checkpoint.relative_to(run).as_posix()


logger = logging.getLogger(__name__)

LOGS = (RECIPE, FACTS, METRICS, TRAINING_CSV, VAL_CSV, SUMMARY, "report.html")
LOGS_OF_RANKS = (HEARTBEATS, EVENTS)  # patterns of the log names that each rank has of its own
BEST = "best.tar.lz4"
WORKSHOP = "upload-"
LOGS_EVERY_S, STATE_EVERY_S = 30.0, 600.0
LAST_PAUSES_S = (0, 1, 2, 4, 8)


class Upload:
    """Uploads `best`, `latest` and the logs. Each file is verified before it gets its final name.

    The folder holds one state to resume from: the newest one uploaded. It is replaced at most every
    `STATE_EVERY_S` seconds, and never exceeds `state_gib`.
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
        """Do nothing: the run's folder is created with the first upload."""

    def poll(self) -> None:
        """Upload what is new, except during backoff; logs at most every `LOGS_EVERY_S`."""
        now = time.monotonic()
        if now < self._due:
            return
        with_logs = now >= self._logs_due
        if with_logs:
            self._logs_due = now + LOGS_EVERY_S
        self._attempt(with_logs=with_logs, with_state=now >= self._state_due)

    def end(self, *, failed: bool) -> None:
        """Upload the rest, with a few retries; log what is still missing after them.

        In a finished run the best checkpoint gets its final name.
        """
        if self._lacks_best() or self._lacks_state():
            logger.info("--gdrive-dir: sending what is left, for at most %.0f s", self.limit_s)
        name = None if failed else self._final()
        for seconds in LAST_PAUSES_S:
            time.sleep(seconds)
            if self._attempt(with_logs=True, with_state=True, name=name):
                return
        logger.warning(
            "--gdrive-dir: gave up after %d attempts; %s", len(LAST_PAUSES_S), self.missing()
        )

    def missing(self) -> str:
        """Return what the folder lacks and the commands that copy it."""
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
            self._due = time.monotonic() + pause_s(self._failures + 1)
            return False
        self._failures = 0
        return True

    def _open_target(self) -> None:
        if not self.folder.is_dir():  # else mkdir would create it on the local disk
            raise FileNotFoundError(f"{self.folder} is gone (is the Drive still mounted?)")
        if not self._is_open:
            self.target.mkdir(exist_ok=True)
            for partial in self.target.glob(".*.part-*"):
                if LEAVING.fullmatch(partial.name):  # left by a run that was killed
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
        """Upload a snapshot of the log, which may grow meanwhile."""
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
        """Pack and upload the best checkpoint, which the trainer may delete at any time."""
        pointer = named(self.run, "best")
        with self._workshop() as place:
            student = Path(place, self.run.resolve().name)
            try:
                # without the trainer's state, which is in a subdirectory
                for file in real_files(self.run / pointer, error=HubError):
                    if file.parent == self.run / pointer:
                        link(file, student / file.name)
            except FileNotFoundError:
                if named(self.run, "best") != pointer:  # a better one replaced it: upload that next
                    return
                raise
            archive = Path(place, BEST)
            pack(student, archive)
            put(archive, self.target / BEST, replace=True)
        self._best = pointer

    def _send_state(self) -> None:
        """Pack and upload the state for `--resume`, unless it is larger than allowed."""
        pointers = named(self.run, "latest"), named(self.run, "best")
        self._state_due = time.monotonic() + STATE_EVERY_S  # also on failure: packing is slow
        with self._workshop() as place:
            staged = Path(place, self.run.resolve().name)
            try:
                stage_run(self.run, staged)
            except FileNotFoundError:
                if (named(self.run, "latest"), named(self.run, "best")) != pointers:
                    self._state_due = 0.0  # newer ones replaced them: upload those next
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
        """Return the name of the finished run's checkpoint; None if there is none yet."""
        found = sorted(self.run.glob("[!.]*/config.json"), key=lambda path: path.stat().st_mtime_ns)
        return found[-1].parent.name if found else None


def check_folder(run: Path, folder: Path) -> None:
    """Raise ConfigError for a folder that cannot receive this run.

    Raises:
        ConfigError: the folder is missing, not writable, or holds another run of this name.
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
    """Return the size and time of a log; None if it is missing or a symbolic link."""
    if path.is_symlink() or not path.is_file():
        return None
    found = path.stat()
    return found.st_size, found.st_mtime_ns
