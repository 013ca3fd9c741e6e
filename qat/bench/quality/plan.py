"""What a recipe comes down to: plans, jobs, and the settings that they hand to each verb."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from qat.bench.baselines.config import BaselineSettings
from qat.bench.jobs import JobFiles, name_in_path
from qat.bench.quality.config import QualityRecipe, Table
from qat.config import Settings, fingerprint
from qat.convert.config import ConvertConfig
from qat.data.cache import ROWS
from qat.data.config import CacheConfig
from qat.data.sources import STDLIB
from qat.train.config import TrainConfig


class QualityStage(Settings):
    """One training of a recipe."""

    convert: Table | None
    """A conversion of the student before it; None trains the student as it is."""
    train: Table
    """Settings of `qat train`, less what the job knows."""
    steps: int


class QualityPlan(Settings):
    """A recipe with all its settings, for any seed."""

    name: str
    method: str
    cache: Table
    """Settings of the cache that it learns from, less data, teacher and device."""
    convert: Table | None
    """Settings of its first conversion; None for a baseline, which converts as it likes."""
    stages: tuple[QualityStage, ...]
    """Trainings in order; none for a recipe that only converts."""
    baseline: Table
    """Settings of a baseline."""
    steps: int
    """Optimizer steps in all."""
    seeds: tuple[int, ...]
    equal_time_to: str | None

    def with_steps(self, steps: int) -> "QualityPlan":
        """The same recipe over another number of steps, shared out as before."""
        parts = shared_out(steps, [stage.steps for stage in self.stages])
        pairs = zip(self.stages, parts, strict=True)
        stages = tuple(stage.model_copy(update={"steps": part}) for stage, part in pairs)
        return self.model_copy(update={"steps": steps, "stages": stages})


class QualityJob(JobFiles, Settings):
    """A recipe and a seed; without a plan, the teacher itself, which is only judged."""

    recipe: QualityRecipe
    plan: QualityPlan | None
    seed: int
    out: Path
    """The directory of results."""
    device: str
    workers: int
    """Jobs side by side on its device."""
    threads: int
    """Of the CPU, whose cores the jobs of all devices share."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return "teacher" if self.plan is None else self.plan.name

    @property
    def key(self) -> str:
        """12 hex digits that change when the rows may; where and how it runs does not count."""
        judging = self.recipe.model_dump(
            mode="json",
            include={"report_sequences", "kd_sequences", "sequence_length", "generate_tokens"}
            | {"generate_prompts", "generate_samples", "texts", "cache", "teacher"},
        )
        if self.plan is None:
            return fingerprint([ROWS, judging])
        plan = self.plan.model_dump(mode="json", exclude={"seeds"})
        tables = [self.plan.convert, *(stage.convert for stage in self.plan.stages)]
        return fingerprint(
            [ROWS, judging, plan, self.seed, [contents_of(table) for table in tables]]
        )

    @property
    def label(self) -> str:
        """Name that the job's files share."""
        return f"{name_in_path(self.name)}-s{self.seed}-{self.key}"


def cache_config(recipe: QualityRecipe, table: Table, device: str = "auto") -> CacheConfig:
    """The settings to build a cache with, from a plan's table or the file's.

    Raises:
        ConfigError: `qat cache` would refuse them.
    """
    values = {
        **table,
        "data": recipe.texts.distil,
        "teacher": recipe.teacher,
        "sequence_length": recipe.sequence_length,
        "device": device,
    }
    return CacheConfig.parse(values, "cache")


def convert_config(table: Table, cache: Path, device: str = "auto") -> ConvertConfig:
    """The settings of a conversion that calibrates on `cache` unless its table says otherwise.

    `calibration = false` means none.

    Raises:
        ConfigError: `qat convert` would refuse them.
    """
    values = {"calibration": str(cache), **table, "device": device}
    values["calibration"] = values["calibration"] or None
    return ConvertConfig.parse(values, "convert")


def train_config(
    stage: QualityStage, cache: Path, seed: int = 0, device: str = "auto", **more: object
) -> TrainConfig:
    """The settings of one training; `more` win over the stage's own.

    Raises:
        ConfigError: `qat train` would refuse them.
    """
    steps = {"max_steps": stage.steps, "eval_every": stage.steps}
    values = {**steps, **stage.train, **more, "cache_dir": cache, "seed": seed, "device": device}
    return TrainConfig.parse(values, "train")


def baseline_settings(plan: QualityPlan, seed: int = 0, device: str = "auto") -> BaselineSettings:
    """The settings of a baseline under the shared budget."""
    steps = max(1, plan.steps)  # a method that trains nothing does not look
    return BaselineSettings(**plan.baseline, max_steps=steps, seed=seed, device=device)


def content_of(text: str) -> str:
    """16 hex digits of a file's or directory's bytes; what is neither stands for itself."""
    path = STDLIB if text == "stdlib" else Path(text)
    if not path.exists():
        return text
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digest = xxhash.xxh3_64()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def contents_of(table: Table | None) -> Table:
    """The hashes of all files that a table's values name."""
    values = {} if table is None else table
    return {
        key: content_of(value)
        for key, value in values.items()
        if isinstance(value, str) and Path(value).is_file()
    }


def conversion_key(table: Table, cache: str) -> str:
    """12 hex digits that change when a conversion's result may; `cache` is the cache's own key."""
    calibrates_on = cache if "calibration" not in table else ""
    return fingerprint([table, contents_of(table), calibrates_on])


def cache_key(table: Table) -> str:
    """12 hex digits that change when a cache's content may, in one directory of results."""
    return fingerprint([ROWS, {key: value for key, value in table.items() if key != "batch_size"}])


def shared_out(steps: int, weights: Sequence[int]) -> list[int]:
    """`steps` in parts as `weights`, whole, at least one each; nothing for no weights."""
    ends = [round(steps * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    return [max(1, end - start) for start, end in zip([0, *ends], ends, strict=False)]


# Where things lie in a directory of results.


@dataclass(frozen=True)
class QualityPlaces:
    """The parts of one directory of results."""

    out: Path

    @property
    def shared(self) -> Path:
        """What all its rows have in common."""
        return self.out / "quality.json"

    @property
    def timing(self) -> Path:
        """Step times that set budgets."""
        return self.out / "timing.json"

    def cache(self, table: Table) -> Path:
        """The teacher cache of these settings."""
        return self.out / "caches" / cache_key(table)

    def student(self, convert: Table, cache: Table) -> Path:
        """The teacher converted by these settings, which may calibrate on that cache."""
        return self.out / "students" / conversion_key(convert, cache_key(cache))
