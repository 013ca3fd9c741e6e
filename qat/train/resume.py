"""How a run stops and goes on: who asks it to stop, where it goes on, and by what it is judged."""

import logging
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from qat.data.reader import TeacherCache
from qat.errors import CheckpointError, ConfigError
from qat.logs import STATE_TENSORS
from qat.train.judge import Judged
from qat.train.run import BEGIN_THERE, RunDirectory, read_state
from qat.train.saver import problem

logger = logging.getLogger(__name__)

HALT = "HALT"
"""The file that anybody may make; its run removes it as it obeys."""
LOOK_S = 1.0
"""Seconds between looks at that file."""
EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, HALT: 3}


class Stops:
    """Notes wishes to stop while its block runs; the loop asks for them between steps.

    The first signal is noted. After it SIGINT and SIGTERM have their old handlers back: a second
    one ends the process at once. A terminal that closes says so several times, which is one wish;
    where SIGHUP is ignored, as below `nohup`, it stays so.
    """

    def __init__(self, halt: Path) -> None:
        self._halt = halt
        self._wish: str | None = None
        self._looked_s = -LOOK_S
        self._handlers: dict[int, Any] = {}

    def wanted(self) -> str | None:
        """`SIGTERM`, `SIGINT`, `SIGHUP` or `HALT`, once somebody asked; else None."""
        if self._wish is not None:
            return self._wish
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        if self._halt.exists():
            self._wish = HALT
        return self._wish

    def obeyed(self) -> None:
        """The run has stopped: remove the file, so that it can go on."""
        try:
            self._halt.unlink(missing_ok=True)
        except OSError as error:  # a directory, or one of somebody else
            logger.warning(
                "%s cannot be removed (%s): remove it before you go on", self._halt, error.strerror
            )

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore(*self._handlers)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._wish = self._wish or signal.Signals(number).name
        if number == signal.SIGHUP:
            _let_go_of_terminal()
        self._restore(signal.SIGINT, signal.SIGTERM)

    def _restore(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._handlers:
                signal.signal(number, self._handlers.pop(number))


def _let_go_of_terminal() -> None:
    """Send to nowhere what would go to a terminal that is gone: writing there fails."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class Choice(NamedTuple):
    """Where a run goes on."""

    checkpoint: Path | None
    """None where it begins."""
    skipped: list[str]
    """Names of newer checkpoints that are damaged."""
    is_best_lost: bool
    """Whether the best student so far is among them."""


def choose(run: RunDirectory, *, begins_anew: bool = False) -> Choice:
    """The checkpoint that `latest` names, or the newest one that is whole; says what it skips.

    A run that was killed before its first checkpoint begins again. If it had taken steps already,
    that is done with `begins_anew` only.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged; or none, but steps.
    """
    candidates = run.checkpoints()[::-1]
    latest = run.pointed("latest")
    if latest is not None:
        candidates = [latest, *(path for path in candidates if path != latest)]
    elif not run.has_pointer("latest") and not candidates:
        if (steps := run.recorded_steps()) and not begins_anew:
            raise CheckpointError(
                f"{run.path} was stopped after step {steps} and has no checkpoint, expected one to "
                "go on from; choose another --out, or begin anew with --resume auto, which keeps "
                f"what was recorded in {run.next_attempt()}"
            )
        return Choice(None, [], False)
    found: dict[Path, str | None] = {}
    for path in candidates:
        found[path] = problem(path)
        if found[path] is None:
            break
    skipped = [path for path, trouble in found.items() if trouble is not None]
    if not candidates or len(skipped) == len(candidates):
        raise CheckpointError(
            f"{run.path} has no checkpoint that is whole ("
            + ("; ".join(f"{path.name}: {found[path]}" for path in skipped) or "none at all")
            + "); expected one to go on from: restore one or choose another --out"
        )
    chosen = candidates[len(skipped)]
    for path in skipped:
        logger.warning(
            "%s is damaged (%s); going on from %s", _short(path), found[path], _short(chosen)
        )
    return Choice(chosen, [path.name for path in skipped], _is_lost(run, chosen))


def best_of(run: RunDirectory) -> Path:
    """The best student's checkpoint; if that is damaged, the newest whole one, with a warning.

    Raises:
        CheckpointError: none is whole.
    """
    best = run.pointed("best")
    if best is not None and (trouble := problem(best, is_student=True)) is None:
        return best
    whole = next((path for path in run.checkpoints()[::-1] if problem(path) is None), None)
    if best is None or whole is None:
        raise CheckpointError(
            f"{run.path} has no checkpoint that is whole, expected the best one; restore it or "
            "choose another --out"
        )
    logger.warning("%s is damaged (%s); taking %s instead", _short(best), trouble, _short(whole))
    return whole


def load_training_state(checkpoint: Path) -> tuple[dict[str, Tensor], dict]:
    """What a `Saver` wrote of the trainer: its tensors, and step, best and the like.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    try:
        return safetensors.torch.load_file(checkpoint / STATE_TENSORS), read_state(checkpoint)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{checkpoint}: the trainer's state cannot be read ({error}); remove this checkpoint "
            "and go on with --resume from an older one"
        ) from None


