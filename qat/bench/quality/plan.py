"""From a recipe file to settings that were checked, job by job, before anything runs."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from qat.bench.baselines.config import METHODS, PTQ, BaselineSettings
from qat.bench.quality.config import HELD_OUT, OURS, Entry, QualityRecipe, Table, Texts
from qat.config import Settings, fingerprint
from qat.data.config import CacheConfig
from qat.data.sources import open_source
from qat.errors import ConfigError
from qat.losses.config import check_targets, check_with_teacher
from qat.models.config import ConvertConfig
from qat.models.convert import read_plan
from qat.models.load import model_identity
from qat.train.config import TrainConfig

TEACHER = "teacher"
"""Written for a model in `base` or `teacher`: the teacher of the file."""
SHARED_CACHE_KEYS = {"data", "teacher", "sequence_length", "device", "device_map"}
HELD_OUT_KEYS = {"seed", "held_out", "format", "text_field", "thinking"}
"""What decides which text is held out: one choice for all recipes."""
SHARED_TRAIN_KEYS = {"cache_dir", "seed", "device", "max_steps"}
ANYWHERE = Path("cache")
"""Stands for a cache until there is one."""


class Stage(Settings):
    """One training of a recipe."""

    convert: Table | None
    """A conversion of the student before it; None trains the student as it is."""
    train: Table
    """Settings of `qat train`, less what the job knows."""
    steps: int


class Plan(Settings):
    """A recipe with all its settings, for any seed."""

    name: str
    method: str
    cache: Table
    """Settings of the cache that it learns from, less data, teacher and device."""
    convert: Table | None
    """Settings of its first conversion; None for a baseline, which converts as it likes."""
    stages: tuple[Stage, ...]
    """Trainings in order; none for a recipe that only converts."""
    baseline: Table
    """Settings of a baseline."""
    steps: int
    """Optimizer steps in all."""
    seeds: tuple[int, ...]
    equal_time_to: str | None

    def with_steps(self, steps: int) -> "Plan":
        """The same recipe over another number of steps, shared out as before."""
        parts = shared_out(steps, [stage.steps for stage in self.stages])
        pairs = zip(self.stages, parts, strict=True)
        stages = tuple(stage.model_copy(update={"steps": part}) for stage, part in pairs)
        return self.model_copy(update={"steps": steps, "stages": stages})


class Shared(Settings):
    """What all rows of one directory have in common."""

    name: str
    teacher: str
    """Its content's hash, or a hub id's revision."""
    texts: dict[str, str]
    """Hashes of the texts."""
    settings: Table


def resolve(recipe: QualityRecipe) -> list[Plan]:
    """The plans of all recipes, every setting checked as far as can be without a model.

    Raises:
        ConfigError: a setting that its verb refuses, or that is not a recipe's own to choose.
        DataError: a text that is missing or empty.
    """
    check_disjoint(recipe.texts)
    for text in text_sources(recipe.texts):
        open_source(text)
    plans = [_plan(recipe, entry) for entry in recipe.recipes]
    _check_timed(plans)
    return plans


def check_disjoint(texts: Texts) -> None:
    """Refuse to judge on a text that is learned from or calibrated on.

    Raises:
        ConfigError: a text to judge on is one of those files, or lies in such a directory.
    """
    learned = {"distil": texts.distil, "calibration": texts.calibration or texts.distil}
    for name, text in texts.report.items():
        for role, other in learned.items():
            if text != HELD_OUT and _is_within(text, other):
                raise ConfigError(
                    f"texts.report.{name}={text} is (part of) texts.{role}={other}; expected a "
                    f"text that no student has seen; name another file or {HELD_OUT!r}"
                )


def shared_facts(recipe: QualityRecipe) -> Shared:
    """What decides whether a row belongs into the directory of this recipe.

    Raises:
        CheckpointError: there is no such teacher.
    """
    budget = recipe.model_dump(
        mode="json", exclude={"recipes", "seeds", "name", "teacher", "texts", "convert", "train"}
    )
    files = {"distil": recipe.texts.distil, **recipe.texts.report}
    return Shared(
        name=recipe.name,
        teacher=model_identity(recipe.teacher),
        texts={name: content_of(text) for name, text in files.items()},
        settings=budget,
    )


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
    stage: Stage, cache: Path, seed: int = 0, device: str = "auto", **more: object
) -> TrainConfig:
    """The settings of one training; `more` win over the stage's own.

    Raises:
        ConfigError: `qat train` would refuse them.
    """
    steps = {"max_steps": stage.steps, "eval_every": stage.steps}
    values = {**steps, **stage.train, **more, "cache_dir": cache, "seed": seed, "device": device}
    return TrainConfig.parse(values, "train")


def baseline_settings(plan: Plan, seed: int = 0, device: str = "auto") -> BaselineSettings:
    """The settings of a baseline under the shared budget."""
    steps = max(1, plan.steps)  # a method that trains nothing does not look
    return BaselineSettings(**plan.baseline, max_steps=steps, seed=seed, device=device)


def content_of(text: str) -> str:
    """16 hex digits of a file's or directory's bytes; what is neither stands for itself."""
    path = Path(text)
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


def shared_out(steps: int, weights: Sequence[int]) -> list[int]:
    """`steps` in parts as `weights`, whole, at least one each; nothing for no weights."""
    ends = [round(steps * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    return [max(1, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def text_sources(texts: Texts) -> Iterable[str]:
    """The texts that are read from somewhere."""
    return [texts.distil, *(text for text in texts.report.values() if text != HELD_OUT)]


def conversion_key(table: Table, cache: str) -> str:
    """12 hex digits that change when a conversion's result may; `cache` is the cache's own key."""
    calibrates_on = cache if "calibration" not in table else ""
    return fingerprint([table, contents_of(table), calibrates_on])


def cache_key(table: Table) -> str:
    """12 hex digits that change when a cache's content may, in one directory of results."""
    return fingerprint({key: value for key, value in table.items() if key != "batch_size"})


