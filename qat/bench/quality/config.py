"""Settings of `qat bench quality`: its flags, and what a recipe file says."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from qat.bench.config import read_toml
from qat.config import Settings
from qat.errors import ConfigError

OURS = "qat"
"""The method that trains through `qat train`; every other one is a baseline."""
HELD_OUT = "held_out"
"""Written in place of a file: the held-out split of the cache of the text to learn from."""

Table = dict[str, Any]
"""A table that belongs to another verb, which checks it."""


class QualityConfig(Settings):
    """Where the jobs of a recipe run; nothing here changes what they find."""

    workers: int = Field(1, ge=1)
    """Jobs side by side on each device; seconds compare only between rows of equal workers."""
    device: str = "auto"
    """auto or cuda, whose jobs spread over all GPUs, cpu, cuda:1 or mps."""


class Texts(Settings):
    """What is learned from, and what is judged on."""

    distil: str
    """Whatever `qat cache --data` reads."""
    report: dict[str, str] = Field(min_length=1)
    """Texts to judge on by name: files as for `distil`, or `held_out` for its held-out split."""
    calibration: str | None = None
    """What conversions calibrate on; by default the training split of the recipe's cache."""


class QualityEntry(Settings):
    """One recipe: a way from the teacher to a student."""

    name: str = Field(min_length=1)
    """What the table calls it."""
    method: str = OURS
    """`qat`, or the name of a baseline."""
    convert: Table = {}
    """Settings of `qat convert`, over those of the file."""
    train: Table | Literal[False] = {}
    """Settings of `qat train`, over those of the file; false converts only. Of a baseline: its own
    settings, without any of the file's."""
    stages: tuple[Table, ...] = ()
    """Instead of `train`: trainings one after the other, each with its own `max_steps`, the later
    ones perhaps with a `convert` before them."""
    cache: Table = {}
    """Settings of `qat cache`, over those of the file."""
    seeds: tuple[int, ...] | None = None
    """Instead of the file's seeds; a recipe that only converts runs once."""
    max_steps: int | None = Field(None, gt=0)
    """Instead of the file's optimizer steps."""
    equal_time_to: str | None = None
    """Take as many steps as that recipe's training time allows, by the step times of both."""

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
    """What the results are called."""
    teacher: str
    """Directory or hub id."""
    max_steps: int = Field(1000, gt=0)
    """Optimizer steps of each recipe, all its stages together."""
    batch_size: int = Field(64, gt=0)
    """Sequences in an optimizer step."""
    sequence_length: int = Field(ge=2)
    """Tokens in a sequence, of the cache and of the texts to judge on."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """Each recipe is trained once with each."""
    generate_prompts: tuple[str, ...] = ()
    """What samples continue; by default eight beginnings of the first text to judge on."""
    generate_samples: int = Field(4, gt=0)
    """Samples of each prompt."""
    generate_tokens: int = Field(64, gt=4)
    """Tokens in a sample."""
    report_sequences: int = Field(512, gt=0)
    """Judge on the first so many sequences of each text."""
    kd_sequences: int = Field(256, gt=0)
    """Held-out sequences of the cache for KD."""
    texts: Texts
    """What is learned from and judged on."""
    cache: Table = {}
    """Settings of `qat cache` for all recipes."""
    convert: Table = {}
    """Settings of `qat convert` for all recipes."""
    train: Table = {}
    """Settings of `qat train` for all recipes."""
    recipes: tuple[QualityEntry, ...] = Field(min_length=1)
    """What is compared."""

    @model_validator(mode="after")
    def _check(self) -> Self:
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
    """The recipe in a TOML file.

    Raises:
        ConfigError: it is missing, no TOML, or has an unknown, missing or impossible key.
    """
    return QualityRecipe.parse(read_toml(path, "quality"), str(path))
