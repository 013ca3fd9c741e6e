"""`qat demo`: the whole pipeline on the embedded teacher, each stage the verb a user would call."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from qat.cli.run import Pipeline
from qat.errors import ConfigError
from qat.files import held

TINY_TEACHER = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-qwen3"
PROMPT = "Return the number of"


def demo(
    *,
    out: Path = Path("demo"),
    teacher: Path = TINY_TEACHER,
    steps: Annotated[int, Parameter(validator=Number(gt=0))] = 200,
) -> dict:
    """Take a small teacher to an exported 2-bit student: three to five minutes on two CPU cores.

    A demo that was stopped goes on where it was.

    Args:
        out: directory for everything that is made.
        teacher: the float model to start from.
        steps: training steps of the 2-bit student.
    """
    if not (teacher / "config.json").exists():
        raise ConfigError(
            f"teacher={teacher} holds no model; expected a model directory; run from a clone of "
            "the repository or give --teacher"
        )
    began = time.perf_counter()
    with held(out):
        pipeline = Pipeline("demo", out)
        settings = {"teacher": str(teacher), "steps": steps}
        pipeline.check_same("demo", settings, pipeline.recorded.get("demo", settings))
        pipeline.record({"demo": settings})
        page = _stages(pipeline, teacher, steps)
    pipeline.show()
    seconds = time.perf_counter() - began
    pipeline.say(f"{seconds:.0f} s in all. Open {page}")
    return {
        "seconds": round(seconds, 1),
        "report": page,
        "kl_nats": {name: found["kl_nats"] for name, found in pipeline.exams().items()},
    }


def _stages(pipeline: Pipeline, teacher: Path, steps: int) -> Path:
    """Cache, Q4, Q2: the teacher's three students, judged, exported, sampled, on a page."""
    cache = pipeline.make(
        "cache", "cache", "--teacher", teacher, "--data", "stdlib",
        "--num-sequences", 3000, "--sequence-length", 64, "--batch-size", 32,
    )  # fmt: skip
    pipeline.call("cache", "info", cache, stage="cache info")
    # steps that two CPU cores take in a third of a second
    train = ["--cache-dir", cache, "--batch-size", 16, "--eval-every", 50, "--eval-sequences", 64]
    q4 = pipeline.make("q4", "convert", teacher, "--to", "q4a4")
    q4_run = pipeline.make(
        "q4_run", "train", q4, "--learn", "scales,codebook", "--max-steps", 20, *train
    )
    q2 = pipeline.make(
        "q2_init", "convert", q4_run, "--to", "q2a4", "--base", teacher,
        "--calibration", cache, "--calibration-sequences", 128,
    )  # fmt: skip
    q2_run = pipeline.make("q2_run", "train", q2, "--mlp-only", "--max-steps", steps, *train)
    for name, model, converted in (
        ("Q4", q4_run, q4),
        ("Q2 converted", q2, q2),
        ("Q2 trained", q2_run, q2),
    ):
        pipeline.examine(
            name, model, "--cache-dir", cache, teacher=str(teacher), converted=converted
        )
    pipeline.make("dense", "export", q2_run, "--to", "dense", "--dtype", "bf16")
    sample = ["--prompt", PROMPT, "--raw", "--max-new-tokens", 48]
    pipeline.call("generate", q2_run, *sample, stage="generate")
    return pipeline.report()
