"""Tasks of lm-eval for one model: its requests, and what its answers score."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from qat.data.text import MODES, render_prompt
from qat.errors import ConfigError, DataError
from qat.extensions.suite.answers import Answer
from qat.extensions.suite.compare import Judged
from qat.extensions.suite.harness import open_manager
from qat.extensions.suite.plan import TASKS, Entry, SuiteSettings, shipped
from qat.extensions.suite.programs import Attempt

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task

SEED = 1234
"""Seed of the solved examples, lm-eval's own."""
GENERATES = "generate_until"
JUDGED = ("loglikelihood", "multiple_choice")
"""Types of tasks whose given answers are judged by their log-probability."""


def open_tasks(entries: Sequence[Entry], config: SuiteSettings) -> dict[str, Task]:
    """Open the tasks and their data; return them by their names in the suite.

    Raises:
        ConfigError: a task is a group, cannot be judged by single questions, samples its answers,
            or runs programs though that is not allowed.
        DataError: its data is missing or damaged.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folders = [TASKS] if config.tasks_dir is None else [config.tasks_dir, TASKS]
    manager = open_manager([entry.task for entry in entries], folders)
    tasks = {}
    for entry in entries:
        if entry.task not in manager.all_tasks:
            raise ConfigError(
                f"suite={config.suite}: lm-eval cannot read the YAML file of {entry.task}, "
                "expected one of its tasks; mend that file"
            )
        try:
            # a group of one, because members alone can be changed
            loaded = manager.load({"group": entry.label, "task": [_asked(entry)]})["tasks"]
        except OSError as error:
            why = " ".join(str(error).split())
            raise DataError(
                f"the questions of {entry.task} cannot be read ({why}), expected local files; name "
                "them in the task's YAML file"
            ) from None
        (task, *others) = loaded.values()
        _check_task(task, others, entry, config)
        if task.get_config("num_fewshot") is None or entry.num_fewshot is not None:
            task.set_config("num_fewshot", entry.num_fewshot or 0)
        tasks[entry.label] = task
    return tasks


def _asked(entry: Entry) -> dict[str, object]:
    if entry.task not in shipped():
        return {"task": entry.task}
    data = None if entry.data is None else str(entry.data)
    kwargs = {"kind": entry.task, "data": data, "fields": entry.fields}
    return {"task": entry.task, "dataset_kwargs": kwargs}


def _check_task(task: Task, others: Sequence[Task], entry: Entry, config: SuiteSettings) -> None:
    where = f"suite={config.suite}: {entry.label}"
    if others:
        raise ConfigError(
            f"{where} is a group of {1 + len(others)} tasks, expected a single one; name each of "
            "its tasks"
        )
    if task.OUTPUT_TYPE not in (GENERATES, *JUDGED):
        raise ConfigError(
            f"{where} has output_type={task.OUTPUT_TYPE}, expected answers that are right or "
            "wrong; measure a perplexity with --text"
        )
    how = task.get_config("generation_kwargs") or {}
    if how.get("do_sample") or task.get_config("repeats") != 1:
        raise ConfigError(
            f"{where} draws its answers, expected the most likely ones, so that two models "
            "can be compared; set do_sample: false and repeats: 1 in its YAML file"
        )
    if getattr(task, "UNSAFE_CODE", False) and not config.allow_code_execution:
        raise ConfigError(
            f"{where} runs programs that the models write, which nobody has allowed; pass "
            "--allow-code-execution, best on a machine without data of yours"
        )


def ask(
    task: Task, tokenizer: PreTrainedTokenizerBase, config: SuiteSettings
) -> dict[str, Instance]:
    """Return the task's requests to a model by their hashes.

    Questions with generated answers are asked in the model's chat template, if it has one and
    `config.thinking` is not `none`; others are plain texts.
    """
    is_chat = task.OUTPUT_TYPE == GENERATES and bool(tokenizer.chat_template)
    mode = MODES[config.thinking][0]
    template = partial(_chat, tokenizer, mode) if is_chat and mode != "none" else None
    task.set_fewshot_seed(SEED)
    with _quiet():
        task.build_all_requests(
            limit=config.limit or None,
            apply_chat_template=template is not None,
            fewshot_as_multiturn=True,
            chat_template=template,
        )
    return {request_hash(each): each for each in task.instances}


def request_hash(request: Instance) -> str:
    """Return 32 hex digits of all that decides the answer to a request, apart from the model."""
    return xxhash.xxh3_128_hexdigest(json.dumps([request.request_type, request.args]).encode())


def judged(
    task: Task,
    requests: Mapping[str, Instance],
    answers: Mapping[str, Answer],
    config: SuiteSettings,
) -> dict[int, Judged]:
    """Return what each question's answer scores, by the question's number.

    The score is the first of the task's measures, with the first of its filters.

    Raises:
        ConfigError: the measure is no number of a single question.
    """
    by_question = defaultdict(list)
    for request in task.instances:
        request.resps = [answers[request_hash(request)].response()]
        by_question[request.doc_id].append(request)
    task.apply_filters()
    measure, name = next(iter(task.aggregation())), next(iter(task.instances[0].filtered_resps))
    found = {}
    for number, doc in task.doc_iterator(limit=config.limit or None):
        asked = sorted(by_question[number], key=lambda request: request.idx)
        taken = [request.filtered_resps[name] for request in asked]
        score = task.process_results(doc, taken).get(measure)
        if isinstance(score, tuple | list | None) or not 0 <= float(score) <= 1:
            raise ConfigError(
                f"suite={config.suite}: the measure {measure} of {task.task_name} is {score!s:.40} "
                "for a question, expected a number from 0 to 1; let such a one be the first of its "
                "metric_list"
            )
        ids = answers[request_hash(asked[0])].ids
        found[number] = Judged(float(score), _answer(task, doc, taken), ids)
    return found


def _answer(task: Task, doc: Any, taken: Sequence[Any]) -> str:
    """Return what the task takes from the answers to a question, to compare two models by."""
    if task.OUTPUT_TYPE == "multiple_choice":
        # further requests, of mutual information, judge the same choices again
        sums = [logprob for logprob, _ in taken[: len(task.doc_to_choice(doc))]]
        return str(sums.index(max(sums)))
    if task.OUTPUT_TYPE == GENERATES:
        return taken[0].answer if isinstance(taken[0], Attempt) else str(taken[0])
    return str(taken[0][1])


def _chat(
    tokenizer: PreTrainedTokenizerBase,
    mode: str,
    messages: list[dict[str, str]],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Render messages up to the model's answer; the last one may begin that answer."""
    begun = "" if add_generation_prompt else messages[-1]["content"]
    asked = messages if add_generation_prompt else messages[:-1]
    return render_prompt(asked, tokenizer, mode).text + begun


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the harness's bar, which no setting of it hides."""
    from lm_eval.api import task

    task.tqdm = partial(tqdm, disable=True)
    try:
        yield
    finally:
        task.tqdm = tqdm
