"""From a recipe file to plans, every setting checked before anything runs."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from qat.bench.baselines.config import METHODS, PTQ, BaselineSettings
from qat.bench.quality.plan import (
    HELD_OUT,
    OURS,
    QualityEntry,
    QualityPlan,
    QualityRecipe,
    QualityStage,
    Table,
    Texts,
    cache_config,
    content_of,
    convert_config,
    shared_out,
    train_config,
)
from qat.config import Settings
from qat.convert.convert import check_conversion
from qat.convert.plan import read_plan
from qat.data.sources import open_source
from qat.errors import ConfigError, QatError
from qat.losses.config import check_targets, check_with_teacher
from qat.models.language_model import LanguageModel
from qat.models.load import load_config, model_identity

TEACHER = "teacher"
"""Written for a model in `base` or `teacher`: the teacher of the file."""
SHARED_CACHE_KEYS = {"data", "teacher", "sequence_length", "device", "device_map"}
HELD_OUT_KEYS = {"seed", "held_out", "format", "text_field", "thinking", "targets"}
"""What decides which text is held out: one choice for all recipes."""
SHARED_TRAIN_KEYS = {"cache_dir", "seed", "device", "max_steps"}
ANYWHERE = Path("cache")
"""Stands for a cache until there is one."""


class SharedFacts(Settings):
    """What all rows of one directory have in common."""

    name: str
    teacher: str
    """Its content's hash, or a hub id's revision."""
    texts: dict[str, str]
    """Hashes of the texts."""
    settings: Table


def resolve(recipe: QualityRecipe) -> list[QualityPlan]:
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


def shared_facts(recipe: QualityRecipe) -> SharedFacts:
    """What decides whether a row belongs into the directory of this recipe.

    Raises:
        CheckpointError: there is no such teacher.
    """
    budget = recipe.model_dump(
        mode="json", exclude={"recipes", "seeds", "name", "teacher", "texts", "convert", "train"}
    )
    files = {"distil": recipe.texts.distil, **recipe.texts.report}
    return SharedFacts(
        name=recipe.name,
        teacher=model_identity(recipe.teacher),
        texts={name: content_of(text) for name, text in files.items()},
        settings=budget,
    )


def text_sources(texts: Texts) -> Iterable[str]:
    """The texts that are read from somewhere."""
    return [texts.distil, *(text for text in texts.report.values() if text != HELD_OUT)]


def _plan(recipe: QualityRecipe, entry: QualityEntry) -> QualityPlan:
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
    return QualityPlan(
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


def _cache_table(recipe: QualityRecipe, entry: QualityEntry, where: str) -> Table:
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


def _stages(recipe: QualityRecipe, entry: QualityEntry, where: str) -> tuple[QualityStage, ...]:
    """The trainings of a recipe; those that name no `max_steps` share what the others leave."""
    if entry.train is False:
        return ()
    tables = [dict(table) for table in entry.stages or (entry.train,)]
    given = [table.pop("max_steps", None) for table in tables] if entry.stages else [None]
    wrong = next((own for own in given if own is not None and not _is_count(own)), None)
    if wrong is not None:
        raise ConfigError(
            f"{where}: max_steps={wrong!r:.80} of a stage, expected a whole number of steps from 1 "
            "on; mend it"
        )
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


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _stage(recipe: QualityRecipe, table: Table, steps: int, where: str) -> QualityStage:
    convert = table.pop("convert", None)
    if not isinstance(convert, dict | None):
        raise ConfigError(
            f"{where}: convert={convert!r:.80} of a stage, expected a table of settings; mend it"
        )
    if convert is not None:
        convert = _convert_table(recipe, recipe.convert | convert, where)
    table = recipe.train | table
    _refuse(table, SHARED_TRAIN_KEYS, where, "the file's own keys say it")
    parts = table.get("grad_accum_steps", 1)  # if it is no count, its verb says so
    micro_batch = recipe.batch_size // parts if _is_count(parts) else 1
    table = {"batch_size": max(1, micro_batch), **table}
    if table.get("teacher") == TEACHER:
        table["teacher"] = recipe.teacher
    stage = QualityStage(convert=convert, train=table, steps=steps)
    try:
        train_config(stage, ANYWHERE)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return stage


def _baseline_table(recipe: QualityRecipe, entry: QualityEntry, where: str) -> Table:
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


def _check_timed(plans: Sequence[QualityPlan]) -> None:
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


# Which recipes of a file can be made: asked of the teacher's shapes before any work.
#
# A recipe that cannot is a row of the table with its reason; the others go on without it.

logger = logging.getLogger(__name__)

Unmade = dict[str, str]
"""Why a recipe cannot be made, by its name."""


def check_shapes(
    recipe: QualityRecipe, plans: Sequence[QualityPlan]
) -> tuple[list[QualityPlan], Unmade]:
    """The plans whose formats and budgets fit the teacher; no weight is read.

    Raises:
        ConfigError: none does.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(recipe.teacher))
    teacher = LanguageModel(model)

    def check(plan: QualityPlan) -> None:
        for table in (plan.convert, *(stage.convert for stage in plan.stages)):
            if table is not None:
                check_conversion(teacher, convert_config(table, ANYWHERE))

    return made(plans, check)


def made(
    plans: Sequence[QualityPlan], make: Callable[[QualityPlan], None]
) -> tuple[list[QualityPlan], Unmade]:
    """The plans that `make` takes, and why it refuses the others and those that follow them.

    Raises:
        ConfigError: it takes none.
    """
    unmade: Unmade = {}
    for plan in plans:
        try:
            make(plan)
        except QatError as error:
            unmade[plan.name] = str(error)
    for plan in plans:
        if plan.equal_time_to in unmade and plan.name not in unmade:
            unmade[plan.name] = f"equal_time_to={plan.equal_time_to!r} cannot be made"
    for name, reason in unmade.items():
        logger.warning("recipe %r cannot be made: %s", name, reason)
    if len(unmade) == len(plans):
        name, reason = next(iter(unmade.items()))
        raise ConfigError(f"no recipe can be made; the first, {name!r}: {reason}")
    return [plan for plan in plans if plan.name not in unmade], unmade
