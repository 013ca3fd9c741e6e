"""Stopping and resuming a run: stop requests, the checkpoint to resume, the evaluation set."""

import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from qat.data.reader import TeacherCache
from qat.errors import CheckpointError, ConfigError
from qat.logs import FACTS, STATE_TENSORS
from qat.models.directory import CHECKPOINTS
from qat.ranks import Ranks
from qat.train.judge import Judged
from qat.train.optim import lr_share
from qat.train.run import BEGIN_THERE, WHAT_CHANGED, RunDirectory, read_state, versions
from qat.train.saver import problem

logger = logging.getLogger(__name__)

HALT, SOAK = "HALT", "--soak"
"""A file whose creation stops the run, which then removes it; and a stop after a given step."""
LOOK_S = 1.0
"""Seconds between checks for that file."""
EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, HALT: 3, SOAK: 0}
"""Exit code by cause of a stop: 128 plus the signal's number, as shells report it, 3, or 0."""


class Stops:
    """Records requests to stop inside its block; the loop polls them between steps.

    The first signal is recorded. After it SIGINT and SIGTERM have their old handlers again, so that
    a second one ends the process at once. A closing terminal sends SIGHUP several times, which
    counts as one request; where SIGHUP is ignored, as under `nohup`, it stays ignored.
    """

    def __init__(self, halt: Path) -> None:
        self.last_step: int | None = None
        """The step after which a soak stops; None for a run to its end."""
        self._halt = halt
        self._reason: str | None = None
        self._looked_s = -LOOK_S
        self._handlers: dict[int, Any] = {}

    def requested(self, taken: int = 0) -> str | None:
        """Return `SIGTERM`, `SIGINT`, `SIGHUP` or `HALT` after such a request, else None.

        Return `--soak` if `taken` steps are all before the last one of a soak, or more.
        """
        if self._reason is not None:
            return self._reason
        if self.last_step is not None and taken + 1 >= self.last_step:
            return SOAK
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        if self._halt.exists():
            self._reason = HALT
        return self._reason

    def clear_halt(self) -> None:
        """Remove the file after stopping, so that the run can be resumed."""
        try:
            self._halt.unlink(missing_ok=True)
        except OSError as error:  # a directory, or another user's file
            logger.warning(
                "%s cannot be removed (%s): remove it before you go on", self._halt, error.strerror
            )

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore(*self._handlers)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._reason = self._reason or signal.Signals(number).name
        if number == signal.SIGHUP:  # writes to a closed terminal fail: redirect them to /dev/null
            for descriptor in (1, 2):
                try:
                    os.write(descriptor, b"")
                except OSError:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        self._restore(signal.SIGINT, signal.SIGTERM)

    def _restore(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._handlers:
                signal.signal(number, self._handlers.pop(number))


class Choice(NamedTuple):
    """The checkpoint from which a run continues."""

    checkpoint: Path | None
    """The checkpoint; None for a new run."""
    skipped: list[str]
    """Names of newer checkpoints that are damaged."""
    is_best_lost: bool
    """True if the best student so far is among the damaged ones."""
    step: int = 0
    """Steps taken; set once the checkpoint is read."""
    best: float = math.inf
    """The best score so far."""
    begun: dict[str, Any] = {}
    """Facts that the run began with."""
    grown: dict[str, Any] = {}
    """New facts for `run.json` of a cache that has more sequences than before, by name."""


def choose_together(
    run: RunDirectory,
    wanted: dict[str, Any],
    *,
    resume: bool,
    begins_anew: bool,
    ranks: Ranks,
) -> Choice:
    """Let the first rank choose the checkpoint and return it on all ranks."""

    def choose_alone() -> Choice:
        is_begun = ranks.is_first and run.is_begun(wanted, resume=resume)
        return choose(run, begins_anew=begins_anew) if is_begun else Choice(None, [], False)

    checkpoint, *rest = ranks.sync_errors(choose_alone)[:3]
    found = json.dumps([checkpoint.name if checkpoint else "", *rest])
    name, skipped, is_lost = json.loads(ranks.texts(found)[0])
    return Choice(run.path / CHECKPOINTS / name if name else None, skipped, is_lost)


def choose(run: RunDirectory, *, begins_anew: bool = False) -> Choice:
    """Return the checkpoint that `latest` names, or the newest whole one; log what is skipped.

    A run that was killed before its first checkpoint starts again; if it had already taken steps,
    only with `begins_anew`.

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
    skipped: dict[Path, str] = {}
    for chosen in candidates:
        if (damage := problem(chosen)) is None:
            break
        skipped[chosen] = damage
    else:
        found = "; ".join(f"{path.name}: {damage}" for path, damage in skipped.items())
        raise CheckpointError(
            f"{run.path} has no checkpoint that is whole ({found or 'none at all'}); expected one "
            "to go on from: restore one or choose another --out"
        )
    for path, damage in skipped.items():
        logger.warning("%s is damaged (%s); going on from %s", _short(path), damage, _short(chosen))
    return Choice(chosen, [path.name for path in skipped], _is_lost(run, chosen))


def best_of(run: RunDirectory) -> Path:
    """Return the best student's checkpoint; if damaged, the newest whole one, with a warning.

    Raises:
        CheckpointError: none is whole.
    """
    best = run.pointed("best")
    if best is not None and (damage := problem(best, is_student=True)) is None:
        return best
    whole = next((path for path in run.checkpoints()[::-1] if problem(path) is None), None)
    if best is None or whole is None:
        raise CheckpointError(
            f"{run.path} has no checkpoint that is whole, expected the best one; restore it or "
            "choose another --out"
        )
    logger.warning("%s is damaged (%s); taking %s instead", _short(best), damage, _short(whole))
    return whole


def load_training_state(checkpoint: Path) -> tuple[dict[str, Tensor], dict]:
    """Load what a `Saver` wrote of the trainer: tensors, and facts such as step and best score.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return safetensors.torch.load_file(checkpoint / STATE_TENSORS), read_state(checkpoint)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{checkpoint}: the trainer's state cannot be read ({error}); remove this checkpoint "
            "and go on with --resume from an older one"
        ) from None


