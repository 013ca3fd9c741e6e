"""Times a recipe's step by a short run of the very training that the recipe does."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from qat.backend.device import select
from qat.bench.baselines.quality import time_step
from qat.bench.measure import compile_anew
from qat.bench.quality.config import OURS, Table
from qat.bench.quality.plan import Plan, Stage, baseline_settings, train_config
from qat.bench.quality.prepare import Workshop
from qat.data.reader import TeacherCache
from qat.logs import HEARTBEAT, read_json_lines
from qat.models.load import load_teacher
from qat.train.start import train_student

STRETCH = 5
"""Steps in a line of the heartbeat; the first line holds compiling and recording."""
STRETCHES = 5


def conversions_to_time(plans: Sequence[Plan]) -> Iterator[tuple[Table, Table]]:
    """The conversions that stand for later stages: their format decides a step's time."""
    for plan in plans:
        for stage in plan.stages:
            if stage.convert is not None:
                yield _stand_in(stage.convert), plan.cache


def time_plan(shop: Workshop, plan: Plan) -> list[list[float]]:
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
    """The same conversion from the teacher itself."""
    return {key: value for key, value in convert.items() if key != "base"}


def _time_stage(stage: Stage, student: Path, cache: Path, device: str) -> list[float]:
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


def _time_baseline(shop: Workshop, plan: Plan) -> list[float]:
    teacher = load_teacher(shop.recipe.teacher, device=shop.device, dtype="fp32")
    cache = TeacherCache.open(shop.places.cache(plan.cache))
    settings = baseline_settings(plan, device=shop.device)
    steps = STRETCH * (STRETCHES - 1)
    step_s = time_step(plan.method, teacher, cache, settings=settings, steps=steps)
    del teacher
    select(shop.device).free_memory()
    return [step_s]
