"""The recipe of `qat bench sweep`, its groups of settings, and its runs in turns."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from qat.config import Settings, fingerprint, read_toml
from qat.errors import ConfigError, nearest
from qat.extensions.bench.config import BenchConfig, parse_sizes
from qat.extensions.lab.jobs import JobFiles, name_in_path
from qat.files import parse_toml
from qat.train.config import TrainConfig

Verb = Literal["bench", "train", "command"]
Table = dict[str, Any]

NOT_SWEPT = {
    "bench": {"shape", "like", "batch_sizes", "find_max_batch", "plan", "strict"},
    "train": set(),
}
"""Settings of a verb that a sweep does not accept."""


class StepsConfig(BenchConfig):
    """Settings of one run with `verb = "bench"`."""

    layout: Literal["rows", "packed", "buckets"] = "rows"
    """Random data: full rows, or documents of varied lengths, packed or padded to buckets."""
    bucket_lengths: str = Field("", coerce_numbers_to_str=True)
    """Boundaries of the buckets, joined by commas, the last one seq_len; by default its eighth,
    quarter and half besides."""
    attention_kernel: Literal["auto", "cudnn", "efficient", "flash", "math"] = "auto"
    """Kernel that PyTorch's dense attention must use; a row says if another operator ran."""
    ranks: int = Field(1, ge=1)
    """Processes that take each step together, one per device; `batch_size` is per process."""
    shard_latents: bool = False
    """Shard the rows of the latent weights over the ranks."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """The named boundaries, ascending; empty if none are named."""
        return parse_sizes(self.bucket_lengths)

    @field_validator("bucket_lengths")
    @classmethod
    def _check_lengths(cls, text: str) -> str:
        parse_sizes(text)
        return text

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        if self.buckets and self.layout != "buckets":
            raise ValueError(
                f"bucket_lengths={self.bucket_lengths!r} with layout={self.layout!r}, expected "
                "layout='buckets'; set it, or drop the boundaries"
            )
        return self


CONFIGS = {"bench": StepsConfig, "train": TrainConfig}  # the settings class of each verb


class Group(Settings):
    """Named settings, which are combined with every point of the product."""

    name: str = Field(min_length=1)
    """Name in the table."""
    settings: Table = {}
    """Settings that override the base settings."""


class SweepRecipe(Settings):
    """The comparison: base settings, groups, a product of lists, and repeats."""

    name: str = Field(min_length=1)
    """Name of the results."""
    verb: Verb = "bench"
    """Kind of runs: bench times training steps, train trains a student, command runs any program.
    """
    student: str = ""
    """Packed checkpoint, or a shape (bench only)."""
    command: tuple[str, ...] = ()
    """Program and arguments for verb = command; `{key}` is replaced by a setting."""
    repeats: int = Field(3, ge=1)
    """Runs of each group, in turns: all groups once, then all again."""
    timeout_s: float = Field(1800.0, gt=0)
    """Time limit of a run in seconds, after which all its processes are ended."""
    stop_on_error: bool = False
    """Stop at the first run that fails, instead of continuing with the others."""
    baseline: str = ""
    """Group that all others are compared with; by default the first."""
    settings: Table = {}
    """Settings of all runs, as for the verb."""
    groups: tuple[Group, ...] = ()
    """Named groups of settings."""
    product: dict[str, list[Any]] = {}
    """Values by setting; each combination is a group."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.verb == "command":
            if not self.command:
                raise ValueError("verb='command' needs a command; give command = [...]")
        elif not self.student or self.command:
            raise ValueError(
                f"verb={self.verb!r} needs a student and no command; give student = '...'"
            )
        for key, values in self.product.items():
            if not values:
                raise ValueError(
                    f"product.{key} is empty, expected values to compare; fill it or drop it"
                )
        names = [group.name for group in self.groups]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"groups: {names.count(twice)} are called {twice!r}; expected a name of its own "
                "for each; rename all but one"
            )
        return self


def read_sweep(path: Path, *, tiny: bool = False, changes: Sequence[str] = ()) -> SweepRecipe:
    """Read the recipe in a TOML file; with `tiny`, its [tiny] table overrides the rest.

    Each of the `changes`, such as `settings.steps=20`, then overrides a key.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown, missing or invalid key,
            or a change names none.
    """
    values = read_toml(path, f"recipe={path}", "a sweep recipe")
    small = values.pop("tiny", {})
    if not isinstance(small, dict):
        raise ConfigError(
            f"{path}: tiny={small!r:.80}, expected a table of keys over the others; write [tiny] "
            "above them"
        )
    check_keys(str(path), values, SweepRecipe.model_fields)
    check_keys(f"{path}: [tiny]", small, SweepRecipe.model_fields)
    values = _merged(values, small) if tiny else values
    for change in changes:
        _change(values, change)
    check_keys(f"{path} with --set", values, SweepRecipe.model_fields)
    recipe = SweepRecipe.parse(values, str(path))
    _check_settings(recipe, path)
    return recipe


def _merged(values: Table, over: Table) -> Table:
    """Return `values` overridden by `over`; tables in both are merged, lists replaced."""
    found = dict(values)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = {**found[key], **value} if both else value
    return found