def _is_lost(run: RunDirectory, chosen: Path) -> bool:
    """Return whether the run had a best student, but `best` names no whole checkpoint."""
    if not run.has_pointer("best"):
        is_first = not run.has_pointer("latest") and run.checkpoints() == [chosen]
        if is_first or not math.isfinite(read_state(chosen)["best"]):
            return False
    best = run.pointed("best")
    damage = "nothing names it" if best is None else problem(best, is_student=True)
    if damage is not None:
        logger.warning("the best checkpoint is damaged (%s): the best is sought anew", damage)
    return damage is not None


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def cache_facts(cache: TeacherCache) -> dict[str, Any]:
    """Return a cache's facts for `run.json`: numbers of sequences, and how it was made."""
    manifest = cache.manifest
    settings = {k: v for k, v in manifest.settings.recorded().items() if k != "num_sequences"}
    made = {"teacher": manifest.teacher.identity, "dtype": manifest.teacher.dtype}
    made |= {name: getattr(manifest, name) for name in ("tokenizer", "has_tail", "negatives")}
    counts = {split: cache.num_sequences(split) for split in ("train", "held_out")}
    return {"cache_sequences": counts, "cache_settings": {**settings, **made}}


def check_identity(
    run: RunDirectory, begun: dict[str, Any], cache: TeacherCache, identity: dict[str, Any]
) -> dict[str, Any]:
    """Check that a run is resumed with what it began with; a cache may have more sequences.

    Returns:
        New facts for `run.json` of such a cache, by name.

    Raises:
        ConfigError: something has another value, or the cache differs in more than that.
    """
    grown: dict[str, Any] = {}
    content = identity["cache_content"]
    # runs older than `cache_settings` do not know whether a cache has grown
    if begun.get("cache_content", content) != content and "cache_settings" in begun:
        new = cache_facts(cache)
        known, made = begun["cache_settings"], new["cache_settings"]
        for name in sorted(known.keys() | made.keys()):
            if known.get(name) != made.get(name):
                raise ConfigError(
                    f"{cache.directory} has {name}={made.get(name)}, but the run in {run.path} was "
                    f"begun with {known.get(name)}: a cache may have more sequences, and differ in "
                    f"nothing else; restore it or choose another --out{BEGIN_THERE}"
                )
        before, now = (facts["cache_sequences"]["train"] for facts in (begun, new))
        if now < before:
            raise ConfigError(
                f"{cache.directory} has {now} training sequences, but the run in {run.path} "
                f"learned from {before}, expected as many or more; restore it or choose another "
                f"--out{BEGIN_THERE}"
            )
        if now > before:  # otherwise they are as many, but different ones
            grown = {"cache_content": content, "cache_sequences": new["cache_sequences"]}
    for name, value in identity.items():
        is_known = value is not None and name not in grown
        if is_known and begun.get(name, value) != value:
            raise ConfigError(
                f"{name}={value}, but the run in {run.path} was begun with {begun[name]}: "
                f"{WHAT_CHANGED[name]}; restore it or choose another --out{BEGIN_THERE}"
            )
    return grown


