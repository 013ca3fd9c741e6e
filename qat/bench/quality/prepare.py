"""What jobs share, each made once: caches and first conversions."""

import json
import logging
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qat.backend.device import select
from qat.bench.baselines.quality import time_step
from qat.bench.measure import compile_anew
from qat.bench.quality.plan import (
    OURS,
    QualityPlaces,
    QualityPlan,
    QualityRecipe,
    QualityStage,
    Table,
    baseline_settings,
    cache_config,
    convert_config,
    train_config,
)
from qat.bench.quality.resolve import Unmade, made, shared_facts
from qat.config import fingerprint
from qat.convert.convert import convert_checkpoint
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.errors import CacheError, ConfigError
from qat.files import check_free, write_atomically
from qat.logs import HEARTBEAT, read_json_lines
from qat.models.load import load_teacher
from qat.models.teacher_cache import build_teacher_cache
from qat.train.start import train_student

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workshop:
    """A recipe file, its directory, and the device to work on."""

    recipe: QualityRecipe
    places: QualityPlaces
    device: str

    def claim(self) -> None:
        """Make the directory this recipe's, or see that it is.

        Raises:
            ConfigError: it holds another recipe's results, or something else.
        """
        facts, out = shared_facts(self.recipe).model_dump(mode="json"), self.places.out
        if not self.places.shared.exists():
            check_free(out, in_place=True)
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(self.places.shared, json.dumps(facts, indent=1) + "\n")
            return
        old = json.loads(self.places.shared.read_text())
        for key, value in facts.items():
            if old.get(key) != value:
                raise ConfigError(
                    f"out={out} holds results of {old['name']!r} with another {key}, expected "
                    f"those of {self.recipe.name!r}; choose another --out"
                )

    def prepare(self, plans: Sequence[QualityPlan]) -> tuple[list[QualityPlan], Unmade]:
        """Build every cache and make every first conversion that is not there yet.

        Returns:
            The plans that this was possible for, and why not for the others.

        Raises:
            ConfigError: it was for none.
        """
        for table in [self.recipe.cache, *(plan.cache for plan in plans)]:
            self._build_cache(table)

        def convert(plan: QualityPlan) -> None:
            if plan.convert is not None:
                self.convert(plan.convert, plan.cache)

        found = made(plans, convert)
        select(self.device).free_memory()  # it is the jobs' now
        return found

    def convert(self, convert: Table, cache: Table) -> None:
        """Convert the teacher, unless it was done; it may calibrate on that cache."""
        out = self.places.student(convert, cache)
        if not out.exists():
            logger.info("converting the teacher: %s", convert)
            config = convert_config(convert, self.places.cache(cache), self.device)
            convert_checkpoint(self.recipe.teacher, config, out)

    def _build_cache(self, table: Table) -> None:
        out = self.places.cache(table)
        try:
            TeacherCache.open(out)
        except CacheError:  # not there, or not finished
            logger.info("building a cache: %s", table)
            config = cache_config(self.recipe, table, self.device)
            source = open_source(config.data, config.format, config.text_field)
            build_teacher_cache(config, source, out)


# Equal time instead of equal steps: measured step times turn one recipe's clock into steps.

ROUNDS = 2

StepTimer = Callable[[QualityPlan], list[list[float]]]
"""Times a recipe alone: seconds of single steps, for each of its stages."""
StepTimes = dict[str, list[float]]
"""Median seconds of a step for each stage, by `time_key`."""


def time_key(plan: QualityPlan) -> str:
    """12 hex digits that change when a recipe's step may take another time."""
    values = plan.model_dump(mode="json", exclude={"name", "seeds", "steps", "equal_time_to"})
    for stage in values["stages"]:
        del stage["steps"]
    return fingerprint(values)


def to_time(plans: Sequence[QualityPlan]) -> list[QualityPlan]:
    """Recipes whose step times are needed: those on equal time and those that they follow."""
    followed = {plan.equal_time_to for plan in plans}
    return [plan for plan in plans if plan.equal_time_to or plan.name in followed]


def measure(plans: Sequence[QualityPlan], timer: StepTimer, rounds: int = ROUNDS) -> StepTimes:
    """Let the recipes take turns, every second round backwards; the median of all their steps."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for number in range(rounds):
        for plan in plans[:: -1 if number % 2 else 1]:
            found[time_key(plan)].append(timer(plan))
    return {key: _medians(turns) for key, turns in found.items()}


def with_equal_time(plans: Sequence[QualityPlan], times: StepTimes) -> list[QualityPlan]:
    """The plans, those on equal time with as many steps as the other's training time allows."""
    by_name = {plan.name: plan for plan in plans}

    def fitted(plan: QualityPlan) -> QualityPlan:
        if plan.equal_time_to is None:
            return plan
        seconds = training_seconds(by_name[plan.equal_time_to], times)
        own = training_seconds(plan, times) / plan.steps
        return plan.with_steps(max(1, len(plan.stages), round(seconds / own)))

    return [fitted(plan) for plan in plans]


def training_seconds(plan: QualityPlan, times: StepTimes) -> float:
    """What all steps of a recipe take."""
    steps = [stage.steps for stage in plan.stages] or [plan.steps]
    pairs = zip(steps, times[time_key(plan)], strict=True)
    return sum(count * step_s for count, step_s in pairs)


def to_json(times: StepTimes) -> str:
    """The times as a file keeps them."""
    return json.dumps(times, indent=1) + "\n"


def _medians(turns: list[list[list[float]]]) -> list[float]:
    """The median step of each stage over all turns."""
    stages = zip(*turns, strict=True)
    return [statistics.median(step for turn in stage for step in turn) for stage in stages]


# Times a recipe's step by a short run of the very training that the recipe does.

STRETCH = 5
"""Steps in a line of the heartbeat; the first line holds compiling and recording."""
STRETCHES = 5


def conversions_to_time(plans: Sequence[QualityPlan]) -> Iterator[tuple[Table, Table]]:
    """The conversions that stand for later stages: their format decides a step's time."""
    for plan in plans:
        for stage in plan.stages:
            if stage.convert is not None:
                yield _stand_in(stage.convert), plan.cache


def time_plan(shop: Workshop, plan: QualityPlan) -> list[list[float]]:
    """Seconds of steps of each stage, nothing else running; warm-up and compiler left out."""
    if plan.method != OURS:
        return [_time_baseline(shop, plan)]
    convert, found = plan.convert, []
    for stage in plan.stages:
        convert = convert if stage.convert is None else _stand_in(stage.convert)
        student = shop.places.student(convert, plan.cache)
        found.append(_time_stage(stage, student, shop.places.cache(plan.cache), shop.device))
    return found


def _stand_in(convert: Table) -> Table:
    """The settings of that conversion without its `base`: the teacher itself is converted."""
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


def _time_baseline(shop: Workshop, plan: QualityPlan) -> list[float]:
    teacher = load_teacher(shop.recipe.teacher, device=shop.device, dtype="fp32")
    cache = TeacherCache.open(shop.places.cache(plan.cache))
    settings = baseline_settings(plan, device=shop.device)
    steps = STRETCH * (STRETCHES - 1)
    step_s = time_step(plan.method, teacher, cache, settings=settings, steps=steps)
    del teacher
    select(shop.device).free_memory()
    return [step_s]
