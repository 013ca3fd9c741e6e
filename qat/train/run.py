"""A run directory: recipe, facts, metrics and checkpoints, from which a killed run is resumed.

recipe.toml  run.json  metrics.jsonl  training.csv  val.csv  heartbeat-rank0.jsonl  events.jsonl
checkpoints/step-NNNNNN/   latest  best   metrics.json  {quant}_{scope}_{loss}_{dtype}/
"""

import json
import logging
import platform
import shutil
import subprocess
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qat.backend.base import environment
from qat.config import explain
from qat.errors import HOME, VERSION, CheckpointError, ConfigError
from qat.files import (
    LEAVING,
    check_free,
    is_real,
    listed_files,
    parse_json,
    parse_toml,
    partial_file,
    real_files,
    write_atomically,
)
from qat.logs import (
    EVENTS,
    FACTS,
    HEARTBEATS,
    METRICS,
    RECIPE,
    SUMMARY,
    TRAINING_CSV,
    VAL_CSV,
    cut_after,
    read_json_lines,
)
from qat.models.directory import CHECKPOINTS, RUN_POINTERS, STEP_NAME, pointed
from qat.secrets import scrubbed_in
from qat.train.config import TrainConfig, fixed_because, refuse_begun

logger = logging.getLogger(__name__)

STATE = "trainer/state.json"
MANIFEST = "trainer/manifest.json"
FORMAT = 1
"""Version of the checkpoint format; other versions are refused."""
ATTEMPT = "attempt-"
"""Prefix of directories with the files of attempts that left no checkpoint."""
WHAT_CHANGED = {
    "cache_content": "the cache was rebuilt since, and decides what is learned and what judges",
    "student_fingerprint": "the student was changed since",
    "tokenizer": "the tokenizer was changed since",
    "sequences_per_step": "batch_size x grad_accum_steps x ranks must stay what it was",
}
"""Explanations for a changed fact in `run.json` or in a checkpoint."""


BEGIN_THERE = " (with this run for STUDENT a new one begins from its best student)"


class _Resumed(BaseModel):
    changed: dict[str, Annotated[list[object], Field(min_length=2, max_length=2)]] = {}


class _Facts(BaseModel):
    """Fields of `run.json` that are read when a run is resumed."""

    model_config = ConfigDict(strict=True)
    resumed: list[_Resumed] = []
    forced: list[str] = []
    judged: list[Annotated[str, Field(pattern=r"^[0-9]{1,9}:")]] = []
    cache_settings: dict[str, object] = {}
    cache_sequences: dict[Literal["train", "held_out"], int] = {}


