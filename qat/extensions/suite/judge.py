"""Judge a student on a suite of tasks, with its teacher beside."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from qat.backend.device import select
from qat.extensions.suite.compare import Judged
from qat.extensions.suite.plan import Entry, SuiteSettings
from qat.extensions.suite.questions import open_tasks
from qat.extensions.suite.results import Results, question_rows, show
from qat.extensions.suite.side import judge_side
from qat.files import held, write_atomically

RESULTS, QUESTIONS, ANSWERS = "suite.json", "questions.jsonl", "answers"
"""Files of a suite: its numbers, each question's, and the folder of the models' answers."""


def judge(student: str, settings: SuiteSettings, entries: Sequence[Entry]) -> dict[str, object]:
    """Judge the model `student`, and its teacher if there is one, on the tasks of a suite.

    Answers are kept in `settings.out` as they come: the same call goes on after an interruption.

    Raises:
        ConfigError, DataError: a task is wrong.
        CheckpointError: a model is missing, or the answers in `settings.out` are damaged or those
            of another one.
    """
    tasks = open_tasks(entries, settings)
    sides = {"student": student} | (
        {} if settings.teacher is None else {"teacher": settings.teacher}
    )
    found: dict[str, dict[str, dict[int, Judged]]] = {}
    seconds = {}
    out = Path(str(settings.out))
    backend = select(settings.device)
    with backend.session(settings.xla_cache_dir), held(out):
        (out / ANSWERS).mkdir(parents=True, exist_ok=True)
        for side in reversed(sides):  # the teacher first: with a wrong one no time is lost
            began = time.monotonic()
            found[side] = judge_side(side, sides[side], tasks, settings, folder=out / ANSWERS)
            seconds[side] = round(time.monotonic() - began, 1)
            backend.free_memory()
        results = Results.of(found, sides, seconds, suite=str(settings.suite))
        lines = (json.dumps(row) + "\n" for row in question_rows(found))
        write_atomically(out / QUESTIONS, "".join(lines))
        write_atomically(out / RESULTS, results.model_dump_json(indent=2) + "\n")
    show(results)
    return {"out": out, **results.model_dump(mode="json")}
