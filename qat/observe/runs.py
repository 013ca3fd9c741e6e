"""Read and check the files in the directory of a run, a conversion or an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from qat.config import explain
from qat.convert.config import REPORT_NAME
from qat.errors import CheckpointError
from qat.files import described, parse_json, parse_toml
from qat.hooks import hooks
from qat.logs import (
    EVENTS,
    EXAM,
    FACTS,
    HEARTBEAT,
    HEARTBEATS,
    METRICS,
    RECIPE,
    heartbeat_file,
    read_json_lines,
)
from qat.models.directory import RUN_POINTERS, pointed

Line = dict[str, Any]  # one parsed JSON line of metrics, a heartbeat or events
NOTHING: Line = {"step": 0, "elapsed_s": 0.0}  # before the first heartbeat
SCORES = {
    "kl_tail_nats": "tail KL",
    "sampled_ce_nats": "cross-entropy with draws",
    "kd_nats": "KD",
}
"""Evaluation keys that can rank students, in order of preference, with their display names.

Which ones exist depends on the targets that the teacher cache holds."""


def score_name(verdict: Mapping[str, Any]) -> str:
    """Return the first key of `SCORES` in `verdict`: the tail KL unless the cache has none."""
    return next(name for name in SCORES if verdict.get(name) is not None)


def score(verdict: Mapping[str, Any]) -> float:
    """Return the number that ranks students, in nats; lower is better."""
    return verdict[score_name(verdict)]


class Module(BaseModel):
    """One quantized linear or table: its size and its quantization error."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str  # full name in the model, e.g. `model.layers.3.mlp.up_proj`
    bits: int | float  # bits per index
    vector_size: int = 1  # weights per index
    bits_per_weight: float  # bits per weight, scales and codebook included
    relative_error: float  # `|W - W_q| / |W|`, a fraction
    weighted_error: float | None = None  # weighted by inputs; None without calibration
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """The last part of the name: `up_proj`."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def layer(self) -> int | None:
        """The index of the decoder block: the first number in the name; None for a table."""
        return next((int(part) for part in self.name.split(".") if part.isdigit()), None)

    @property
    def error(self) -> float:
        """The weighted error if it was measured, else the relative error."""
        return self.relative_error if self.weighted_error is None else self.weighted_error


class Kv(BaseModel):
    """The KV cache format of a converted checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    bits: int
    bytes_per_token: int  # bytes per token over all layers


class Conversion(BaseModel):
    """The report of a converted checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    label: str
    source: str
    plan: str
    seconds: float
    bits_per_weight: float | None  # over all weights of the file; None if the report lacks it
    linear_bits: float | None  # of the quantized linears alone; None if none is quantized
    modules: list[Module]
    activations: dict[str, int] = {}  # linears and tables that quantize their input, by kind
    kv: Kv | None = None  # the KV cache format; None if keys and values are not quantized

    @property
    def kind_of_error(self) -> str:
        """The meaning of `Module.error`: `weighted` by the calibration inputs, or `relative`."""
        is_weighted = any(module.weighted_error is not None for module in self.modules)
        return "weighted" if is_weighted else "relative"


@dataclass(frozen=True)
class TrainingRun:
    """A training run: its settings and its metrics by kind."""

    label: str
    info: dict[str, Any]
    recipe: str
    steps: list[Line]
    evals: list[Line]
    heartbeats: list[Line]  # heartbeats of rank 0
    others: list[list[Line]]  # heartbeats of the other ranks, in rank order
    events: list[Line]  # events of all ranks (stalls, restarts, slow ranks)
    resumed: list[int]  # steps at which the run was resumed
    forced: list[str]  # codes of preflight findings that the user overrode
    checkpoint: Path | None  # the best checkpoint, else the latest one; None if neither exists

    def best(self) -> Line:
        """Return the evaluation of the best student; the untrained one (step 0) competes."""
        return min(self.evals, key=score)

    def lowest(self, key: str) -> float | None:
        """Return the lowest held-out `key` (`kl_tail_nats`, `ppl`); None if never measured."""
        return min((row[key] for row in self.evals if row.get(key) is not None), default=None)

    def epochs(self) -> float | None:
        """Return how many times the training text was read; None if the run does not say."""
        there = self.info.get("cache_sequences", {}).get("train")
        each = self.info.get("sequences_per_step")
        return self.steps[-1]["step"] * each / there if self.steps and there and each else None

    def tokens_per_s(self) -> float | None:
        """Return the median speed without the first heartbeat, which covers the warm-up."""
        return self.median("tokens_per_s")

    def median(self, key: str) -> float | None:
        """Return the median of `key` over the heartbeats; None if no heartbeat has it.

        The first heartbeat covers the warm-up and counts only if there is no other.
        """
        rows = self.heartbeats[1:] or self.heartbeats
        beats = sorted(row[key] for row in rows if row.get(key) is not None)
        return beats[len(beats) // 2] if beats else None

    def peak_gib(self) -> float | None:
        """Return the peak device memory in GiB; None if the device does not report it."""
        peaks = [row["peak_gib"] for row in self.heartbeats if row.get("peak_gib") is not None]
        return max(peaks, default=None)


def wall_seconds(beats: Sequence[Line]) -> float:
    """Return the seconds of all processes that contributed to a run."""
    total = 0.0
    for before, beat in pairwise([NOTHING, *beats]):
        # a resumed run has a new process, whose clock starts at zero
        is_same = before.get("pid") == beat.get("pid") and before["elapsed_s"] <= beat["elapsed_s"]
        total += beat["elapsed_s"] - (before["elapsed_s"] if is_same else 0.0)
    return total


def step_seconds(beats: Sequence[Line]) -> float:
    """Return the seconds of a run's steps, without evaluations and saving."""
    pairs = pairwise([NOTHING, *beats])
    return sum(beat["step_s"] * (beat["step"] - before["step"]) for before, beat in pairs)


