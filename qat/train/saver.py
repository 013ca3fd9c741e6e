"""Saves a run while it goes on, and finds the checkpoint that a run which was stopped goes on from.

Saving makes a copy in host memory first, then files on a thread behind. A checkpoint has its name,
and the pointers name it, only when its files have been read back and hold what was meant; where
they were damaged later, the newest one that is whole takes its place.
"""

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.backend import device as backends
from qat.backend.copying import Copying, KeptCopies
from qat.data.pipeline import Behind
from qat.errors import CheckpointError
from qat.files import sync
from qat.logs import METRICS, STATE_TENSORS
from qat.models.checkpoint import write_checkpoint
from qat.models.directory import atomic_directory
from qat.models.language_model import LanguageModel
from qat.models.stored_state import RawState, raw_state, stored_state
from qat.ranks import Ranks
from qat.train.config import TrainConfig
from qat.train.judge import CodeWatch
from qat.train.optim import Optimizer
from qat.train.proof import FORMAT, STATE, problem, prove, read_state
from qat.train.run import Run

logger = logging.getLogger(__name__)

MODEL = "model."
"""Of the names of the model's tensors beside those of the trainer, in memory only."""


class _Copy(NamedTuple):
    """A run's state as it was after a step."""

    path: Path
    tensors: dict[str, Tensor]
    """On the host, the raw state of the model by names that begin with `model.`."""
    copying: Copying
    facts: dict[str, object]
    is_best: bool


class Saver:
    """Writes the checkpoints of one run, at most one behind, and lets its pointers name them."""

    def __init__(
        self,
        run: Run,
        student: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Optimizer,
        *,
        codes: CodeWatch,
        config: TrainConfig,
        ranks: Ranks,
    ) -> None:
        self._run = run
        self._student = student
        self._tokenizer = tokenizer
        self._optimizer = optimizer
        self._codes = codes
        self._config = config
        self._ranks = ranks
        self._backend = backends.select(config.device)
        self._behind: Behind[None, _Copy] = Behind(self._write, None)
        self._kept = KeptCopies()
        """Of what does not learn."""
        self.saved: int | None = None
        """The step that was saved last."""
        self.seconds: dict[str, float] = {}
        """What the parts of the last save took. The loop stood still for `wait` (for the save
        before), `gather` and `begin` (the copies); `arrive`, `convert`, `write`, `prove` are
        behind."""

    def save(self, step: int, best: float, *, is_best: bool) -> None:
        """Copy the state after `step` and have it written; all ranks call it, the first writes.

        Waits for the save before; for the device the first time only.

        Raises:
            CheckpointError: that one could not be written, or held a scale that is not finite as
                stored.
        """
        with self._timed("wait"):
            self._behind.state()
        with self._timed("gather"):
            raw, gathered = raw_state(self._student.model), self._optimizer.gathered()
            rng = {f"rng.{name}": state for name, state in self._backend.rng_state().items()}
            state = {**self._optimizer.state(), **rng, **self._codes.state()}
        self.saved = step
        if not self._ranks.is_first:
            return
        facts = {"format": FORMAT, "step": step, "best": best, **self._run.identity}
        with self._timed("begin"):
            copies, copying = self._copied(raw, state)
        self._optimizer.copying = copying
        path = self._run.checkpoint_path(step)
        # the copies begin after those of what was gathered, so waiting for them waits for both
        self._behind.push(_Copy(path, copies | gathered, copying, facts, is_best))

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
            CheckpointError: the last save could not be written.
        """
        self._behind.state()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._behind.__exit__(kind, error, traceback)

    def _copied(self, raw: RawState, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], Copying]:
        """Copies of the model's raw state, named `model.`, and of `state`.

        What does not learn is copied once, by the first save, which waits for it; on the host it is
        its own copy.
        """
        learning = {MODEL + name for name in self._optimizer.parameters}
        own = {MODEL + name: tensor for name, tensor in raw.own.items()}
        still = {name: tensor for name, tensor in own.items() if name not in learning}
        missing = self._kept.missing(still)
        if missing:
            elsewhere = {n: tensor for n, tensor in missing.items() if not _is_on_host(tensor)}
            copies, copying = self._backend.copied_to_host(elsewhere)
            copying.wait()
            self._kept.keep(missing, missing | copies)
        moving = {name: tensor for name, tensor in own.items() if name not in still}
        made = {MODEL + name: tensor for name, tensor in raw.made.items()}
        copies, copying = self._backend.copied_to_host(moving | made | state)
        return copies | self._kept.of(list(still)), copying

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - began

    def _write(self, _: None, copy: _Copy) -> None:
        """Write, prove, then let the pointers move; on the thread behind."""
        with self._timed("arrive"):
            copy.copying.wait()
        with self._timed("convert"):
            packed, state = self._as_stored(copy.tensors)
        with atomic_directory(copy.path, replace=True) as partial:
            with self._timed("write"):
                write_checkpoint(self._student.model, self._tokenizer, partial, packed)
                (partial / STATE).parent.mkdir()
                safetensors.torch.save_file(state, partial / STATE_TENSORS)
                (partial / STATE).write_text(json.dumps(copy.facts) + "\n", encoding="utf-8")
            with self._timed("prove"):
                prove(partial, packed, state)
        metrics = self._run.path / METRICS
        if metrics.exists():  # what is known of the steps up to here must not be lost after it
            sync(metrics)
        if copy.is_best:
            self._run.point("best", copy.path)
        self._run.point("latest", copy.path)
        self._run.remove_old(self._config.keep, self._config.milestone_every)

    def _as_stored(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The packed model as a checkpoint stores it, and the trainer's state."""
        raw: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            (raw if name.startswith(MODEL) else state)[name.removeprefix(MODEL)] = tensor
        return stored_state(self._student.model, raw), state


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class Choice(NamedTuple):
    """Where a run goes on."""

    checkpoint: Path | None
    """None where it begins."""
    skipped: list[str]
    """Names of newer checkpoints that are damaged."""
    is_best_lost: bool
    """Whether the best student so far is among them."""


def choose(run: Run, *, begins_anew: bool = False) -> Choice:
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


def best_of(run: Run) -> Path:
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


def _is_lost(run: Run, chosen: Path) -> bool:
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
