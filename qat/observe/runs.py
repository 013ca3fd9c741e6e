"""What a run, a conversion or an exam left in its directory, read back and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from qat.config import explain
from qat.convert.config import REPORT_NAME
from qat.errors import CheckpointError
from qat.files import parse_json, parse_toml
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

Line = dict[str, Any]
"""A line of metrics, of a heartbeat or of events."""
NOTHING: Line = {"step": 0, "elapsed_s": 0.0}
"""Before the first beat."""
SCORES = {
    "kl_tail_nats": "tail KL",
    "sampled_ce_nats": "cross-entropy with draws",
    "kd_nats": "KD",
}
"""What decides which student is best, the first that a cache's targets allow, and its name."""


def score_name(verdict: Mapping[str, Any]) -> str:
    """Which of `SCORES` decides: the tail KL, or what a cache without it holds in its place."""
    return next(name for name in SCORES if verdict.get(name) is not None)


def score(verdict: Mapping[str, Any]) -> float:
    """The number that decides which student is best, in nats; lower is better."""
    return verdict[score_name(verdict)]


class Module(BaseModel):
    """One quantized linear: what it costs and what it lost."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    """Full name in the model, e.g. `model.layers.3.mlp.up_proj`."""
    bits: int | float
    """Of a weight's index."""
    vector_size: int = 1
    """Weights that an index names."""
    trellis_bits: int = 0
    """Bits a weight of a trellis; 0 without one."""
    bits_per_weight: float
    """With scales and codebook."""
    relative_error: float
    """`|W - W_q| / |W|`, a fraction."""
    weighted_error: float | None = None
    """The same with each input weighted by its importance; None without calibration."""
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """The last part of the name: `up_proj`."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def layer(self) -> int:
        """The block it sits in: the first number in the name; 0 without one."""
        return next((int(part) for part in self.name.split(".") if part.isdigit()), 0)

    @property
    def error(self) -> float:
        """The weighted error where there is one, else the plain one."""
        return self.relative_error if self.weighted_error is None else self.weighted_error


class Kv(BaseModel):
    """How a converted checkpoint keeps keys and values."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    bits: int
    bytes_per_token: int
    """In all layers."""


class Conversion(BaseModel):
    """A converted checkpoint's report."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    label: str
    source: str
    plan: str
    seconds: float
    bits_per_weight: float | None
    """Of what is quantized; None where nothing is."""
    whole_bits_per_weight: float | None = None
    """Over the whole file; None in a report that does not say."""
    modules: list[Module]
    activations: dict[str, int] = {}
    """How many linears and tables quantize their input, by how."""
    kv: Kv | None = None
    """None where they are kept as they are."""

    @property
    def kind_of_error(self) -> str:
        """What `Module.error` is: weighted, by the calibration's inputs, or relative."""
        is_weighted = any(module.weighted_error is not None for module in self.modules)
        return "weighted" if is_weighted else "relative"


