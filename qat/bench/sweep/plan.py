"""What a sweep comes down to: groups of settings, and runs of them in turns."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from qat.bench.sweep.config import Group, StepsConfig, SweepRecipe, Table, Verb
from qat.config import Settings, fingerprint
from qat.errors import ConfigError
from qat.train.config import TrainConfig


class Run(Settings):
    """One process of a sweep: a group and a repeat."""

    sweep: str
    verb: Verb
    student: str
    command: tuple[str, ...]
    group: str
    settings: Table
    repeat: int
    out: Path
    """The directory of results."""
    strict: bool = False

    @property
    def key(self) -> str:
        """12 hex digits that change when what runs does; where it runs does not count."""
        values = self.model_dump(mode="json", exclude={"out", "sweep"})
        return fingerprint(values)

    @property
    def label(self) -> str:
        """What its files are called."""
        letters = (letter if letter.isalnum() else "-" for letter in self.group.lower())
        return f"{''.join(letters)[:80]}-r{self.repeat}-{self.key}"

    @property
    def row(self) -> Path:
        """What a run that is finished leaves; written whole or not at all."""
        return self.out / "rows" / f"{self.label}.json"

    @property
    def failure(self) -> Path:
        """What stands for a run that failed."""
        return self.out / "failed" / f"{self.label}.json"

    @property
    def job(self) -> Path:
        """What its process reads."""
        return self.out / "jobs" / f"{self.label}.json"

    @property
    def log(self) -> Path:
        """What it said."""
        return self.out / "logs" / f"{self.label}.log"

    @property
    def telemetry(self) -> Path:
        """What GPU and host did meanwhile."""
        return self.out / "telemetry" / f"{self.label}.csv"

    @property
    def directory(self) -> Path:
        """For what it makes itself: a training run, or heartbeats of ranks."""
        return self.out / "runs" / self.label


def make_groups(recipe: SweepRecipe) -> list[Group]:
    """Every named group at every point of the product, with the base settings below.

    Raises:
        ConfigError: the baseline is not among them, or a verb refuses the settings of one.
    """
    names, lists = tuple(recipe.product), recipe.product.values()
    points = [dict(zip(names, values, strict=True)) for values in product(*lists)]
    named = recipe.groups or (Group(name="-"),)
    found = [_joined(recipe, group, point) for group in named for point in points]
    known = [group.name for group in found]
    if recipe.baseline and recipe.baseline not in known:
        raise ConfigError(
            f"baseline={recipe.baseline!r} is no group of this sweep, expected one of "
            f"{', '.join(map(repr, known[:8]))}{', ...' if len(known) > 8 else ''}; name one"
        )
    twice = next((name for name in known if known.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"groups: {known.count(twice)} are called {twice!r}, expected a name of its own for "
            "each; drop values that [product] has twice"
        )
    for group in found:
        _check(recipe, group)
    return found


def make_runs(
    recipe: SweepRecipe, groups: Sequence[Group], out: Path, *, strict: bool = False
) -> list[Run]:
    """All groups once, then all again: what drifts on the machine meets each of them alike."""
    shared = {"verb": recipe.verb, "student": recipe.student, "command": recipe.command}
    return [
        Run(
            sweep=recipe.name,
            group=group.name,
            settings=group.settings,
            repeat=repeat,
            out=out,
            strict=strict,
            **shared,
        )
        for repeat in range(recipe.repeats)
        for group in groups
    ]


def _joined(recipe: SweepRecipe, group: Group, point: Table) -> Group:
    words = [f"{name}={_word(value)}" for name, value in point.items()]
    names = ([group.name] if recipe.groups else []) + words
    settings = {**recipe.settings, **group.settings, **point}
    return Group(name=" ".join(names) or recipe.name, settings=settings)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check(recipe: SweepRecipe, group: Group) -> None:
    """Have the verb read the settings, so that no run finds out later."""
    where = f"group {group.name!r}"
    if recipe.verb == "bench":
        StepsConfig.parse(group.settings, where)
    elif recipe.verb == "train":
        TrainConfig.parse(group.settings, where)
    else:
        fill_command(recipe.command, {"python": "", "out": "", **group.settings})


def fill_command(command: Sequence[str], settings: Table) -> list[str]:
    """The command with the settings in the places of their names.

    Raises:
        ConfigError: a place names no setting.
    """
    try:
        return [word.format(**settings) for word in command]
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"command={' '.join(command)!r} has a place for {error}, expected one of "
            f"{', '.join(settings) or 'no settings'}; name a setting, or double the braces"
        ) from None