def same_judged(cache: TeacherCache, count: int, run: RunDirectory) -> Judged:
    """Return the run's original evaluation sequences; for a new run, the first `count`.

    Raises:
        ConfigError: the cache lacks some of them.
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


def record_beginning(
    run: RunDirectory,
    wanted: dict[str, Any],
    *,
    choice: Choice,
    facts: dict[str, Any],
    forced: Sequence[str],
) -> None:
    """Write the run's facts, and remove what it wrote after the step from which it is resumed."""
    old = choice.begun
    resumed = old.get("resumed", [])
    if choice.checkpoint is None:
        run.begin(wanted)
        run.set_aside()
    else:
        changed = run.changes(wanted)
        changed |= {k: (old[k], v) for k, v in versions().items() if old.get(k, v) != v}
        _log_changes(run, wanted, changed, choice=choice, facts=facts)
        changed |= {name: (old[name], value) for name, value in choice.grown.items()}
        entry = {
            "step": choice.step,
            "from": choice.checkpoint.name,
            "world_size": facts["world_size"],
            "skipped": choice.skipped,
        }
        if changed:
            entry["changed"] = {name: list(values) for name, values in changed.items()}
            run.begin(wanted)
        resumed = [*resumed, entry]
    run.remove_leavings()
    if choice.is_best_lost and choice.checkpoint is not None:
        run.point("best", choice.checkpoint)
    if choice.checkpoint is not None and not run.has_pointer("latest"):
        # killed between writing the first checkpoint and its pointers
        if not run.has_pointer("best") and math.isfinite(choice.best):
            run.point("best", choice.checkpoint)
        run.point("latest", choice.checkpoint)
    run.forget_after(choice.step)
    forced = list(dict.fromkeys([*old.get("forced", []), *forced]))
    run.write_facts(**facts, forced=forced, resumed=resumed)


def _log_changes(
    run: RunDirectory,
    wanted: dict[str, Any],
    changed: dict[str, tuple[object, object]],
    *,
    choice: Choice,
    facts: dict[str, Any],
) -> None:
    """Log changed settings, and what a changed number of steps does to the learning rates."""
    if choice.grown:
        logger.info(
            "%s goes on with %d training sequences instead of %d, judged by the same %d",
            run.path,
            choice.grown["cache_sequences"]["train"],
            run.facts()["cache_sequences"]["train"],
            len(facts["judged"]),
        )
    if not run.facts():
        logger.warning(
            "%s is gone: what it said is taken from %s, or found out anew",
            run.path / FACTS,
            choice.checkpoint,
        )
    for name, (old, new) in changed.items():
        logger.info("%s goes on with %s=%s instead of %s", run.path, name, new, old)
    schedule, max_steps = wanted["schedule"], wanted["max_steps"]
    if "max_steps" in changed and schedule != "constant" and choice.step < max_steps:
        step, before = choice.step, run.begun_with()[0].max_steps
        shares = [
            lr_share(
                at,
                of,
                schedule=schedule,
                warmup_steps=wanted["warmup_steps"],
                min_ratio=wanted["min_lr_ratio"],
            )
            for at, of in ((max(0, step - 1), before), (step, max_steps))
        ]
        logger.info(
            "from here on the rates follow the %s schedule of %d steps: they were at %.2g of their "
            "peak and go on at %.2g",
            schedule,
            max_steps,
            *shares,
        )
