"""Saves a run while it goes on: a copy in host memory first, then files on a thread behind.

A checkpoint has its name, and the pointers name it, only when its files have been read back and
hold what was meant.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import safetensors.torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat import backend as backends
from qat.data.pipeline import Behind
from qat.files import sync
from qat.logs import METRICS
from qat.models.checkpoint import write_checkpoint
from qat.models.directory import atomic_directory
from qat.models.hf_quantizer import packed_state_dict
from qat.models.language_model import LanguageModel
from qat.ranks import Ranks
from qat.train.codes import CodeWatch
from qat.train.config import TrainConfig
from qat.train.optim import Optimizer
from qat.train.proof import FORMAT, STATE, STATE_TENSORS, prove
from qat.train.run import Run

PACKED = "packed."


class _Copy(NamedTuple):
    """A run's state as it was after a step."""

    path: Path
    tensors: dict[str, Tensor]
    """On the host, those of the packed model by names that begin with `packed.`."""
    copying: backends.Copying
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
        self.saved: int | None = None
        """The step that was saved last."""

    def save(self, step: int, best: float, *, is_best: bool) -> None:
        """Copy the state after `step` and have it written; all ranks call it, the first writes.

        Waits for the save before.

        Raises:
            CheckpointError: that one could not be written, or a scale is not finite as stored.
        """
        self._behind.state()
        packed = packed_state_dict(self._student.model)
        gathered = self._optimizer.gathered()
        state = {**self._optimizer.state(), **self._rng_tensors(), **self._codes.state()}
        self.saved = step
        if not self._ranks.is_first:
            return
        facts = {"format": FORMAT, "step": step, "best": best, **self._run.identity}
        every = {PACKED + name: tensor for name, tensor in packed.items()} | state
        copies, copying = self._backend.copied_to_host(every)
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

    def _rng_tensors(self) -> dict[str, Tensor]:
        return {f"rng.{name}": state for name, state in self._backend.rng_state().items()}

    def _write(self, _: None, copy: _Copy) -> None:
        """Write, prove, then let the pointers move; on the thread behind."""
        copy.copying.wait()
        packed, state = {}, {}
        for name, tensor in copy.tensors.items():
            (packed if name.startswith(PACKED) else state)[name.removeprefix(PACKED)] = tensor
        with atomic_directory(copy.path, replace=True) as partial:
            write_checkpoint(self._student.model, self._tokenizer, partial, packed)
            (partial / STATE).parent.mkdir()
            safetensors.torch.save_file(state, partial / STATE_TENSORS)
            (partial / STATE).write_text(json.dumps(copy.facts) + "\n", encoding="utf-8")
            prove(partial, packed, state)
        metrics = self._run.path / METRICS
        if metrics.exists():  # what is known of the steps up to here must not be lost after it
            sync(metrics)
        if copy.is_best:
            self._run.point("best", copy.path)
        self._run.point("latest", copy.path)
        self._run.remove_old(self._config.keep, self._config.milestone_every)
