"""A run directory: recipe, facts, metrics, checkpoints, and what it takes to go on after a kill.

recipe.toml  run.json  metrics.jsonl  heartbeat-rank0.jsonl
checkpoints/step-NNNNNN/   latest  best   {quant}_{scope}_{loss}_{dtype}/
"""

import json
import platform
import shutil
import subprocess
import tomllib
from pathlib import Path

import safetensors.torch
import tomli_w
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import qat
from qat.errors import CheckpointError, ConfigError
from qat.files import check_free, partial_file, write_atomically
from qat.logs import FACTS, HEARTBEAT, METRICS, RECIPE
from qat.models.checkpoint import write_checkpoint
from qat.models.directory import atomic_directory
from qat.train.config import TrainConfig

STATE, STATE_TENSORS = "trainer/state.json", "trainer/state.safetensors"
FREE_TO_CHANGE = {"device", "keep"}
"""Settings that a run may go on with in another value."""


class Run:
    """The directory of one training run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checkpoint(self, config: TrainConfig, student: str, *, resume: bool) -> Path | None:
        """The checkpoint to go on from; None where the run begins.

        Raises:
            ConfigError: the directory is in use and `resume` is false, or its recipe differs.
        """
        recipe = self.path / RECIPE
        if recipe.exists():
            if not resume:
                raise ConfigError(
                    f"out={self.path} holds a run already; go on with --resume or choose another "
                    "--out"
                )
            self._check_same(config, student)
            return self.pointed("latest")
        partial_file(recipe).unlink(missing_ok=True)  # of a run killed while it began
        check_free(self.path)
        return None

    def check_cache(self, content: str) -> None:
        """Make sure that a run goes on with the very cache that it began with.

        Raises:
            ConfigError: `content`, a hash over the cache's shards, is another one.
        """
        facts = self.path / FACTS
        old = json.loads(facts.read_text())["cache_content"] if facts.exists() else content
        if old != content:
            raise ConfigError(
                f"the cache holds {content}, but the run in {self.path} was begun on {old}: it was "
                "rebuilt since; restore it or choose another --out"
            )

    def begin(self, config: TrainConfig, student: str) -> None:
        """Write the recipe, which makes the directory this run's."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / RECIPE, tomli_w.dumps({"train": resolved(config, student)}))

    def _check_same(self, config: TrainConfig, student: str) -> None:
        old = tomllib.loads((self.path / RECIPE).read_text())["train"]
        new = resolved(config, student)
        for key in sorted(old.keys() | new.keys()):
            if key not in FREE_TO_CHANGE and old.get(key) != new.get(key):
                raise ConfigError(
                    f"{key}={new.get(key)!r}, but the run in {self.path} was begun with "
                    f"{old.get(key)!r}; resume it with the same settings or choose another --out"
                )

    def pointed(self, name: str) -> Path | None:
        """The checkpoint that the pointer file `latest` or `best` names, if it is there."""
        pointer = self.path / name
        if not pointer.exists():
            return None
        return self.path / pointer.read_text().strip()

    def point(self, name: str, checkpoint: Path) -> None:
        """Let `latest` or `best` name a checkpoint of this run."""
        write_atomically(self.path / name, f"{checkpoint.relative_to(self.path)}\n")

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after `step` optimizer steps lies."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def remove_old(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints, the best one and the latest one."""
        folder = self.path / "checkpoints"
        for partial in folder.glob(".*.partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
        kept = {self.pointed("best"), self.pointed("latest")}
        for checkpoint in sorted(folder.glob("step-*"))[:-keep]:
            if checkpoint not in kept:
                shutil.rmtree(checkpoint)

    def forget_after(self, step: int) -> None:
        """Cut metrics and heartbeat back to the lines up to `step`; at step 0, to nothing."""
        for name in (METRICS, HEARTBEAT):
            path = self.path / name
            if path.exists():
                lines = path.read_text().splitlines(keepends=True)
                whole = [line for line in lines if line.endswith("\n")]
                kept = [line for line in whole if 0 < step >= json.loads(line)["step"]]
                write_atomically(path, "".join(kept))

    def write_facts(self, **facts: object) -> None:
        """Write `run.json`: what the run is, on what, from what."""
        common = {
            "commit": git_commit(),
            "qat": qat.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        write_atomically(self.path / FACTS, json.dumps({**common, **facts}, indent=1) + "\n")


def resolved(config: TrainConfig, student: str) -> dict:
    """The settings as a recipe's table: every field, less those that are not set."""
    values = config.model_dump(mode="json", exclude_none=True)
    return {"student": student, **values}


def save_training_state(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    tensors: dict[str, Tensor],
    facts: dict[str, float | int],
) -> None:
    """Write a packed checkpoint with the trainer's state beside it, whole or not at all."""
    with atomic_directory(out, replace=True) as partial:
        write_checkpoint(model, tokenizer, partial)
        (partial / "trainer").mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, partial / STATE_TENSORS)
        (partial / STATE).write_text(json.dumps(facts) + "\n")


def load_training_state(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, float | int]]:
    """What `save_training_state` wrote of the trainer.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    try:
        tensors = safetensors.torch.load_file(checkpoint / STATE_TENSORS)
        return tensors, json.loads((checkpoint / STATE).read_text())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{checkpoint}: the trainer's state cannot be read ({error}); remove this checkpoint "
            "and let 'latest' name an older one"
        ) from None


def git_commit() -> str:
    """The commit of the code that runs, or "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(qat.__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
