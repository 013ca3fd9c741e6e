"""`qat eval`: how far a student is from its teacher, in numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qat.cli.result import print_result
from qat.evaluate.config import EvalConfig

if TYPE_CHECKING:
    from qat.evaluate.judge import Verdict

DEFAULTS = EvalConfig()


def evaluate(
    student: str, *, config: Annotated[EvalConfig, Parameter(name="*")] = DEFAULTS
) -> None:
    """Judge STUDENT by a teacher cache, by its teacher, and on a text.

    Args:
        student: model directory, run directory or hub id.
        config: settings.
    """
    from qat.evaluate.judge import judge

    verdict = judge(student, config)
    _show(verdict, student, config)
    print_result(student=student, **verdict.numbers())


def _show(verdict: "Verdict", student: str, config: EvalConfig) -> None:
    """Print the numbers as a table, the teacher's beside the student's."""
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", title=Path(student).name, title_justify="left")
    table.add_column("student", justify="right")
    table.add_column("teacher", justify="right")
    for row in _rows(verdict, config):
        table.add_row(*row)
    Console().print(table)


def _rows(verdict: "Verdict", config: EvalConfig) -> list[tuple[str, str, str]]:
    found = verdict.numbers()
    where = "text" if config.cache_dir is None else f"cache, {config.split}"
    windows = f"windows of {config.context}, stride {config.stride}"
    rows = [
        (f"KD, nats ({where}; top-K alone, T = 2)", "kd_nats", 0.0),
        (f"KL, nats ({where}; top-K and tail)", "kl_tail_nats", 0.0),
        (f"KL, nats ({where}; whole vocabulary)", "kl_nats", 0.0),
        (f"cross-entropy with draws, nats ({where})", "sampled_ce_nats", None),
        (f"top-1 agreement ({where})", "top1_frac", 1.0),
        (f"perplexity ({where})", "ppl", found["teacher_ppl"]),
        (f"perplexity (text; {windows})", "text_ppl", found["teacher_text_ppl"]),
        ("bits per byte (text)", "text_bits_per_byte", found["teacher_text_bits_per_byte"]),
    ]
    return [
        (label, _number(found[name]), _number(teacher))
        for label, name, teacher in rows
        if found[name] is not None and not (name == "ppl" and config.cache_dir is None)
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