@dataclass(frozen=True)
class TrainingRun:
    """A run: settings, and its metrics split by kind."""

    label: str
    info: dict[str, Any]
    recipe: str
    steps: list[Line]
    evals: list[Line]
    heartbeats: list[Line]
    """Of the first rank."""
    others: list[list[Line]]
    """Heartbeats of the other ranks, in their order."""
    events: list[Line]
    """Events of all ranks (stalls, restarts, clock jumps)."""
    resumed: list[int]
    """The steps from which it went on after a stop."""
    forced: list[str]
    """Findings of the preflight that were overruled."""
    checkpoint: Path | None
    """The best one, else the latest; None where neither is there."""

    def best(self) -> Line:
        """The evaluation of the best student: the untrained one (step 0) competes."""
        return min(self.evals, key=score)

    def lowest(self, key: str) -> float | None:
        """The lowest held-out `key` (`kl_tail_nats`, `ppl`), None if never measured."""
        return min((row[key] for row in self.evals if row.get(key) is not None), default=None)

    def tokens_per_s(self) -> float | None:
        """The median speed, the first beat (warm-up) left out."""
        return self.median("tokens_per_s")

    def median(self, key: str) -> float | None:
        """The median of the heartbeats, without the first one (warm-up) where there are others."""
        rows = self.heartbeats[1:] or self.heartbeats
        beats = sorted(row[key] for row in rows if row.get(key) is not None)
        return beats[len(beats) // 2] if beats else None

    def peak_gib(self) -> float | None:
        """The most device memory seen, None where the device does not count it."""
        peaks = [row["peak_gib"] for row in self.heartbeats if row.get("peak_gib") is not None]
        return max(peaks, default=None)


def wall_seconds(beats: Sequence[Line]) -> float:
    """Seconds of all processes that made a run."""
    total = 0.0
    for before, beat in pairwise([NOTHING, *beats]):
        is_same = before.get("pid") == beat.get("pid") and before["elapsed_s"] <= beat["elapsed_s"]
        total += beat["elapsed_s"] - (before["elapsed_s"] if is_same else 0.0)
    return total


def token_count(beats: Sequence[Line]) -> int:
    """Tokens of all ranks; a beat stands for the steps since the one before it."""
    return round(
        sum(
            beat["tokens_per_s"] * beat["step_s"] * (beat["step"] - before["step"])
            for before, beat in pairwise([NOTHING, *beats])
        )
    )


def read_exam(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a directory of `qat run` or `qat demo`; empty for any other directory.

    Raises:
        CheckpointError: it is damaged.
    """
    file = path / EXAM
    if not file.is_file():
        return {}
    try:
        exams = {name: dict(found) for name, found in parse_json(file.read_bytes()).items()}
        exam_rows(exams)  # its numbers are numbers
        return exams
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}), expected what 'qat run' measured; delete it and run the "
            "same command again"
        ) from None


def stages_in(path: Path) -> list[Path]:
    """The runs and conversions in a directory of `qat run` or `qat demo`, the oldest first."""
    written = {}
    for each in path.iterdir():
        # the file that makes a directory a run or a conversion; of a run its metrics
        for file in (each / REPORT_NAME, each / METRICS):
            if file.is_file():
                written[each] = file.stat().st_mtime_ns
    return sorted(written, key=written.__getitem__)


def read_directory(path: Path) -> TrainingRun | Conversion:
    """The run or the conversion that `path` holds.

    Raises:
        CheckpointError: there is no such directory, it holds neither, or a file is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"no directory {path}; expected a run or a converted checkpoint; check the path"
        )
    try:
        if (path / METRICS).is_file():
            return _read_run(path)
        if (path / REPORT_NAME).is_file():
            values = parse_json((path / REPORT_NAME).read_text(encoding="utf-8"))
            return Conversion.model_validate({**values, "label": path.resolve().name})
    except ValidationError as error:
        raise CheckpointError(f"{path / REPORT_NAME} is damaged: {explain(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} holds a damaged JSON file ({error}); restore it or leave this run out"
        ) from None
    raise CheckpointError(
        f"{path} holds neither {METRICS} nor {REPORT_NAME}; expected a directory made by "
        "'qat train' or 'qat convert'; name one of those"
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
        events=[event for file in sorted(path.glob(EVENTS)) for event in _events(file)],
        resumed=[int(each["step"]) for each in info.get("resumed", [])],
        forced=[str(code) for code in info.get("forced", [])],
        checkpoint=next((each for each in checkpoints if each and each.is_dir()), None),
    )


def _check_numbers(rows: Sequence[Line]) -> None:
    """Refuse a line of metrics whose step or measure is no number (TypeError)."""
    for row in rows:
        for key in ("step", "loss_nats", *SCORES, "top1_frac", "ppl"):
            if not isinstance(row.get(key, 0), int | float | None):
                raise TypeError(f"{key}={str(row[key])[:40]!r} is no number")


def _events(file: Path) -> list[Line]:
    lines = read_json_lines(file)
    return [{**line, "kind": str(line["kind"]), "step": int(line["step"])} for line in lines]


# The results at the end of `qat run` and `qat demo`: one table for the terminal and for the page.
# They are measured once, by `qat eval`, and kept in `eval.json`.

EXAM_COLUMNS = (
    "model",
    "MB",
    "bits per weight",
    "in linears",
    "perplexity",
    "same next word",
    "KL",
)
EXAM_CELLS = {
    "megabytes": "{:.2f}",
    "whole_bits_per_weight": "{:.2f}",
    "bits_per_weight": "{:.2f}",
    "ppl": "{:.2f}",
    "top1_frac": "{:.1%}",
    "kl_nats": "{:.4f}",
}
"""The numbers of a row, and how each is written."""
EXAM_CAPTION = (
    "All on the same text, which was kept from training. MB: the weights on disk; bits per weight: "
    "the whole file, and its linear layers alone. Perplexity: among how many words the model "
    "hesitates, lower is better. Same next word: how often its first choice is the teacher's. KL: "
    "distance from the teacher in nats a token, 0 is equal."
)

Exams = Mapping[str, Mapping[str, float]]


def exam_rows(exams: Exams) -> list[list[str]]:
    """The cells of `EXAM_COLUMNS` for each model in `exams`; empty where nothing was measured."""
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