def _change(values: Table, change: str) -> None:
    """Set a key of a recipe, whose value is TOML or else plain text."""
    key, equals, text = change.partition("=")
    table, name = values, key
    if key.startswith("groups."):
        group, _, name = key.removeprefix("groups.").rpartition(".")
        groups = [each for each in values.get("groups", ()) if isinstance(each, dict)]
        known = [each.get("name") for each in groups]
        if group not in known:
            raise ConfigError(
                f"set={change}: {group!r} is no group of the recipe, expected "
                f"groups.NAME.KEY=VALUE; use {' or '.join(map(repr, known)) or 'settings.KEY'}"
            )
        table = groups[known.index(group)].setdefault("settings", {})
    elif "." in key:
        part, _, name = key.partition(".")
        table = values.setdefault(part, {})
    if not (equals and name and isinstance(table, dict)):
        raise ConfigError(
            f"set={change}, expected a key of the recipe and its value; write it as "
            "settings.steps=20 or repeats=1"
        )
    try:
        table[name] = parse_toml(f"value = {text}")["value"]
    except ValueError:  # plain text, such as student=tiny
        table[name] = text
    if key.startswith("product.") and not isinstance(table[name], list):
        raise ConfigError(
            f"set={change}: {text!r} is no list, expected the values to compare; write it as "
            "'product.ranks=[1,2]'"
        )


def _check_settings(recipe: SweepRecipe, path: Path) -> None:
    tables = {"[settings]": recipe.settings, "[product]": recipe.product}
    tables |= {f"group {group.name!r}": group.settings for group in recipe.groups}
    if recipe.verb != "command":  # a command accepts settings of any name
        known = set(CONFIGS[recipe.verb].model_fields) - NOT_SWEPT[recipe.verb]
        for where, table in tables.items():
            check_keys(f"{path}: {where}", table, known)
    del tables["[product]"]
    for where, table in tables.items():
        both = sorted(set(table) & set(recipe.product))
        if both:
            values = ", ".join(map(str, recipe.product[both[0]]))
            raise ConfigError(
                f"{path}: {where} and [product] both set {both[0]!r}, expected one of them to; "
                f"drop it from the other, or change product.{both[0]}=[{values}]"
            )


class SweepRun(JobFiles, Settings):
    """One process of a sweep: a group and a repeat."""

    module: ClassVar[str] = "qat.extensions.lab.sweep.job"
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
        """12 hex digits that change with what is run; the place of the results does not count."""
        return fingerprint(self.model_dump(mode="json", exclude={"out", "sweep"}))

    @property
    def label(self) -> str:
        """The name that the job's files share."""
        return f"{name_in_path(self.group)[:80]}-r{self.repeat}-{self.key}"

    @property
    def ranks(self) -> int:
        """Processes of a bench run; a command starts its own."""
        return self.settings.get("ranks", 1) if self.verb == "bench" else 1

    @property
    def failure(self) -> Path:
        """The file that records a failed run."""
        return self.out / "failed" / f"{self.label}.json"

    @property
    def telemetry(self) -> Path:
        """The file of GPU and host samples."""
        return self.out / "telemetry" / f"{self.label}.csv"


def make_groups(recipe: SweepRecipe) -> list[Group]:
    """Return every named group at every point of the product, on top of the base settings.

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
    for group in found:  # parse now, so that a run does not fail later
        if recipe.verb == "command":
            fill_command(recipe.command, {"python": "", "out": "", **group.settings})
        else:
            CONFIGS[recipe.verb].parse(group.settings, f"group {group.name!r}")
    return found


def make_runs(
    recipe: SweepRecipe, groups: Sequence[Group], out: Path, *, strict: bool = False
) -> list[SweepRun]:
    """Return the runs: all groups once, then all again, so that drift affects all groups alike."""
    return [
        SweepRun(
            sweep=recipe.name,
            verb=recipe.verb,
            student=recipe.student,
            command=recipe.command,
            group=group.name,
            settings=group.settings,
            repeat=repeat,
            out=out,
            strict=strict,
        )
        for repeat in range(recipe.repeats)
        for group in groups
    ]


def _joined(recipe: SweepRecipe, group: Group, point: Table) -> Group:
    names = [group.name] if recipe.groups else []
    for name, value in point.items():
        names.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    settings = {**recipe.settings, **group.settings, **point}
    return Group(name=" ".join(names) or recipe.name, settings=settings)


def fill_command(command: Sequence[str], settings: Table) -> list[str]:
    """Fill the settings into the placeholders of a command.

    Raises:
        ConfigError: a placeholder names no setting.
    """
    try:
        return [word.format(**settings) for word in command]
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"command={' '.join(command)!r} has a place for {error}, expected one of "
            f"{', '.join(settings) or 'no settings'}; name a setting, or double the braces"
        ) from None


def check_keys(where: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first unknown key, with the nearest known one."""
    known = sorted(known)
    for key in keys:
        if key not in known:
            close = nearest(key, known)
            hint = f"did you mean {close[0]!r}?" if close else f"choose among {', '.join(known)}"
            raise ConfigError(f"{where} has {key!r}, expected a key that it knows; {hint}")
