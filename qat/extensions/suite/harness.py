"""Scores on tasks of EleutherAI's lm-evaluation-harness (`arc_easy`, `hellaswag`, ...)."""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qat.backend.device import select
from qat.errors import ConfigError, DataError
from qat.evaluate.config import EvalConfig
from qat.evaluate.tasks import Scores
from qat.models.language_model import LanguageModel, judging, most_positions
from qat.models.regions import as_written
from qat.models.rotary import reads_lengths


class Tasks:
    """The tasks of the settings, which `EvalConfig.check_named` has found."""

    def __init__(self, config: EvalConfig) -> None:
        """Open lm-eval's index of tasks.

        Raises:
            ConfigError: the device compiles each shape.
        """
        if select(config.device).is_traced:
            raise ConfigError(
                f"tasks={config.tasks}, but device={config.device} compiles a model anew for each "
                "length, and every question has its own; use --device cpu or cuda"
            )
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._config = config
        self._names = config.task_names
        own = config.tasks_dir
        self._manager = open_manager(self._names, [] if own is None else [own])

    def scores(self, model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> Scores:
        """Return the measures of each task (and of each part of a group of tasks).

        Raises:
            DataError: the task's data is not available locally and cannot be downloaded.
        """
        from lm_eval import simple_evaluate

        config = self._config
        harness = open_harness(model, tokenizer, config.batch_size)
        try:
            with judging(model), as_written(model.model):
                found = simple_evaluate(
                    harness,
                    tasks=self._names,
                    num_fewshot=config.num_fewshot,
                    limit=config.limit or None,
                    task_manager=self._manager,
                    log_samples=False,
                )
        except OSError as error:
            why = " ".join(str(error).split())
            raise DataError(
                f"the texts of {config.tasks} cannot be read ({why}), expected them on "
                "the dataset hub or in its cache on this machine; connect to the network once, or "
                "give tasks of your own with --tasks-dir"
            ) from None
        return {name: measures(result) for name, result in found["results"].items()}


def measures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one task by name; the harness writes `acc,none` and `acc_stderr,none`.

    A filter other than `none` stays in the name, after a comma.
    """
    return {
        name.removesuffix(",none"): float(value)
        for name, value in result.items()
        if "," in name and isinstance(value, int | float)
    }


def open_harness(model: LanguageModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Any:
    """Return the model as the harness runs it."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=model.model,
        tokenizer=tokenizer,
        backend="causal",
        # the harness pads rows, which would give a short row the rotary scaling of the longest
        batch_size=1 if reads_lengths(model.model) else batch_size,
        max_length=most_positions(model.config),
    )


def open_manager(names: Collection[str], folders: Sequence[Path]) -> Any:
    """Return the task manager for `folders`, with the harness's own tasks if more are needed."""
    from datasets import disable_progress_bars
    from lm_eval.tasks import TaskManager

    paths = [str(folder) for folder in folders]
    if folders:
        disable_progress_bars()  # a local file is read at once, and an error stays one line
        manager = TaskManager(include_path=paths, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    return TaskManager(include_path=paths)
