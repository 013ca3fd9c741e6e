"""The tasks of a suite: names of shipped tasks, or a TOML file with a table for each task."""

import re
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field

from qat.config import Settings, read_toml
from qat.errors import ConfigError, nearest
from qat.evaluate.config import EvalConfig, SuiteConfig
from qat.extensions.suite.task_names import check_installed, check_tasks

TASKS = Path(__file__).with_name("tasks")
"""Directory of the shipped tasks, one YAML file of lm-eval for each."""
SUFFIX = ".toml"
LABEL = re.compile(r"\w[\w.-]*")
"""A task's name in the suite, which is also the beginning of file names."""


class SuiteSettings(EvalConfig, SuiteConfig):
    """All settings of a suite."""

    @classmethod
    def of(cls, config: EvalConfig, suite: SuiteConfig) -> Self:
        """Join the settings; those that nobody set stay so."""
        return cls(**config.model_dump(exclude_unset=True), **suite.model_dump(exclude_unset=True))


class TaskTable(Settings):
    """The table of one task in a suite's file."""

    task: str | None = None
    """A shipped task, or one of `--tasks-dir`; by default the name of the table."""
    data: Path | None = None
    """File of the questions of a shipped task, relative to the suite's file."""
    fields: dict[str, str] = {}
    """Names of fields in that file by the names that the task expects."""
    num_fewshot: int | None = Field(None, ge=0)
    """Number of solved questions before each; by default as the task defines."""


class Entry(NamedTuple):
    """A task of a suite."""

    label: str
    """Unique name in the suite."""
    task: str
    """Name of the task for lm-eval."""
    data: Path | None
    fields: dict[str, str]
    num_fewshot: int | None


def shipped() -> list[str]:
    """Return the names of the shipped tasks."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def read_suite(config: SuiteSettings) -> list[Entry]:
    """Return the tasks of `config.suite`, which need not be loaded for that.

    Raises:
        ConfigError: lm-eval is missing, or the suite names an unknown task or has a wrong table.
    """
    check_installed("--suite")
    asked = str(config.suite)
    entries = _in_file(Path(asked)) if asked.endswith(SUFFIX) else _in_words(asked)
    labels = [entry.label for entry in entries]
    for entry in entries:
        if not LABEL.fullmatch(entry.label) or labels.count(entry.label) > 1:
            raise ConfigError(
                f"suite={asked} has a task {entry.label!r}, expected names of letters and digits, "
                "each once; rename it"
            )
        _check_entry(entry, asked, config.tasks_dir)
    return [
        each if each.num_fewshot is not None else each._replace(num_fewshot=config.num_fewshot)
        for each in entries
    ]


def _in_words(asked: str) -> list[Entry]:
    """Return the tasks of `NAME,NAME=FILE`."""
    entries = []
    for word in asked.split(","):
        name, _, data = word.strip().partition("=")
        entries.append(Entry(name, name, Path(data) if data else None, {}, None))
    return entries


def _in_file(path: Path) -> list[Entry]:
    tables = read_toml(path, f"suite={path}", "a table for each task")
    if not tables:
        raise ConfigError(
            f"suite={path} is empty, expected a table for each task; add [{shipped()[0]}]"
        )
    entries = []
    for label, values in tables.items():
        if not isinstance(values, dict):
            raise ConfigError(
                f"suite={path}: {label} is no table, expected one for each task; write [{label}]"
            )
        table = TaskTable.parse(values, f"suite={path} [{label}]")
        data = None if table.data is None else path.parent / table.data
        entries.append(Entry(label, table.task or label, data, table.fields, table.num_fewshot))
    return entries


def _check_entry(entry: Entry, asked: str, own: Path | None) -> None:
    known = shipped()
    if entry.task in known:
        if entry.data is not None and not entry.data.is_file():
            raise ConfigError(
                f"suite={asked}: data={entry.data} is not there, expected a file of questions; "
                "check the path"
            )
        return
    if own is None and (near := nearest(entry.task, known)):
        raise ConfigError(
            f"suite={asked}: no task is called {entry.task!r}, expected {', '.join(known)}, or a "
            f"task of lm-eval; did you mean {near[0]}?"
        )
    check_tasks([entry.task], own)
    if entry.data is not None or entry.fields:
        raise ConfigError(
            f"suite={asked}: {entry.label} has data or fields, but only {', '.join(known)} take "
            "some; write them into the task's YAML file"
        )
