"""Preparation before the first job: resolves a recipe file to plans and makes what jobs share.

Every setting is checked before anything runs. A recipe that cannot be made becomes a row of the
table with its reason; the others are run without it.
"""

import json
import logging
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from qat.backend.device import select
from qat.config import fingerprint
from qat.convert.config import read_plan
from qat.convert.convert import check_conversion
from qat.data.build import build_cache
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.data.stream import blocks
from qat.errors import CacheError, CheckpointError, ConfigError, QatError
from qat.extensions.bench.measure import compile_anew
from qat.extensions.lab.baselines.config import METHODS, PTQ, BaselineSettings
from qat.extensions.lab.baselines.methods import time_step
from qat.extensions.lab.quality.conversion import Conversion, shipping_of
from qat.extensions.lab.quality.plan import (
    HELD_OUT,
    OURS,
    QualityEntry,
    QualityPlan,
    QualityRecipe,
    QualityStage,
    Table,
    Texts,
    baseline_settings,
    cache_config,
    cache_dir,
    content_of,
    convert_config,
    shared_out,
    student_dir,
    train_config,
)
from qat.files import check_free, write_atomically
from qat.logs import HEARTBEAT, read_json_lines
from qat.losses.config import check_targets, check_with_teacher
from qat.models.language_model import LanguageModel
from qat.models.load import load_config, load_teacher, model_identity
from qat.models.opening import auto_class
from qat.models.teacher_cache import cache_teacher
from qat.train.start import train_student

logger = logging.getLogger(__name__)

TEACHER = "teacher"  # stands for the teacher of the file, as a value of `base` or `teacher`
SHARED_CACHE_KEYS = {"data", "teacher", "sequence_length", "device", "device_map"}
HELD_OUT_KEYS = {"seed", "held_out", "format", "text_field", "thinking", "targets"}
"""Settings that decide which text is held out, which must be the same for all recipes."""
SHARED_TRAIN_KEYS = {"cache_dir", "seed", "device", "max_steps"}
ANYWHERE = Path("cache")  # stands for a cache that does not exist yet
ROUNDS = 2  # turns that each recipe takes when steps are timed
STRETCH = 5
"""Steps per line of the heartbeat; the first line includes compilation and graph capture."""
STRETCHES = 5

Unmade = dict[str, str]  # the reason why a recipe cannot be made, by its name
StepTimer = Callable[[QualityPlan], list[list[float]]]
"""Times a recipe alone: seconds of single steps for each of its stages."""
StepTimes = dict[str, list[float]]  # median seconds of a step for each stage, by `time_key`


def resolve(recipe: QualityRecipe) -> list[QualityPlan]:
    """Return the plans of all recipes, with all checks that do not need a model.

    Raises:
        ConfigError: a setting that its verb refuses, or that a recipe may not choose.
        DataError: a text is missing or empty.
    """
    _check_disjoint(recipe.texts)
    for text in (recipe.texts.distil, *recipe.texts.report.values()):
        if text != HELD_OUT:
            open_source(text)
    plans = [_plan(recipe, entry) for entry in recipe.recipes]
    steps = {plan.name: plan.steps for plan in plans}
    for plan in plans:
        other = plan.equal_time_to
        if other and 0 in (plan.steps, steps[other]):
            raise ConfigError(
                f"recipe {plan.name!r}: equal_time_to={other!r}, but {plan.steps} and "
                f"{steps[other]} steps; expected two that train; drop it"
            )
    return plans