def token_count(beats: Sequence[Line]) -> int:
    """Return the tokens of all ranks; a heartbeat stands for the steps since the last one."""
    return round(
        sum(
            beat["tokens_per_s"] * beat["step_s"] * (beat["step"] - before["step"])
            for before, beat in pairwise([NOTHING, *beats])
        )
    )


def read_exam(path: Path) -> dict[str, dict[str, Any]]:
    """Return the evaluation results in a directory of `qat run` or `qat demo`; empty for any other.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = path / EXAM
    if not file.is_file():
        return {}
    try:
        exams = {n: _sizes(dict(found)) for n, found in parse_json(file.read_bytes()).items()}
        exam_rows(exams)  # formats every value, so that a value that is no number fails here
        return exams
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}), expected what 'qat run' measured; delete it and run the "
            "same command again"
        ) from None


def _sizes(found: dict[str, Any]) -> dict[str, Any]:
    """Return a report with its sizes by their present names.

    Version 0.2 called the bits of all weights `whole_bits_per_weight` and those of the linears
    `bits_per_weight`.
    """
    if "linear_bits" in found:
        return found
    older = {
        "bits_per_weight": found.get("whole_bits_per_weight"),
        "linear_bits": found.get("bits_per_weight"),
    }
    return {**found, **older}


def stages_in(path: Path) -> list[Path]:
    """Return the runs and conversions in a directory of `qat run` or `qat demo`, oldest first."""
    written = {}
    for each in path.iterdir():
        # the file that marks a directory as a conversion (its report) or as a run (its metrics)
        for file in (each / REPORT_NAME, each / METRICS):
            if file.is_file():
                written[each] = file.stat().st_mtime_ns
    return sorted(written, key=written.__getitem__)


def sections_in(path: Path) -> list[tuple[EntryPoint, Path]]:
    """Return the files of a directory that extensions write sections of the page about."""
    found = ((point, path / name) for name, point in hooks("qat.sections").items())
    return [(point, file) for point, file in found if file.is_file()]


def with_stages(paths: Sequence[Path]) -> list[Path]:
    """Return `paths` without directories that hold nothing but files of sections."""
    stages = (METRICS, REPORT_NAME)
    return [p for p in paths if not sections_in(p) or any((p / each).is_file() for each in stages)]


def read_directory(path: Path) -> TrainingRun | Conversion:
    """Return the run or the conversion in `path`.

    Raises:
        CheckpointError: there is no such directory, it holds neither, or a file is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} {described(path)}, expected a run or a converted checkpoint; check the path"
        )
    try:
        if (path / METRICS).is_file():
            return _read_run(path)
        if (path / REPORT_NAME).is_file():
            values = parse_json((path / REPORT_NAME).read_text(encoding="utf-8"))
            return Conversion.model_validate({**_sizes(values), "label": path.resolve().name})
    except ValidationError as error:
        raise CheckpointError(f"{path / REPORT_NAME} is damaged: {explain(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} holds a damaged JSON file ({error}); restore it or leave this run out"
        ) from None
    hint = "name one of those"
    if (path / RECIPE).is_file():
        hint = "the command that began it goes on if you call it again"
    raise CheckpointError(
        f"{path} {described(path)} and holds neither {METRICS} nor {REPORT_NAME}, expected a "
        f"directory made by 'qat train' or 'qat convert'; {hint}"
    )


