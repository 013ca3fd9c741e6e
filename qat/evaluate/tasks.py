"""Tasks of lm-eval, an extension that the core asks through one interface."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from qat.config import Settings
from qat.hooks import extension

if TYPE_CHECKING:  # they load torch
    from transformers import PreTrainedTokenizerBase

    from qat.models.language_model import LanguageModel

Scores = dict[str, dict[str, float]]
"""Scores by task and measure: `acc`, `acc_stderr`, `acc_norm`, ...; fractions, except
perplexities."""


class Tasks(Protocol):
    """The tasks of the settings, opened."""

    def scores(self, model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> Scores:
        """Return the measures of each task (and of each part of a group of tasks)."""


class Harness(Protocol):
    """The interface of the module that an entry point of the group `qat.suites` names."""

    def check_tasks(self, names: Collection[str], own: Path | None) -> None:
        """Refuse names that are no tasks; torch is not imported for that."""

    def open_tasks(self, config: Settings) -> Tasks:
        """Open the tasks of `--tasks`, given an `EvalConfig`."""

    def judge_suite(self, student: str, config: Settings, suite: Settings) -> dict[str, object]:
        """Judge a student on the tasks of a `SuiteConfig`, and print them."""


def load_harness() -> Harness:
    """Return the extension.

    Raises:
        ConfigError: it is not installed.
    """
    return cast(Harness, extension("qat.suites", "suite"))
