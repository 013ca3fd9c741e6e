"""Saves a run while it goes on."""

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat import backend as backends
from qat.models.language_model import LanguageModel
from qat.ranks import Ranks
from qat.train.codes import CodeWatch
from qat.train.config import TrainConfig
from qat.train.optim import Optimizer
from qat.train.run import Run, save_training_state


class Saver:
    """Writes the checkpoints of one run, and lets its pointers name them."""

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
        self.saved: int | None = None
        """The step that was saved last."""

    def save(self, step: int, best: float, *, is_best: bool) -> None:
        """Write this step's checkpoint and let the pointers name it; all ranks call it."""
        path = self._run.checkpoint_path(step)
        state = {**self._optimizer.state(), **self._rng_tensors(), **self._codes.state()}
        self.saved = step
        if not self._ranks.is_first:
            return
        facts = {"step": step, "best": best}
        save_training_state(self._student.model, self._tokenizer, path, tensors=state, facts=facts)
        if is_best:
            self._run.point("best", path)
        self._run.point("latest", path)
        self._run.remove_old(self._config.keep)

    def finish(self) -> None:
        """Wait until all is written; raises what writing raised."""

    def close(self) -> None:
        """Wait, and say nothing of what writing raised: an error is under way already."""

    def _rng_tensors(self) -> dict[str, Tensor]:
        return {f"rng.{name}": state for name, state in self._backend.rng_state().items()}