def _read_run(path: Path) -> TrainingRun:
    rows = read_json_lines(path / METRICS)
    beats, facts, recipe = path / HEARTBEAT, path / FACTS, path / RECIPE
    info = parse_json(facts.read_text(encoding="utf-8")) if facts.is_file() else {}
    words = recipe.read_text(encoding="utf-8") if recipe.is_file() else ""
    for name, table in (("train", parse_toml(words)), ("cache_settings", info)):
        if not isinstance(table.get(name, {}), dict):
            raise TypeError(f"{name} is no table")
    _check_numbers(rows)
    others = map(heartbeat_file, range(1, len(list(path.glob(HEARTBEATS)))))
    checkpoints = (pointed(path, name) for name in RUN_POINTERS)
    return TrainingRun(
        label=path.resolve().name,
        info=info,
        recipe=words,
        steps=[row for row in rows if row["kind"] == "train"],
        evals=[row for row in rows if row["kind"] == "eval"],
        heartbeats=read_json_lines(beats) if beats.is_file() else [],
        others=[read_json_lines(path / name) for name in others if (path / name).is_file()],
        events=[
            {**line, "kind": str(line["kind"]), "step": int(line["step"])}
            for file in sorted(path.glob(EVENTS))
            for line in read_json_lines(file)
        ],
        resumed=[int(each["step"]) for each in info.get("resumed", [])],
        forced=[str(code) for code in info.get("forced", [])],
        checkpoint=next((each for each in checkpoints if each and each.is_dir()), None),
    )


def _check_numbers(rows: Sequence[Line]) -> None:
    for row in rows:
        for key in ("step", "loss_nats", *SCORES, "top1_frac", "ppl"):
            if not isinstance(row.get(key, 0), int | float | None):
                raise TypeError(f"{key}={str(row[key])[:40]!r} is no number")


# The results table at the end of `qat run` and `qat demo`, for the terminal and the report page.
# `qat eval` measures them once and stores them in `eval.json`.

EXAM_COLUMNS = (
    "model",
    "MB",
    "bits per weight",
    "of linears",
    "perplexity",
    "same next word",
    "KL",
)
EXAM_CELLS = {  # the keys of a row and the format of each number
    "megabytes": "{:.2f}",
    "bits_per_weight": "{:.2f}",
    "linear_bits": "{:.2f}",
    "ppl": "{:.2f}",
    "top1_frac": "{:.1%}",
    "kl_nats": "{:.4f}",
}
EXAM_CAPTION = (
    "All on the same text, which was kept from training. MB: the files with the weights, of a "
    "student its GGUF file if it becomes one; bits per weight: all weights of these files, and "
    "their linears alone. Perplexity: among how many words the model hesitates, lower is better. "
    "Same next word: how often its first choice is the teacher's. KL: distance from the teacher in "
    "nats a token, 0 is equal."
)

Exams = Mapping[str, Mapping[str, float]]


def exam_rows(exams: Exams) -> list[list[str]]:
    """Return the cells of `EXAM_COLUMNS` for each model; empty if nothing was measured."""
    return [
        [
            name,
            *(
                "" if found.get(k) is None else form.format(found[k])
                for k, form in EXAM_CELLS.items()
            ),
        ]
        for name, found in exams.items()
    ]
