"""Let one model answer all tasks of a suite, and keep its answers as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from qat.backend.device import select
from qat.extensions.suite.answers import Answer, AnswerFile
from qat.extensions.suite.compare import Judged
from qat.extensions.suite.model import Model
from qat.extensions.suite.plan import SuiteSettings
from qat.extensions.suite.questions import GENERATES, ask, judged
from qat.logs import progress
from qat.models.load import load_tokenizer, model_identity

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task

    Missing = dict[str, list[tuple[str, Instance]]]
    """Requests without an answer by task, with their hashes."""

JUDGED_AT_ONCE = 8
"""Batches of given answers between two writes of the file: the harness sorts them by length."""

T = TypeVar("T")


def judge_side(
    side: str, source: str, tasks: Mapping[str, Task], config: SuiteSettings, *, folder: Path
) -> dict[str, dict[int, Judged]]:
    """Return what the answers of the model `source` score, by task and number of the question.

    Only what the files in `folder` do not answer is asked; a model without such questions is not
    opened.

    Args:
        side: `student` or `teacher`, for names of files and the progress.

    Raises:
        CheckpointError: the model is missing, or a file is damaged or another model's.
    """
    tokenizer = load_tokenizer(source)
    dtype = str(select(config.device).dtype(config.dtype)).removeprefix("torch.")
    facts = {"side": side, "model": model_identity(source), "dtype": dtype}
    facts |= {"engine": config.engine}
    with ExitStack() as stack:
        files, requests, missing = {}, {}, {}
        for label, task in tasks.items():
            path = folder / f"{label}.{side}.jsonl"
            file = AnswerFile.open(path, {"task": task.config.task, **facts})
            files[label] = stack.enter_context(closing(file))
            requests[label] = ask(task, tokenizer, config)
            missing[label] = [
                each for each in requests[label].items() if each[0] not in file.answers
            ]
        if any(missing.values()):
            model = stack.enter_context(closing(Model(source, tokenizer, config)))
            given = {k: v for k, v in missing.items() if v and tasks[k].OUTPUT_TYPE != GENERATES}
            asked = {k: v for k, v in missing.items() if v and tasks[k].OUTPUT_TYPE == GENERATES}
            for label, rows in given.items():
                with progress(f"{side}: {label}", len(rows), "answers") as ticker:
                    for part in _parts(rows, JUDGED_AT_ONCE * model.width):
                        files[label].add(_judge(model, part))
                        ticker.advance(len(part))
            _generate(model, asked, files, {k: f"{side}: {k}" for k in asked})
    return {
        label: judged(task, requests[label], files[label].answers, config)
        for label, task in tasks.items()
    }


def _judge(model: Model, rows: Sequence[tuple[str, Instance]]) -> list[Answer]:
    found = model.judge([request for _, request in rows])
    return [
        Answer(request=name, logprob=logprob, is_greedy=is_greedy)
        for (name, _), (logprob, is_greedy) in zip(rows, found, strict=True)
    ]


def _generate(
    model: Model, missing: Missing, files: Mapping[str, AnswerFile], names: Mapping[str, str]
) -> None:
    if not missing:
        return
    prompts = iter(model.prepare([request for rows in missing.values() for _, request in rows]))
    for label, rows in missing.items():
        with progress(names[label], len(rows), "answers") as ticker:
            hashes = [name for name, _ in rows]
            asked = dict(zip(hashes, islice(prompts, len(rows)), strict=True))
            for answer in model.generate(asked):
                files[label].add([answer])
                ticker.advance()


def _parts(rows: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