def _plan(recipe: QualityRecipe, entry: Entry) -> Plan:
    where = f"recipe {entry.name!r}"
    cache = _cache_table(recipe, entry, where)
    is_ours = entry.method == OURS
    convert = _convert_table(recipe, recipe.convert | entry.convert, where) if is_ours else None
    stages = _stages(recipe, entry, where) if is_ours else ()
    settings = cache_config(recipe, cache)
    for stage in stages:
        config = train_config(stage, ANYWHERE)
        if config.teacher is None:
            check_targets(config.losses, settings.top_k, settings.draws)
        else:
            check_with_teacher(config.losses)
    trains = entry.train is not False and entry.method not in PTQ
    steps = (entry.max_steps or recipe.max_steps) if trains else 0
    return Plan(
        name=entry.name,
        method=entry.method,
        cache=cache,
        convert=convert,
        stages=stages,
        baseline={} if is_ours else _baseline_table(recipe, entry, where),
        steps=steps,
        seeds=entry.seeds or (recipe.seeds if trains else recipe.seeds[:1]),
        equal_time_to=entry.equal_time_to,
    )


def _cache_table(recipe: QualityRecipe, entry: Entry, where: str) -> Table:
    _refuse(recipe.cache, SHARED_CACHE_KEYS, "cache", "the file's own keys say it")
    _refuse(entry.cache, SHARED_CACHE_KEYS | HELD_OUT_KEYS, where, "it is the same for all recipes")
    table = recipe.cache | entry.cache
    config = cache_config(recipe, table)
    return {key: getattr(config, key) for key in table}


def _convert_table(recipe: QualityRecipe, table: Table, where: str) -> Table:
    _refuse(table, {"device"}, where, "give --device")
    if recipe.texts.calibration is not None:
        table = {"calibration": recipe.texts.calibration, **table}
    if table.get("base") == TEACHER:
        table = {**table, "base": recipe.teacher}
    try:
        read_plan(convert_config(table, ANYWHERE))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return table


def _stages(recipe: QualityRecipe, entry: Entry, where: str) -> tuple[Stage, ...]:
    """The trainings of a recipe; those that name no `max_steps` share what the others leave."""
    if entry.train is False:
        return ()
    tables = [dict(table) for table in entry.stages or (entry.train,)]
    given = [table.pop("max_steps", None) for table in tables] if entry.stages else [None]
    total = entry.max_steps or recipe.max_steps
    left, open_places = total - sum(filter(None, given)), given.count(None)
    if left < open_places or (open_places == 0 and left != 0):
        raise ConfigError(
            f"{where}: its stages take {total - left} steps, expected {total} in all and some for "
            "each stage; mend their max_steps or give the recipe a max_steps"
        )
    shares = iter(shared_out(left, [1] * open_places) if open_places else [])
    steps = [next(shares) if own is None else own for own in given]
    return tuple(
        _stage(recipe, table, own, where) for table, own in zip(tables, steps, strict=True)
    )


def _stage(recipe: QualityRecipe, table: Table, steps: int, where: str) -> Stage:
    convert = table.pop("convert", None)
    if convert is not None:
        convert = _convert_table(recipe, recipe.convert | convert, where)
    table = recipe.train | table
    _refuse(table, SHARED_TRAIN_KEYS, where, "the file's own keys say it")
    micro_batch = recipe.batch_size // table.get("grad_accum_steps", 1)
    table = {"batch_size": max(1, micro_batch), **table}
    if table.get("teacher") == TEACHER:
        table["teacher"] = recipe.teacher
    stage = Stage(convert=convert, train=table, steps=steps)
    try:
        train_config(stage, ANYWHERE)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return stage


def _baseline_table(recipe: QualityRecipe, entry: Entry, where: str) -> Table:
    if entry.method not in METHODS:
        raise ConfigError(
            f"{where}: no method is called {entry.method!r}; expected one that there is; choose "
            f"among {', '.join((OURS, *METHODS))}"
        )
    table = entry.train or {}
    _refuse(table, SHARED_TRAIN_KEYS, where, "the file's own keys say it")
    table = {"batch_size": recipe.batch_size, **table}
    BaselineSettings.parse(table, where)
    return table


def _check_timed(plans: Sequence[Plan]) -> None:
    """Refuse equal time where one of the two takes no step."""
    steps = {plan.name: plan.steps for plan in plans}
    for plan in plans:
        other = plan.equal_time_to
        if other and 0 in (plan.steps, steps[other]):
            raise ConfigError(
                f"recipe {plan.name!r}: equal_time_to={other!r}, but {plan.steps} and "
                f"{steps[other]} steps; expected two that train; drop it"
            )


def _refuse(table: Table, keys: set[str], where: str, hint: str) -> None:
    found = keys & table.keys()
    if found:
        raise ConfigError(
            f"{where}: {min(found)}={table[min(found)]!r} is not to be chosen here; expected none; "
            f"drop it, {hint}"
        )


def _is_within(text: str, other: str) -> bool:
    if text == other:
        return True
    path, whole = Path(text), Path(other)
    if not (path.exists() and whole.exists()):
        return False
    path, whole = path.resolve(), whole.resolve()
    if path == whole or whole in path.parents or path in whole.parents:
        return True
    return path.is_file() and whole.is_file() and content_of(text) == content_of(other)
