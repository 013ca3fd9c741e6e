"""`qat eval`: how far a student is from its teacher, in numbers."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qat.config import Required
from qat.evaluate.config import EvalConfig, SuiteConfig
from qat.evaluate.tasks import load_harness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qat.evaluate.judge import Verdict

DEFAULTS, NO_SUITE = EvalConfig(), SuiteConfig()


def evaluate(
    student: Required[str],
    *,
    config: Annotated[EvalConfig, Parameter(name="*")] = DEFAULTS,
    suite: Annotated[SuiteConfig, Parameter(name="*")] = NO_SUITE,
) -> dict[str, object]:
    """Judge STUDENT by a teacher cache, by its teacher, on a text, and on tasks.

    Args:
        student: Model directory, run directory, GGUF file or hub id.
        config: Settings.
        suite: Settings of a suite.
    """
    from qat.cli.inputs import check_inputs, check_positions
    from qat.data.sources import check_source, holds_rows, whole_text

    is_suite = suite.is_asked(config)
    if not is_suite:
        config.check_named()
    check_inputs(
        models=[student, config.teacher],
        caches=[config.cache_dir],
        texts=[config.text],
        folders=[config.tasks_dir],
        out=suite.out,
    )
    if is_suite:
        return load_harness().judge_suite(student, config, suite)
    if config.text is not None and holds_rows(config.text):
        check_source(str(config.text), config.format, config.text_field, setting="text")
    elif config.text is not None:
        whole_text(config.text)
    if config.text is not None:
        check_positions(config.context, [student, config.teacher], setting="context")
    from qat.backend.device import select
    from qat.evaluate.judge import judge

    with select(config.device).session(config.xla_cache_dir):
        verdict = judge(student, config)
    _show(verdict, student, config)
    return dict(student=student, **verdict.numbers())


def _show(verdict: "Verdict", student: str, config: EvalConfig) -> None:
    from rich.table import Table

    from qat.data.cache import SERVED_AS
    from qat.data.opening import open_cache
    from qat.logs import Terminal

    name, tokens = Path(student).name, verdict.numbers()["num_tokens"]
    title = name if tokens is None else f"{name}, over {tokens:,} tokens"
    table = Table("measure", title=title, title_justify="left")
    captions = []
    if config.text is not None:
        captions.append(f"text: windows of {config.context}, stride {config.stride}")
    has_teacher = config.teacher is not None or verdict.cached_teacher is not None
    for side in ("student", "teacher") if has_teacher else ("student",):
        table.add_column(side, justify="right")
    for row in _rows(verdict, config):
        table.add_row(*row[: len(table.columns)])
    if verdict.cached_teacher is not None and config.teacher is None:
        outside = verdict.cached_teacher.labels_outside_frac
        captions.append(
            f"teacher: by the cache, at least; {outside:.1%} of the tokens lie outside its top K"
        )
    table.caption = "\n".join(captions)
    console = Terminal()
    console.print(table)
    if config.cache_dir is not None and config.teacher is None:
        teacher = open_cache(config.cache_dir).manifest.teacher
        if not teacher.identity.startswith(SERVED_AS):
            name = shlex.quote(teacher.name)
            words = f"for the teacher's exact numbers beside these: --teacher {name}"
            console.print(words, highlight=False, soft_wrap=True)


def _rows(verdict: "Verdict", config: EvalConfig) -> list[tuple[str, str, str]]:
    """Label, the student's number and the teacher's, for all that was measured."""
    found = verdict.numbers()
    where = f"cache, {config.split}" if config.cache_dir else "text"
    rows = [
        (f"KD, nats ({where}; top-K alone, T = 2)", "kd_nats"),
        (f"KL, nats ({where}; top-K and tail)", "kl_tail_nats"),
        (f"KL, nats ({where}; whole vocabulary)", "kl_nats"),
        (f"cross-entropy with draws, nats ({where})", "sampled_ce_nats"),
        *(
            (f"{key.replace('_', ' ').replace('/', ': ')} ({where})", key)
            for key in verdict.by_source
        ),
        (f"top-1 agreement ({where})", "top1_frac"),
        # without a cache this is the text's perplexity, which has its own row
        *([(f"perplexity ({where})", "ppl")] if config.cache_dir else []),
        ("perplexity (text)", "text_ppl"),
        ("bits per byte (text)", "text_bits_per_byte"),
    ]
    # without the teacher itself, what the cache tells of it
    floors = {"ppl": "teacher_ppl_floor", "sampled_ce_nats": "teacher_entropy_floor_nats"}
    measured = []
    for label, name in rows:
        if found[name] is not None:
            teacher = _number(found.get(f"teacher_{name}"))
            floor = _number(found.get(floors.get(name, "")))
            measured.append((label, _number(found[name]), teacher or (floor and f">= {floor}")))
    return measured + _task_rows(verdict)


def _task_rows(verdict: "Verdict") -> list[tuple[str, str, str]]:
    """A row for each measure of each task, its standard error behind it."""
    teacher = verdict.teacher_tasks or {}
    return [
        (f"{name} ({task})", _score(scores, name), _score(teacher.get(task, {}), name))
        for task, scores in (verdict.tasks or {}).items()
        for name in scores
        if "_stderr" not in name
    ]


def _score(scores: "Mapping[str, float]", name: str) -> str:
    measure, _, filtered = name.partition(",")
    error = scores.get(",".join(filter(None, (f"{measure}_stderr", filtered))))
    return _number(scores.get(name)) + ("" if error is None else f" +- {error:.4f}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
