"""One job: a recipe and a seed, from the converted student to rows of results.

`python -m qat.bench.quality.job JOB.json` runs one in a process of its own, which ends when its
standard input does: no job outlives whoever started it.
"""

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path

import torch

from qat import logs
from qat.backend.device import select
from qat.bench.processes import end_with_input
from qat.bench.quality.config import OURS
from qat.bench.quality.judge import Numbers, judge, make_exam
from qat.bench.quality.plan import Job, Places
from qat.bench.quality.students import Trained, as_teacher, train_baseline_student, train_ours
from qat.bench.results import IN_EVERY_ROW, environment
from qat.data.reader import TeacherCache
from qat.errors import QatError
from qat.files import write_atomically
from qat.models.load import load_teacher, load_tokenizer
from qat.train.proof import MANIFEST, STATE, STATE_TENSORS

logger = logging.getLogger(__name__)


def run_job(job: Job) -> list[dict[str, object]]:
    """Train, judge, and leave the rows in the job's file; a job that was stopped goes on.

    Raises:
        QatError: see its message.
    """
    places, recipe = Places(job.out), job.recipe
    is_ours = job.plan is not None and job.plan.method == OURS
    # before the teacher is loaded, which would count into the peak of memory
    trained = train_ours(job) if is_ours else None
    teacher = load_teacher(recipe.teacher, device=job.device, dtype="fp32")
    if trained is None:
        is_teacher = job.plan is None
        trained = as_teacher(teacher) if is_teacher else train_baseline_student(job, teacher)
    cache, tokenizer = TeacherCache.open(places.cache(recipe.cache)), load_tokenizer(recipe.teacher)
    found = judge(trained.model, teacher, make_exam(recipe, cache, tokenizer))
    rows = [_row(job, trained, text, numbers) for text, numbers in found.items()]
    places.rows(job.label).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(places.rows(job.label), json.dumps(rows, indent=1) + "\n")
    _forget_training_state(places.run(job.label))
    return rows


def _row(job: Job, trained: Trained, text: str, numbers: Numbers) -> dict[str, object]:
    """A row that can be read alone."""
    plan = job.plan
    facts = environment(select(job.device), job.recipe)
    return {
        "kind": "quality",
        "name": job.recipe.name,
        "recipe": job.name,
        "method": "teacher" if plan is None else plan.method,
        "seed": job.seed,
        "text": text,
        "teacher": job.recipe.teacher,
        "distil": job.recipe.texts.distil,
        "sequence_length": job.recipe.sequence_length,
        **numbers,
        "bits_per_weight": trained.bits_per_weight,
        "megabytes": trained.megabytes,
        "steps": trained.steps,
        "tokens": trained.tokens,
        "seconds": trained.seconds,
        "peak_gib": trained.peak_gib,
        "workers": job.workers,
        "key": job.key,
        "settings": None if plan is None else plan.model_dump(mode="json"),
        **{name: facts[name] for name in (*IN_EVERY_ROW, "transformers", "time")},
    }


def _forget_training_state(run: Path) -> None:
    """Delete what only a run that goes on needs: optimizer states are many times the student."""
    for checkpoint in run.glob("stage*/checkpoints/step-*"):
        for name in (STATE, STATE_TENSORS, MANIFEST):
            (checkpoint / name).unlink(missing_ok=True)
        with suppress(OSError):  # it is not there, or holds what somebody else put there
            (checkpoint / STATE).parent.rmdir()


def main() -> None:
    """Run the job whose file is named on the command line; a user's mistake is one line."""
    end_with_input()
    logs.configure()
    job = Job.parse(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[1])
    torch.set_num_threads(job.threads)
    logger.info("%s seed %d on %s", job.name, job.seed, select(job.device).name())
    try:
        run_job(job)
    except QatError as error:
        sys.exit(f"qat: {error}")


if __name__ == "__main__":
    main()
