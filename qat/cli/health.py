"""What a run came to and how it fared, told at its end."""

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from qat.errors import QatError
from qat.logs import Terminal

if TYPE_CHECKING:
    from qat.train.config import TrainConfig
    from qat.train.start import TrainReport

logger = logging.getLogger(__name__)

COLOURS = {"look": "yellow", "bad": "bold red"}
MEASURES = (
    ("kl_tail_nats", "KL, nats (top-K and tail)", "{:.4f}"),
    ("kd_nats", "KD, nats (top-K alone, T = 2)", "{:.4f}"),
    ("sampled_ce_nats", "cross-entropy with draws, nats", "{:.4f}"),
    ("top1_frac", "top-1 agreement", "{:.1%}"),
    ("ppl", "perplexity", "{:,.2f}"),
)


def show_end(run: Path, report: "TrainReport", config: "TrainConfig") -> None:
    """Print on stdout what training changed, where the student lies, and what may come next.

    A run that has its student does not fail for it.
    """
    from qat.models.cost import model_bytes
    from qat.observe.runs import read_directory

    try:
        found = read_directory(run)
    except (OSError, QatError) as error:
        logger.warning("no numbers of %s: %s", run, error)
        return
    console = Terminal()
    trained = [row for row in found.evals if row["step"] > 0]
    if trained:
        first, best = found.evals[0], min(trained, key=_score)
        console.print(_before_and_after(first, best))
        if _score(best) >= _score(first):
            console.print("training made the student no better: lower the rates, or train longer")
    size = model_bytes(report.final) / 1e6
    lines = [f"the student, {size:.2f} MB: {report.final}", "next:"]
    lines += [f"  {shlex.join(words)}" for words in _next(report.final, config, found.info)]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def show_health(run: Path) -> None:
    """Print the answers to the questions of `qat.observe.health` about `run` that are not ok.

    A run that has its student does not fail for it.
    """
    from qat.observe.health import health
    from qat.observe.runs import read_directory

    try:
        checks = health(read_directory(run))
    except (OSError, QatError) as error:
        logger.warning("no table of the run's health: %s", error)
        return
    table = Table("Health", "Found", "Limit", "")
    for check in checks:
        if check.state != "ok":
            state = Text(check.state, COLOURS[check.state])
            table.add_row(check.name, check.found, check.limit, state)
    if table.rows:
        Terminal().print(table)


def _score(row: dict) -> float:
    from qat.train.judge import score

    return score(row)


def _before_and_after(first: dict, best: dict) -> Table:
    """What the held-out split says of the untrained student and of the one that is kept."""
    titles = ("before" if first["step"] == 0 else f"step {first['step']}", f"step {best['step']}")
    table = Table("on the held-out split", title_justify="left")
    for title in titles:
        table.add_column(title, justify="right")
    for key, label, form in MEASURES:
        if first.get(key) is not None and best.get(key) is not None:
            table.add_row(label, form.format(first[key]), form.format(best[key]))
    return table


def _next(final: Path, config: "TrainConfig", facts: dict) -> list[list[str]]:
    """Commands for the finished student: judge it beside its teacher, let it write, ship it."""
    from qat.export.targets import ships_to

    teacher = facts.get("teacher")
    beside = ["--teacher", teacher] if teacher else []
    lacks = ships_to(final)
    to = next((name for name in ("gguf", "dense") if lacks[name] is None), "packed")
    return [
        ["qat", "eval", str(final), "--cache-dir", config.cache_dir, *beside],
        ["qat", "generate", str(final), "--prompt", config.sample_prompt],
        ["qat", "export", str(final), "--to", to, "--out", f"{final}-{to}"],
    ]
