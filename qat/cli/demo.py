"""`qat demo`: the whole pipeline on the embedded teacher, each stage the verb a user would call."""

import json
import math
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from qat.cli.run import Pipeline
from qat.errors import HOME, ConfigError
from qat.files import held

IN_WHEEL = Path(__file__).resolve().parents[1] / "data" / "tiny-qwen3"  # setup.py puts it there
TINY_TEACHER = IN_WHEEL if IN_WHEEL.exists() else HOME / "checkpoints" / "tiny-qwen3"
PROMPT = "Return the number of"
TOKENS, BATCH = 64, 16  # by default 300 steps read the sequences 1.6 times
GROUP = 64  # 2.13 bits a weight, coarse enough that rounding does damage
ROWS = ("hidden_size", "intermediate_size", "head_dim")  # config keys of what divides rows


def demo(
    *,
    out: Path = Path("demo"),
    teacher: Path = TINY_TEACHER,
    steps: Annotated[int, Parameter(validator=Number(gt=0))] = 300,
    sequences: Annotated[int, Parameter(validator=Number(gt=0))] = 3000,
) -> dict:
    """Take a small teacher to a 2-bit student: up to nine minutes on two CPU cores.

    A demo that was stopped goes on where it was.

    Args:
        out: Directory for everything that is made.
        teacher: The float model to start from.
        steps: Training steps of the student.
        sequences: Rows of text that the teacher reads and the student learns from.
    """
    if not (teacher / "config.json").exists():
        raise ConfigError(
            f"teacher={teacher} holds no model; expected a model directory; give another --teacher"
        )
    began = time.perf_counter()
    with held(out):
        pipeline = Pipeline("demo", out)
        settings = {"teacher": str(teacher), "steps": steps, "sequences": sequences}
        pipeline.check_same("demo", settings, pipeline.recorded.get("demo", settings))
        pipeline.record({"demo": settings})
        page = _stages(pipeline, teacher, steps, sequences)
    pipeline.show()
    seconds = time.perf_counter() - began
    pipeline.say(f"{seconds:.0f} s in all. Open {page}")
    return {
        "seconds": round(seconds, 1),
        "report": page,
        "kl_nats": {name: found["kl_nats"] for name, found in pipeline.exams().items()},
    }


def _stages(pipeline: Pipeline, teacher: Path, steps: int, sequences: int) -> Path:
    cache = pipeline.make(
        "cache", "cache", "--teacher", teacher, "--data", "stdlib",
        "--num-sequences", sequences, "--sequence-length", TOKENS, "--batch-size", 32,
    )  # fmt: skip
    shape = json.loads((teacher / "config.json").read_text(encoding="utf-8"))
    group = math.gcd(GROUP, *(shape[key] for key in ROWS if shape.get(key)))
    converted = pipeline.make(
        "converted", "convert", teacher, "--to", "q2a2", "--group-size", group
    )
    trained = pipeline.make(
        "trained", "train", converted, "--cache-dir", cache, "--max-steps", steps,
        "--batch-size", BATCH, "--eval-every", 100, "--eval-sequences", sequences,
    )  # fmt: skip
    models = {"teacher": teacher, "converted": converted, "trained": trained}
    for name in ("converted", "trained"):
        pipeline.examine(name, models[name], "--cache-dir", cache, teacher=str(teacher))
    pipeline.compare(models, PROMPT)
    pipeline.make("export/packed", "export", trained, "--to", "packed")
    return pipeline.report()