class RunDirectory:
    """The directory of one training run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity: dict[str, object] = {}
        """Facts about the run that each checkpoint records."""

    def is_begun(self, wanted: dict[str, Any], *, resume: bool) -> bool:
        """Return whether there is a run to resume with the `wanted` recipe (`resolved`).

        Raises:
            ConfigError: the directory is in use and `resume` is false, or its recipe differs.
        """
        recipe = self.path / RECIPE
        for path in (*self.path.glob("*"), *(self.path / CHECKPOINTS).glob("*")):
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a symbolic link, expected a run's own files and directories, for a "
                    "run writes and deletes there; remove it or choose another --out"
                )
        if not resume:
            refuse_begun(self.path)
        if recipe.exists():
            self._check_same(wanted)
            return True
        partial_file(recipe).unlink(missing_ok=True)  # left by a run killed at its start
        check_free(self.path, in_place=True)
        if resume:
            logger.info("%s holds no run to go on with: a new one begins", self.path)
        return False

    def begun_as(self, checkpoint: Path | None) -> dict[str, Any]:
        """Return the facts that the run started with, from `run.json` and the checkpoint to resume.

        Raises:
            ConfigError: `run.json` is damaged, or differs from the checkpoint.
        """
        facts = self.facts()
        if checkpoint is None:
            return facts
        state = read_state(checkpoint)
        grown = [each["changed"] for each in facts.get("resumed", []) if "changed" in each]
        earlier = {"cache_content": [each.get("cache_content", [None])[0] for each in grown]}
        for name in WHAT_CHANGED.keys() & facts.keys() & state.keys():
            if state[name] not in (facts[name], *earlier.get(name, ())):
                raise ConfigError(
                    f"{self.path / FACTS} says {name}={facts[name]}, but {checkpoint} was written "
                    f"with {state[name]}, expected the same; restore the file of this run or "
                    "choose another --out"
                )
        return {**state, **facts}

    def begin(self, wanted: dict[str, Any]) -> None:
        """Write the recipe, which marks the directory as this run's."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / RECIPE, tomli_w.dumps({"train": wanted}))

    def original_warmup(self) -> int | None:
        """Return the steps of warm-up that the run began with; None if it has not begun."""
        return self.begun_with()[0].warmup_steps if (self.path / RECIPE).exists() else None

    def changes(self, wanted: dict[str, Any]) -> dict[str, tuple[object, object]]:
        """Return the settings that differ from the recipe, by name: the old and the new value."""
        old = resolved(*self.begun_with())
        names = sorted(old.keys() | wanted.keys())
        return {k: (old.get(k), wanted.get(k)) for k in names if old.get(k) != wanted.get(k)}

    def begun_with(self) -> tuple[TrainConfig, str]:
        """Return the settings and the student that the recipe names.

        Raises:
            ConfigError: it is not a run's recipe.
        """
        path = self.path / RECIPE
        try:
            table: Any = parse_toml(path.read_text(encoding="utf-8"))["train"]
            student = table.pop("student")
            if not isinstance(student, str):
                raise ValueError(f"student={student!r}")
            return TrainConfig.parse(table, str(path)), student
        except (ValueError, TypeError, LookupError, AttributeError, ConfigError) as error:
            raise ConfigError(
                f"{path} is not a run's recipe ({error}), expected what the run began with; "
                "restore it or choose another --out"
            ) from None

    def _check_same(self, wanted: dict[str, Any]) -> None:
        # their content is compared later if they exist
        elsewhere = {"student"} if Path(wanted["student"]).is_dir() else set()
        elsewhere |= (
            {"teacher"} if wanted.get("teacher") and self.begun_with()[0].teacher else set()
        )
        for key, (old, new) in self.changes(wanted).items():
            why = "it is what learns" if key == "student" else fixed_because(key)
            if why is not None and key not in elsewhere:
                raise ConfigError(
                    f"{key}={new!r}, but the run in {self.path} was begun with {old!r}: {why}; "
                    f"resume it with the same settings or choose another --out{BEGIN_THERE}"
                )

    def has_pointer(self, name: str) -> bool:
        """Return whether the pointer file `latest` or `best` exists; its content is not read."""
        return (self.path / name).exists()

    def pointed(self, name: str) -> Path | None:
        """Return the checkpoint that `latest` or `best` names, even if it does not exist."""
        return pointed(self.path, name)

    def point(self, name: str, checkpoint: Path) -> None:
        """Make `latest` or `best` name a checkpoint of this run."""
        write_atomically(self.path / name, f"{checkpoint.relative_to(self.path)}\n")

    def checkpoint_path(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` optimizer steps."""
        return self.path / CHECKPOINTS / f"step-{step:06d}"

    def checkpoints(self) -> list[Path]:
        """Return all checkpoints in the order of their steps."""
        found = (self.path / CHECKPOINTS).glob("step-*")
        ours = (path for path in found if STEP_NAME.fullmatch(path.name))
        return sorted((path for path in ours if is_real(path, self.path)), key=step_of)

    def remove_old(self, keep: int, milestone_every: int = 0) -> None:
        """Delete the checkpoints up to `latest` except the newest `keep` and the milestones.

        That of the untrained student, step 0, is kept only while it is the best or the latest.
        Nothing after `latest` is deleted, because a resumed run has not got there yet. The best
        checkpoint is always kept, and so is one to which a user has added a file.
        """
        best, latest = self.pointed("best"), self.pointed("latest")
        end = 0 if latest is None else step_of(latest)
        past = [path for path in self.checkpoints() if step_of(path) <= end]
        trained = [path for path in past if step_of(path)]
        kept = {best, latest, *trained[-keep:]}
        kept |= {
            path for path in trained if milestone_every and step_of(path) % milestone_every == 0
        }
        for path in self.checkpoints():
            if path not in kept and is_all_ours(path):
                # renamed first, so that a kill leaves no incomplete checkpoint under a checkpoint's
                # name
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.old-")))

    def remove_leavings(self) -> None:
        """Delete unfinished files of a run that was killed."""
        for folder in (self.path, self.path / CHECKPOINTS):
            for left in folder.glob(".*"):
                if left.is_dir() and LEAVING.fullmatch(left.name):
                    shutil.rmtree(left, ignore_errors=True)
        for name in (RECIPE, FACTS, METRICS, SUMMARY, TRAINING_CSV, VAL_CSV, *RUN_POINTERS):
            partial_file(self.path / name).unlink(missing_ok=True)
        for left in self.path.glob(f".{HEARTBEATS}.partial"):
            left.unlink()

    def recorded_steps(self) -> int:
        """Return the last step with metrics."""
        path = self.path / METRICS
        lines = read_json_lines(path) if path.exists() else []
        return max((line["step"] for line in lines), default=0)

    def next_attempt(self) -> Path:
        """Return a new directory name for the files of an attempt that left no checkpoint."""
        names = (self.path / f"{ATTEMPT}{number}" for number in count(1))
        return next(path for path in names if not path.exists())

    def set_aside(self) -> None:
        """Move metrics and events of an attempt without a checkpoint to their own directory."""
        steps, aside = self.recorded_steps(), self.next_attempt()
        if not steps:
            return
        aside.mkdir()
        for pattern in (METRICS, TRAINING_CSV, VAL_CSV, HEARTBEATS, EVENTS):
            for path in self.path.glob(pattern):
                path.rename(aside / path.name)
        logger.warning(
            "%s was stopped after step %d and has no checkpoint: it begins anew; what it recorded "
            "is kept in %s",
            self.path,
            steps,
            aside,
        )

    def forget_after(self, step: int) -> None:
        """Cut metrics and heartbeats back to the lines up to `step`; at step 0, to nothing."""
        for path in (self.path / METRICS, *self.path.glob("heartbeat-rank*.jsonl")):
            cut_after(path, step)

    def facts(self) -> dict[str, Any]:
        """Return the content of `run.json`; empty before it is written.

        Raises:
            ConfigError: it is damaged.
        """
        path = self.path / FACTS
        if not path.exists():
            return {}
        try:
            found = parse_json(path.read_bytes())
            _Facts.model_validate(found)
        except ValueError as error:
            why = explain(error) if isinstance(error, ValidationError) else "it is not JSON"
            raise ConfigError(
                f"{path} is damaged ({why}), expected what the run in {self.path} was begun with; "
                "restore it or choose another --out"
            ) from None
        return found

    def write_facts(self, **facts: object) -> None:
        """Write `run.json`: these facts, with the versions and the environment."""
        common = {**versions(), "environment": environment()}
        write_atomically(
            self.path / FACTS, json.dumps(scrubbed_in({**common, **facts}), indent=1) + "\n"
        )


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def resolved(config: TrainConfig, student: str) -> dict:
    """Return the settings as a recipe's table: every field that is set, without secrets."""
    values = config.model_dump(mode="json", exclude_none=True)
    return scrubbed_in({"student": student, **values})


def versions() -> dict[str, str]:
    """Return the versions of the code and of the libraries that it uses."""
    return {
        "commit": git_commit(),
        "qat": VERSION,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def git_commit() -> str:
    """Return the commit of the running code, or "unknown" outside a checkout."""
    command = ["git", "-C", str(HOME), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def is_all_ours(checkpoint: Path) -> bool:
    """Return whether a checkpoint has only files that its run wrote, and so may be deleted."""
    try:
        files = real_files(checkpoint, error=CheckpointError)
    except CheckpointError:
        return False
    ours = {MANIFEST} | listed_files(checkpoint / MANIFEST, ())
    return {path.relative_to(checkpoint).as_posix() for path in files} <= ours


def read_state(checkpoint: Path) -> dict:
    """Read the facts beside a checkpoint's tensors: step, best score and the run's identity.

    Raises:
        ValueError: they are not what a run writes.
        OSError: they cannot be read.
    """
    state = parse_json((checkpoint / STATE).read_text(encoding="utf-8"))
    if not isinstance(state, dict) or type(state.get("step")) is not int:
        raise ValueError(f"{STATE}: no step")
    if not isinstance(state.get("best"), float | int):
        raise ValueError(f"{STATE}: no best score")
    if state.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{STATE}: format {state['format']!r}")
    return state
