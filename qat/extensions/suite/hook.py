"""Tasks of lm-eval as the core sees them: `qat.evaluate.tasks.Harness`.

Functions import what they need: a wrong name is refused before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from qat.extensions.suite import task_names

if TYPE_CHECKING:
    from qat.evaluate.config import EvalConfig, SuiteConfig
    from qat.extensions.suite.harness import Tasks


def check_tasks(names: Collection[str], own: Path | None) -> None:
    """Refuse tasks that are none of lm-eval's and not in the directory `own`."""
    task_names.check_installed("--tasks")
    task_names.check_tasks(names, own)


def open_tasks(config: EvalConfig) -> Tasks:
    """Open the tasks of `--tasks`, whose names are known."""
    from qat.extensions.suite.harness import Tasks

    return Tasks(config)


def judge_suite(student: str, config: EvalConfig, suite: SuiteConfig) -> dict[str, object]:
    """Judge a student, and its teacher if there is one, on a suite; print and return the numbers.

    Raises:
        ConfigError, DataError: the suite is wrong, or a task of it.
        CheckpointError: a model is missing, or the answers in `suite.out` are damaged or those of
            another one.
    """
    from qat.extensions.suite.engine import check_engine
    from qat.extensions.suite.plan import SuiteSettings, read_suite

    settings = SuiteSettings.of(config, suite)
    entries = read_suite(settings)
    if settings.engine == "vllm":
        check_engine(filter(None, [student, settings.teacher]))
    from qat.extensions.suite.judge import judge

    return judge(student, settings, entries)
