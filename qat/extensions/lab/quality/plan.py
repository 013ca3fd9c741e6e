"""Recipes of `qat bench quality`, resolved to plans, jobs, and settings of verbs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import xxhash
from pydantic import Field, model_validator

from qat.config import Settings, fingerprint, read_toml
from qat.convert.config import ConvertConfig
from qat.data.cache import ROWS
from qat.data.config import CacheConfig
from qat.errors import ConfigError
from qat.extensions.lab.baselines.config import BaselineSettings
from qat.extensions.lab.jobs import JobFiles, name_in_path
from qat.train.config import TrainConfig

OURS = "qat"  # the method that trains with `qat train`; every other method is a baseline
HELD_OUT = "held_out"
"""Stands for the held-out split of the training text's cache, in place of a file."""

FOR = "for"
"""The key of a conversion's table with the names of targets, as in `qat convert --for`."""

Table = dict[str, Any]  # a table of settings for another verb, which checks it


class Texts(Settings):
    """The texts for training and for evaluation."""

    distil: str
    """Training text, in any form that `qat cache --data` reads."""
    report: dict[str, str] = Field(min_length=1)
    """Evaluation texts by name: files as for `distil`, or `held_out` for its held-out split."""
    calibration: str | None = None
    """Calibration text of conversions; by default the training split of the recipe's cache."""


class QualityEntry(Settings):
    """One recipe: a way from the teacher to a student."""

    name: str = Field(min_length=1)
    """Name in the table."""
    method: str = OURS
    """`qat`, or the name of a baseline."""
    convert: Table = {}
    """Settings of `qat convert`, which override those of the file; and `for`, names of targets."""
    train: Table | Literal[False] = {}
    """Settings of `qat train`, which override those of the file; false only converts. For a
    baseline these are its own settings, without any of the file's."""
    stages: tuple[Table, ...] = ()
    """Consecutive trainings instead of `train`, each with its own `max_steps`; later ones may have
    a `convert` that is done before them."""
    cache: Table = {}
    """Settings of `qat cache`, which override those of the file."""
    seeds: tuple[int, ...] | None = None
    """Seeds in place of the file's; a recipe that only converts runs once."""
    max_steps: int | None = Field(None, gt=0)
    """Optimizer steps in place of the file's."""
    equal_time_to: str | None = None
    """Recipe whose training time this one may use: its steps follow from the step times of both."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stages and self.train != {}:
            raise ValueError(f"recipe {self.name!r} has train and stages; keep one of them")
        if self.equal_time_to and (self.train is False or self.max_steps):
            raise ValueError(
                f"recipe {self.name!r} has equal_time_to beside train = false or max_steps; keep "
                "one of them"
            )
        if self.method != OURS and (self.stages or self.convert):
            raise ValueError(
                f"recipe {self.name!r} has stages or convert, which method {self.method!r} does "
                f"not know; put its settings into train or use method = {OURS!r}"
            )
        return self


class QualityRecipe(Settings):
    """One teacher, data, step and seed budget, and the recipes that share it."""

    name: str
    """Name of the results."""
    teacher: str
    """Directory or hub id."""
    max_steps: int = Field(1000, gt=0)
    """Optimizer steps of each recipe, over all its stages."""
    batch_size: int = Field(64, gt=0)
    """Sequences per optimizer step."""
    sequence_length: int = Field(ge=2)
    """Tokens per sequence, in the cache and in the evaluation texts."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """Seeds; each recipe is trained once with each of them."""
    generate_prompts: tuple[str, ...] = ()
    """Prompts of samples; by default eight beginnings of the first evaluation text."""
    generate_chats: int = Field(0, ge=0)
    """Alternatively the number of sequences of that text whose prompts are used, such as the
    questions of its chats, as in `qat train --on-policy`; 0 for none."""
    generate_samples: int = Field(4, gt=0)
    """Samples per prompt."""
    generate_tokens: int = Field(64, gt=4)
    """Tokens per sample."""
    report_sequences: int = Field(512, gt=0)
    """Sequences to evaluate on from the start of each text."""
    kd_sequences: int = Field(256, gt=0)
    """Held-out sequences of the cache for KD."""
    texts: Texts
    """The texts for training and for evaluation."""
    cache: Table = {}
    """Settings of `qat cache` for all recipes."""
    convert: Table = {}
    """Settings of `qat convert` for all recipes."""
    train: Table = {}
    """Settings of `qat train` for all recipes."""
    recipes: tuple[QualityEntry, ...] = Field(min_length=1)
    """The recipes to compare."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.generate_prompts and self.generate_chats:
            raise ConfigError(
                f"generate_chats={self.generate_chats} beside generate_prompts; expected one of "
                "them; drop the other"
            )
        names = [entry.name for entry in self.recipes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"recipes: {names.count(twice[0])} are called {twice[0]!r}; expected a name of its "
                "own for each; rename all but one"
            )
        timed = {entry.name: entry.equal_time_to for entry in self.recipes if entry.equal_time_to}
        for name, other in timed.items():
            if other == name or other in timed or other not in names:
                raise ConfigError(
                    f"recipe {name!r} has equal_time_to={other!r}; expected another recipe of this "
                    f"file with a step budget; choose among {', '.join(set(names) - set(timed))}"
                )
        return self


def read_quality(path: Path) -> QualityRecipe:
    """Read the recipe in a TOML file.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown, missing or invalid key.
    """
    return QualityRecipe.parse(read_toml(path, f"recipe={path}", "a quality recipe"), str(path))