def _check_disjoint(texts: Texts) -> None:
    """Raise ConfigError for an evaluation text that is also used for training or calibration."""
    learned = {"distil": texts.distil, "calibration": texts.calibration or texts.distil}
    for name, text in texts.report.items():
        for role, other in learned.items():
            if text != HELD_OUT and _is_within(text, other):
                raise ConfigError(
                    f"texts.report.{name}={text} is (part of) texts.{role}={other}; expected a "
                    f"text that no student has seen; name another file or {HELD_OUT!r}"
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


def _plan(recipe: QualityRecipe, entry: QualityEntry) -> QualityPlan:
    where = f"recipe {entry.name!r}"
    _refuse(recipe.cache, SHARED_CACHE_KEYS, "cache")
    of_all = SHARED_CACHE_KEYS | HELD_OUT_KEYS
    _refuse(entry.cache, of_all, where, "it is the same for all recipes")
    cache = recipe.cache | entry.cache
    settings = cache_config(recipe, cache)
    is_ours = entry.method == OURS
    convert = _convert_table(recipe, recipe.convert | entry.convert, where) if is_ours else None
    stages = _stages(recipe, entry, where) if is_ours else ()
    for stage in stages:
        config = train_config(stage, ANYWHERE)
        if config.reads_cache:
            check_targets(config.losses, settings.top_k, settings.draws)
        else:
            check_with_teacher(config.losses)
    trains = entry.train is not False and entry.method not in PTQ
    return QualityPlan(
        name=entry.name,
        method=entry.method,
        cache={key: getattr(settings, key) for key in cache},
        convert=convert,
        stages=stages,
        baseline={} if is_ours else _baseline_table(recipe, entry, where),
        steps=(entry.max_steps or recipe.max_steps) if trains else 0,
        seeds=entry.seeds or (recipe.seeds if trains else recipe.seeds[:1]),
        equal_time_to=entry.equal_time_to,
    )


def _convert_table(recipe: QualityRecipe, table: Table, where: str) -> Table:
    _refuse(table, {"device"}, where, "give --device")
    if recipe.texts.calibration is not None:
        table = {"calibration": recipe.texts.calibration, **table}
    if table.get("base") == TEACHER:
        table = {**table, "base": recipe.teacher}
    with _naming(where):
        read_plan(convert_config(table, ANYWHERE))
        shipping_of(table)
    return table


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the recipe's name before the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _stages(recipe: QualityRecipe, entry: QualityEntry, where: str) -> tuple[QualityStage, ...]:
    """Return the trainings of a recipe; those without `max_steps` share the remaining steps."""
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
    _refuse(table, SHARED_TRAIN_KEYS, where)
    parts = table.get("grad_accum_steps", 1)  # an invalid number is reported by the verb
    micro_batch = recipe.batch_size // parts if _is_count(parts) else 1
    table = {"batch_size": max(1, micro_batch), **table}
    if table.get("teacher") == TEACHER:
        table["teacher"] = recipe.teacher
    stage = QualityStage(convert=convert, train=table, steps=steps)
    with _naming(where):
        train_config(stage, ANYWHERE)
    return stage


def _baseline_table(recipe: QualityRecipe, entry: QualityEntry, where: str) -> Table:
    if entry.method not in METHODS:
        raise ConfigError(
            f"{where}: no method is called {entry.method!r}; expected one that there is; choose "
            f"among {', '.join((OURS, *METHODS))}"
        )
    table = entry.train or {}
    _refuse(table, SHARED_TRAIN_KEYS, where)
    table = {"batch_size": recipe.batch_size, **table}
    settings = BaselineSettings.parse(table, where)
    with _naming(where):
        settings.check(entry.method)
    return table


def _refuse(
    table: Table, keys: set[str], where: str, hint: str = "the file's own keys say it"
) -> None:
    found = keys & table.keys()
    if found:
        raise ConfigError(
            f"{where}: {min(found)}={table[min(found)]!r} is not to be chosen here; expected none; "
            f"drop it, {hint}"
        )


def check_shapes(
    recipe: QualityRecipe, plans: Sequence[QualityPlan]
) -> tuple[list[QualityPlan], Unmade]:
    """Return the plans whose formats and budgets fit the teacher's shapes; no weight is read.

    Raises:
        ConfigError: none of them fits.
    """
    config = load_config(recipe.teacher)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    teacher = LanguageModel(model)

    def check(plan: QualityPlan) -> None:
        for table in (plan.convert, *(stage.convert for stage in plan.stages)):
            if table is not None:
                check_conversion(teacher, convert_config(table, ANYWHERE))

    return _made(plans, check)


def _made(
    plans: Sequence[QualityPlan], make: Callable[[QualityPlan], None]
) -> tuple[list[QualityPlan], Unmade]:
    """Return the plans that `make` accepts, and why the others and those that follow them fail.

    Raises:
        ConfigError: it accepts none.
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


@dataclass(frozen=True)
class Workspace:
    """A recipe file, its directory of results, and the device to work on."""

    recipe: QualityRecipe
    out: Path
    device: str

    def claim(self) -> None:
        """Assign the directory to this recipe, or check that it already is.

        Raises:
            ConfigError: it holds another recipe's results, or something else.
            CheckpointError: there is no such teacher.
        """
        recipe, out, file = self.recipe, self.out, self.out / "quality.json"
        texts = {"distil": recipe.texts.distil, **recipe.texts.report}
        facts = {
            "name": recipe.name,
            "teacher": model_identity(recipe.teacher),
            "texts": {name: content_of(text) for name, text in texts.items()},
            "settings": recipe.model_dump(
                mode="json",
                exclude={"recipes", "seeds", "name", "teacher", "texts", "convert", "train"},
            ),
        }
        if not file.exists():
            check_free(out, in_place=True)
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(facts, indent=1) + "\n")
            return
        old = json.loads(file.read_text())
        for key, value in facts.items():
            if old.get(key) != value:
                raise ConfigError(
                    f"out={out} holds results of {old['name']!r} with another {key}, expected "
                    f"those of {recipe.name!r}; choose another --out"
                )

    def build_caches(self, plans: Sequence[QualityPlan]) -> None:
        """Build all caches that are missing or incomplete."""
        for table in [self.recipe.cache, *(plan.cache for plan in plans)]:
            place = cache_dir(self.out, table)
            try:
                TeacherCache.open(place)
            except CacheError:  # missing or incomplete
                logger.info("building a cache: %s", table)
                config = cache_config(self.recipe, table, self.device)
                source = open_source(config.data, config.format, config.text_field)
                settings, opened = config.settings(source.format), cache_teacher(config)
                build_cache(
                    settings,
                    **opened._asdict(),
                    found=blocks(source.rows, opened.tokenizer, settings),
                    out=place,
                    batch_size=config.batch_size,
                )
        select(self.device).free_memory()  # for the processes of the jobs

    def missing(self, plans: Sequence[QualityPlan], threads: int) -> list[Conversion]:
        """Return the missing first conversions as jobs with that number of `threads`."""
        wanted = [self._conversion(p.convert, p.cache, threads) for p in plans if p.convert]
        return [*{each.label: each for each in wanted if not each.student.exists()}.values()]

    def convert(
        self,
        plans: Sequence[QualityPlan],
        wanting: Sequence[QualityPlan],
        refused: Mapping[str, str],
    ) -> Unmade:
        """Run the first conversions of plans in `wanting`; return failures by the name of the plan.

        `refused` has the errors of conversions that failed in another process, by label.

        Raises:
            ConfigError: none of the plans can be made.
        """

        def make(plan: QualityPlan) -> None:
            if plan in wanting and plan.convert is not None:
                found = self._conversion(plan.convert, plan.cache)
                if found.label in refused:
                    raise CheckpointError(refused[found.label])
                found.make()

        _, unmade = _made(plans, make)
        select(self.device).free_memory()  # for the processes of the jobs
        return unmade

    def _conversion(self, convert: Table, cache: Table, threads: int = 0) -> Conversion:
        return Conversion(
            teacher=self.recipe.teacher,
            convert=convert,
            cache=cache,
            out=self.out,
            device=self.device,
            threads=threads,
        )

    def known_times(self) -> StepTimes:
        """Return the step times that were measured in this directory."""
        file = self.out / "timing.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def step_times(self, plans: Sequence[QualityPlan]) -> StepTimes:
        """Return the step times of the recipes that need them, measured once per directory."""
        known, needed = self.known_times(), to_time(plans)
        if any(time_key(plan) not in known for plan in needed):
            for plan in needed:
                for stage in plan.stages:
                    if stage.convert is not None:
                        self._conversion(_stand_in(stage.convert), plan.cache).make()
            # earlier measurements take precedence: budgets of finished jobs depend on them
            known = measure(needed, lambda plan: time_plan(self, plan)) | known
            write_atomically(self.out / "timing.json", json.dumps(known, indent=1) + "\n")
        return known


# Equal time instead of equal steps: measured step times convert one recipe's time to steps.


def time_key(plan: QualityPlan) -> str:
    """Return 12 hex digits that change when the time of a recipe's step may."""
    values = plan.model_dump(mode="json", exclude={"name", "seeds", "steps", "equal_time_to"})
    for stage in values["stages"]:
        del stage["steps"]
    return fingerprint(values)


def to_time(plans: Sequence[QualityPlan]) -> list[QualityPlan]:
    """Return the recipes to time: those with `equal_time_to` and those that it names."""
    followed = {plan.equal_time_to for plan in plans}
    return [plan for plan in plans if plan.equal_time_to or plan.name in followed]


def measure(plans: Sequence[QualityPlan], timer: StepTimer) -> StepTimes:
    """Time the recipes in turns, every second round in reverse; return median step seconds."""
    found: dict[str, list[list[list[float]]]] = defaultdict(list)
    for number in range(ROUNDS):
        for plan in plans[:: -1 if number % 2 else 1]:
            found[time_key(plan)].append(timer(plan))
    return {
        key: [
            statistics.median(step for turn in stage for step in turn)
            for stage in zip(*turns, strict=True)
        ]
        for key, turns in found.items()
    }


def with_equal_time(plans: Sequence[QualityPlan], times: StepTimes) -> list[QualityPlan]:
    """Return the plans, those with `equal_time_to` with the steps that the other's time allows.

    Steps are split among stages in the same proportions; a recipe that was not timed keeps its
    steps.
    """
    by_name = {plan.name: plan for plan in plans}

    def seconds(plan: QualityPlan) -> float:
        steps = [stage.steps for stage in plan.stages] or [plan.steps]
        pairs = zip(steps, times[time_key(plan)], strict=True)
        return sum(count * step_s for count, step_s in pairs)

    def fitted(plan: QualityPlan) -> QualityPlan:
        if plan.equal_time_to is None:
            return plan
        other = by_name[plan.equal_time_to]
        if any(time_key(each) not in times for each in (plan, other)):
            return plan
        own = seconds(plan) / plan.steps
        return plan.with_steps(max(1, len(plan.stages), round(seconds(other) / own)))

    return [fitted(plan) for plan in plans]


def time_plan(workspace: Workspace, plan: QualityPlan) -> list[list[float]]:
    """Return the seconds of steps of each stage, from a short run of the recipe's own training.

    Nothing else may run meanwhile; warm-up and compilation are left out.
    """
    cache = cache_dir(workspace.out, plan.cache)
    if plan.method != OURS:
        return [_time_baseline(workspace, plan, cache)]
    convert, found = plan.convert, []
    for stage in plan.stages:
        convert = convert if stage.convert is None else _stand_in(stage.convert)
        found.append(
            _time_stage(
                stage, student_dir(workspace.out, convert, plan.cache), cache, workspace.device
            )
        )
    return found


def _stand_in(convert: Table) -> Table:
    """Return a later stage's conversion without `base`: only its format matters for step time."""
    return {key: value for key, value in convert.items() if key != "base"}


def _time_stage(stage: QualityStage, student: Path, cache: Path, device: str) -> list[float]:
    steps = STRETCH * STRETCHES
    short = {"eval_every": steps, "save_every": steps, "log_every": STRETCH, "eval_sequences": 1}
    config = train_config(stage.model_copy(update={"steps": steps}), cache, device=device, **short)
    compile_anew()
    with tempfile.TemporaryDirectory(prefix="qat-timing-") as directory:
        run = Path(directory) / "run"
        train_student(config, str(student), run, resume=False)
        lines = read_json_lines(run / HEARTBEAT)
    select(device).free_memory()
    return [line["step_s"] for line in lines[1:]]


def _time_baseline(workspace: Workspace, plan: QualityPlan, cache: Path) -> list[float]:
    teacher = load_teacher(workspace.recipe.teacher, device=workspace.device, dtype="fp32")
    settings = baseline_settings(plan, device=workspace.device)
    steps = STRETCH * (STRETCHES - 1)
    step_s = time_step(
        plan.method, teacher, TeacherCache.open(cache), settings=settings, steps=steps
    )
    del teacher
    select(workspace.device).free_memory()
    return [step_s]
