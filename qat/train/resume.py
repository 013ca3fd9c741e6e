"""Which checkpoint a run goes on from, when the newest one may be damaged."""

import logging
import math
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from qat.errors import CheckpointError
from qat.train.proof import STATE_TENSORS, problem, read_state
from qat.train.run import Run

logger = logging.getLogger(__name__)


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