class QualityStage(Settings):
    """One training of a recipe."""

    convert: Table | None
    """Conversion of the student before it; None trains the student as it is."""
    train: Table
    """Settings of `qat train` without those that the job fills in."""
    steps: int


class QualityPlan(Settings):
    """A recipe with all its settings, for any seed."""

    name: str
    method: str
    cache: Table
    """Settings of the cache that it trains on, without data, teacher and device."""
    convert: Table | None
    """Settings of its first conversion; None for a baseline, which converts in its own way."""
    stages: tuple[QualityStage, ...]
    """Trainings in order; empty for a recipe that only converts."""
    baseline: Table
    """Settings of a baseline."""
    steps: int
    """Optimizer steps in total."""
    seeds: tuple[int, ...]
    equal_time_to: str | None

    def with_steps(self, steps: int) -> "QualityPlan":
        """Return the same recipe with another number of steps, split in the same proportions."""
        parts = shared_out(steps, [stage.steps for stage in self.stages])
        pairs = zip(self.stages, parts, strict=True)
        stages = tuple(stage.model_copy(update={"steps": part}) for stage, part in pairs)
        return self.model_copy(update={"steps": steps, "stages": stages})


class QualityJob(JobFiles, Settings):
    """A recipe and a seed; without a plan, the teacher itself, which is only evaluated."""

    module: ClassVar[str] = "qat.extensions.lab.quality.job"
    recipe: QualityRecipe
    plan: QualityPlan | None
    seed: int
    out: Path
    """The directory of results."""
    device: str
    workers: int
    """Parallel jobs on its device."""
    threads: int
    """Number of CPU threads, a share of the cores that the jobs of all devices use."""

    @property
    def name(self) -> str:
        """The name in the table."""
        return "teacher" if self.plan is None else self.plan.name

    @property
    def key(self) -> str:
        """12 hex digits that change when the rows may; device and workers do not count."""
        judging = self.recipe.model_dump(
            mode="json",
            include={"report_sequences", "kd_sequences", "sequence_length", "generate_tokens"}
            | {"generate_prompts", "generate_chats", "generate_samples"}
            | {"texts", "cache", "teacher"},
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
        """The name that the job's files share."""
        return f"{name_in_path(self.name)}-s{self.seed}-{self.key}"


def cache_config(recipe: QualityRecipe, table: Table, device: str = "auto") -> CacheConfig:
    """Return the settings to build a cache with, from a plan's table or the file's.

    Raises:
        ConfigError: `qat cache` would refuse them.
    """
    own = {"data": recipe.texts.distil, "teacher": recipe.teacher, "device": device}
    return CacheConfig.parse({**table, **own, "sequence_length": recipe.sequence_length}, "cache")


def convert_config(table: Table, cache: Path, device: str = "auto") -> ConvertConfig:
    """Return the settings of a conversion, calibrated on `cache` unless its table names a text.

    `calibration = false` disables calibration; `for` is read by `shipping_of`.

    Raises:
        ConfigError: `qat convert` would refuse them.
    """
    values = {"calibration": str(cache), **table, "device": device}
    values["calibration"] = values["calibration"] or None
    values.pop(FOR, None)
    return ConvertConfig.parse(values, "convert")


def train_config(
    stage: QualityStage, cache: Path, seed: int = 0, device: str = "auto", **more: object
) -> TrainConfig:
    """Return the settings of one training; `more` override the stage's own.

    Raises:
        ConfigError: `qat train` would refuse them.
    """
    steps = {"max_steps": stage.steps, "eval_every": stage.steps}
    values = {**steps, **stage.train, **more, "cache_dir": cache, "seed": seed, "device": device}
    return TrainConfig.parse(values, "train")


def baseline_settings(plan: QualityPlan, seed: int = 0, device: str = "auto") -> BaselineSettings:
    """Return the settings of a baseline with the shared budget."""
    steps = max(1, plan.steps)  # a method without training ignores it
    return BaselineSettings(**plan.baseline, max_steps=steps, seed=seed, device=device)


def content_of(text: str) -> str:
    """Return 16 hex digits of a file's or directory's bytes; other text is returned as it is."""
    from qat.data.sources import STDLIB  # --help needs only the settings above

    path = STDLIB if text == "stdlib" else Path(text)
    if not path.exists():
        return text
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digest = xxhash.xxh3_64()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def contents_of(table: Table | None) -> Table:
    """Return the hashes of all files that a table's values name."""
    return {
        key: content_of(value)
        for key, value in (table or {}).items()
        if isinstance(value, str) and Path(value).is_file()
    }


def cache_dir(out: Path, table: Table) -> Path:
    """Return the directory of the teacher cache; its name changes when its content may."""
    values = {key: value for key, value in table.items() if key != "batch_size"}
    return out / "caches" / fingerprint([ROWS, values])


def student_dir(out: Path, convert: Table, cache: Table) -> Path:
    """Return the directory of the teacher converted by these settings, calibrated on that cache."""
    calibrates_on = cache_dir(out, cache).name if "calibration" not in convert else ""
    return out / "students" / fingerprint([convert, contents_of(convert), calibrates_on])


def shared_out(steps: int, weights: Sequence[int]) -> list[int]:
    """Split `steps` in proportion to `weights`, at least 1 each; empty for no weights."""
    ends = [round(steps * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    return [max(1, end - start) for start, end in zip([0, *ends], ends, strict=False)]