def _is_lost(run: RunDirectory, chosen: Path) -> bool:
    """Whether there is a best one, but `best` names no whole checkpoint."""
    if not run.has_pointer("best"):
        is_first = not run.has_pointer("latest") and run.checkpoints() == [chosen]
        if is_first or not math.isfinite(read_state(chosen)["best"]):
            return False
    best = run.pointed("best")
    trouble = "nothing names it" if best is None else problem(best, is_student=True)
    if trouble is not None:
        logger.warning("the best checkpoint is damaged (%s): the best is sought anew", trouble)
    return trouble is not None


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def cache_facts(cache: TeacherCache) -> dict[str, Any]:
    """What `run.json` keeps of a cache: how many sequences it has, and all else that made it."""
    manifest = cache.manifest
    settings = {k: v for k, v in manifest.settings.recorded().items() if k != "num_sequences"}
    made = {"teacher": manifest.teacher.identity, "dtype": manifest.teacher.dtype}
    made |= {name: getattr(manifest, name) for name in ("tokenizer", "has_tail", "negatives")}
    counts = {split: cache.num_sequences(split) for split in ("train", "held_out")}
    return {"cache_sequences": counts, "cache_settings": {**settings, **made}}


def holds_more(cache: TeacherCache, content: str, run: RunDirectory) -> bool:
    """Whether the cache has more sequences than the one that the run knows, and is made alike.

    Of a run from before its facts were kept nobody can know.

    Raises:
        ConfigError: it has other content, and differs in more than that.
    """
    old, new = run.facts(), cache_facts(cache)
    if old.get("cache_content", content) == content or "cache_settings" not in old:
        return False
    known, made = old["cache_settings"], new["cache_settings"]
    counts = [facts["cache_sequences"]["train"] for facts in (old, new)]
    for name in sorted(known.keys() | made.keys()):
        if known.get(name) != made.get(name):
            raise ConfigError(
                f"{cache.directory} has {name}={made.get(name)}, but the run in {run.path} was "
                f"begun with {known.get(name)}: a cache may have more sequences, and differ in "
                f"nothing else; restore it or choose another --out{BEGIN_THERE}"
            )
    if counts[1] < counts[0]:
        raise ConfigError(
            f"{cache.directory} has {counts[1]} training sequences, but the run in {run.path} "
            f"learned from {counts[0]}, expected as many or more; restore it or choose another "
            f"--out{BEGIN_THERE}"
        )
    return bool(counts[1] > counts[0])


def same_judged(cache: TeacherCache, count: int, run: RunDirectory) -> Judged:
    """What has judged the run from its beginning; of a new one, the first `count` sequences.

    Raises:
        ConfigError: the cache does not hold all of it.
    """
    marks = run.facts().get("judged")
    if marks is None:
        return Judged.first(cache, count)
    judged = Judged.found(cache, marks)
    if judged is None:
        raise ConfigError(
            f"{cache.directory} lacks some of the {len(marks)} held-out sequences that judge the "
            f"run in {run.path}, expected all of them: the best student is told by the same ones "
            "from the first to the last; build it from the same documents and more behind them, "
            f"or choose another --out{BEGIN_THERE}"
        )
    return judged
