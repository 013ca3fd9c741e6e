"""`qat bench quality`: compares recipes with one teacher, data and budget in a table of results.

A line of the table is a recipe, with mean and spread over its seeds.
"""

import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes

from qat.backend.device import devices, select
from qat.errors import ConfigError, TrainingError
from qat.extensions.bench.results import environment
from qat.extensions.lab.config import QualityConfig
from qat.extensions.lab.jobs import Ended, run_processes
from qat.extensions.lab.pages import markdown_table, write_comparison
from qat.extensions.lab.quality.conversion import Conversion
from qat.extensions.lab.quality.plan import (
    QualityJob,
    QualityPlan,
    QualityRecipe,
    read_quality,
)
from qat.extensions.lab.quality.prepare import (
    Unmade,
    Workspace,
    check_shapes,
    resolve,
    time_key,
    to_time,
    with_equal_time,
)
from qat.observe.charts import SERIES, Chart, fit_scale
from qat.process import cores

PAGE = "quality.md"
PER_TEXT = ("kl_nats", "top1_frac", "ppl")
COMMON = (
    *("kd_nats", "kl_own_nats", "repeated_frac", "distinct_frac"),
    *("bits_per_weight", "linear_bits", "megabytes", "steps", "tokens", "seconds", "peak_gib"),
)
TEACHER = "teacher"
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")

Row = dict[str, object]
logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """A job that ended without rows."""

    name: str
    seed: int
    message: str  # the error message at the end of its log
    log: Path


class Stat(NamedTuple):
    """The mean and spread of a number over seeds."""

    mean: float
    std: float | None  # the sample standard deviation; None for one seed


@dataclass(frozen=True)
class QualityLine:
    """A recipe's line in the table."""

    recipe: str
    method: str
    num_seeds: int
    workers: tuple[int, ...]  # numbers of parallel jobs with which it ran
    stats: dict[str, Stat | None]
    """Numbers by name, those of a text as `kl_nats.TEXT`; None if nothing was measured."""


@dataclass(frozen=True)
class QualityReport:
    """The current results of a comparison."""

    path: Path
    texts: tuple[str, ...]
    lines: list[QualityLine]
    failures: list[Failure]
    unmade: Unmade

    def check(self) -> None:
        """Raise TrainingError if a job failed.

        Raises:
            TrainingError: with the first failure.
        """
        if self.failures:
            first = self.failures[0]
            raise TrainingError(
                f"{len(self.failures)} jobs failed, expected none; the first, {first.name!r} with "
                f"seed {first.seed}, said {first.message!r}; see {first.log}, mend it and run the "
                "same command again"
            )


def run_quality(config: QualityConfig, recipe: Path, out: Path) -> QualityReport:
    """Train, evaluate and compare the recipes of the file; finished jobs in `out` are not repeated.

    Failed jobs and recipes that cannot be made are part of the report.

    Raises:
        ConfigError: no recipe's name matches `config.only`.
    """
    spread = devices(config.device)
    workspace = Workspace(read_quality(recipe), out, spread[0])
    resolved, unmade = check_shapes(workspace.recipe, resolve(workspace.recipe))
    names = {plan.name for plan in resolved if config.selects(plan.name)}
    if not names:
        raise ConfigError(
            f"only={config.only}, but no recipe's name holds that; choose among "
            f"{', '.join(repr(plan.name) for plan in resolved)}, several joined by |"
        )
    workspace.claim()
    known = workspace.known_times()
    every = with_equal_time(resolved, known)
    plans = [plan for plan in every if plan.name in names]
    # a recipe that another's equal_time_to names is timed too, but runs only if it is selected
    followed = {plan.equal_time_to for plan in plans}
    prepared = [plan for plan in every if plan.name in names | followed]
    workspace.build_caches(prepared)
    share = partial(make_jobs, workspace.recipe, out=out, config=config, num_devices=len(spread))
    at_once = config.workers * len(spread)
    is_timed = any(time_key(plan) not in known for plan in to_time(prepared))
    # a recipe with all its rows needs no conversion; without step times, the rows of recipes on
    # equal time are unknown
    wanting = (
        prepared
        if is_timed
        else [plan for plan in plans if not all(job.row.exists() for job in share([plan])[1:])]
    )
    missing = workspace.missing(wanting, threads=max(1, cores() // at_once))
    refused: dict[str, str] = {}
    # a single one stays in this process, which has loaded everything that a new one would load
    # again
    if at_once > 1 and len(missing) > 1:
        _, refused = run_jobs(missing, spread, at_once)
    unmade = unmade | workspace.convert(prepared, wanting, refused)
    if is_timed:
        made = [plan for plan in prepared if plan.name not in unmade]
        every = with_equal_time(resolved, workspace.step_times(made))
    jobs = share([plan for plan in every if plan.name in names - unmade.keys()])
    others = share([plan for plan in every if plan.name not in names])

    def write(failures: list[Failure]) -> QualityReport:
        return write_results(workspace, [*jobs, *others[1:]], unmade, failures)

    failures, _ = run_jobs([job for job in jobs if not job.row.exists()], spread, at_once, write)
    return write(failures)


def make_jobs(
    recipe: QualityRecipe,
    plans: Sequence[QualityPlan],
    *,
    out: Path,
    config: QualityConfig,
    num_devices: int,
) -> list[QualityJob]:
    """Return the teacher's job, then all recipes with the first seed, with the second, ..."""
    own = cores() // (config.workers * num_devices)
    shared = {
        "recipe": recipe,
        "out": out,
        "device": config.device,
        "workers": config.workers,
        "threads": max(1, min(torch.get_num_threads(), own)),
    }
    seeds = dict.fromkeys(seed for plan in plans for seed in plan.seeds)
    pairs = [(seed, plan) for seed in seeds for plan in plans if seed in plan.seeds]
    students = [QualityJob(plan=plan, seed=seed, **shared) for seed, plan in pairs]
    return [QualityJob(plan=None, seed=0, **shared), *students]


def run_jobs(
    jobs: Sequence[QualityJob | Conversion],
    devices: Sequence[str],
    at_once: int,
    after_each: Callable[[list[Failure]], object] = lambda _failures: None,
) -> tuple[list[Failure], dict[str, str]]:
    """Run all jobs, `at_once` in parallel, each on the least busy device.

    `after_each` is called with the recipes' failures so far whenever a recipe has ended.

    Returns:
        The recipes' failures, and the errors of failed conversions by their labels.
    """
    failures: list[Failure] = []
    refused: dict[str, str] = {}

    def placed(
        job: QualityJob | Conversion, busy: list[QualityJob | Conversion]
    ) -> QualityJob | Conversion:
        # the first of those with the fewest running jobs
        device = min(devices, key=[each.device for each in busy].count)
        return job.model_copy(update={"device": device})

    def ended(found: Ended) -> bool:
        job = found.job
        if isinstance(job, Conversion):
            if not job.student.exists():
                refused[job.label] = found.error_message
            return True
        if found.status == 0 and job.row.exists():
            logger.info("%s, seed %d: done", job.name, job.seed)
        else:
            message = found.error_message
            logger.warning("%s, seed %d failed: %s", job.name, job.seed, message)
            failures.append(Failure(job.name, job.seed, message, job.log))
        after_each(failures)
        return True

    run_processes(
        jobs,
        ended,
        progress=("converting and training", "jobs"),
        parallel=at_once,
        placed=placed,
    )
    return failures, refused


def write_results(
    workspace: Workspace, jobs: Sequence[QualityJob], unmade: Unmade, failures: list[Failure]
) -> QualityReport:
    """Write rows, table and pictures of all finished jobs, and the recipes that cannot be made."""
    files = [job.row for job in jobs]
    rows = [row for file in files if file.exists() for row in json.loads(file.read_text())]
    texts = tuple(workspace.recipe.texts.report)
    report = QualityReport(workspace.out, texts, summarise(rows, texts), failures, unmade)
    write_comparison(
        workspace.out,
        rows,
        page=(PAGE, _page(workspace.recipe, report)),
        whole={
            "environment": environment(select(workspace.device), workspace.recipe),
            "step_times": workspace.known_times(),
            "unmade": unmade,
            "failures": [failure._asdict() for failure in failures],
        },
        pictures=charts(report.lines, texts[0]),
    )
    return report


def summarise(rows: Sequence[Row], texts: Sequence[str]) -> list[QualityLine]:
    """Return a line per recipe: the teacher first, then by KL on the first of `texts`."""
    names = dict.fromkeys(row["recipe"] for row in rows)
    lines = [_line([row for row in rows if row["recipe"] == name], texts) for name in names]
    kl = f"kl_nats.{texts[0]}"
    return sorted(lines, key=lambda line: (line.method != TEACHER, line.stats[kl].mean))


def _line(rows: list[Row], texts: Sequence[str]) -> QualityLine:
    firsts = [row for row in rows if row["text"] == texts[0]]
    # older rows have no KL on a student's own samples
    stats = {name: stat([row.get(name) for row in firsts]) for name in COMMON}
    for text in texts:
        own = [row for row in rows if row["text"] == text]
        stats |= {f"{name}.{text}": stat([row[name] for row in own]) for name in PER_TEXT}
    return QualityLine(
        recipe=rows[0]["recipe"],
        method=rows[0]["method"],
        num_seeds=len(firsts),
        workers=tuple(sorted({row["workers"] for row in firsts})),
        stats=stats,
    )


def stat(values: Sequence[float | None]) -> Stat | None:
    """Return mean and sample standard deviation of the known values; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Stat(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def cells(
    lines: Sequence[QualityLine], texts: Sequence[str], unmade: Mapping[str, str] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of all lines, then of recipes that cannot be made."""
    columns = [  # heading, name in `QualityLine.stats`, format of the mean
        ("bits/w", "bits_per_weight", "{:.3f}"),
        ("of linears", "linear_bits", "{:.3f}"),
        ("MB", "megabytes", "{:.2f}"),
        *((f"KL {text}", f"kl_nats.{text}", "{:.4f}") for text in texts),
        *((f"top-1 {text}", f"top1_frac.{text}", "{:.4f}") for text in texts),
        *((f"ppl {text}", f"ppl.{text}", "{:.3f}") for text in texts),
        ("KD", "kd_nats", "{:.4f}"),
        ("KL own words", "kl_own_nats", "{:.4f}"),
        ("rep-4", "repeated_frac", "{:.3f}"),
        ("distinct", "distinct_frac", "{:.3f}"),
        ("steps", "steps", "{:,.0f}"),
        ("Mtokens", "tokens", "{:.2f}"),
        ("seconds", "seconds", "{:.1f}"),
        ("GiB", "peak_gib", "{:.2f}"),
    ]

    def cell(line: QualityLine, key: str, form: str) -> str:
        found = line.stats[key]
        if found is None:
            return "-"
        unit = 1e6 if key == "tokens" else 1.0
        text = form.format(found.mean / unit)
        return f"{text} +- {form.format(found.std / unit)}" if found.std else text

    headings = ["recipe", "seeds", *(title for title, _, _ in columns)]
    body = [
        [line.recipe, str(line.num_seeds), *(cell(line, key, form) for _, key, form in columns)]
        for line in lines
    ]
    if unmade:
        headings = [*headings, "cannot be made"]
        nothing = ["-"] * (len(headings) - 3)
        body = [[*words, ""] for words in body]
        body += [[name, "0", *nothing, reason] for name, reason in unmade.items()]
    return headings, body


def best(lines: Sequence[QualityLine]) -> QualityLine | None:
    """Return the first line after the teacher's."""
    return next((line for line in lines if line.method != TEACHER), None)


def _page(recipe: QualityRecipe, report: QualityReport) -> str:
    texts = [f"{name} ({recipe.texts.report[name]})" for name in report.texts]
    words = [
        f"# {recipe.name}",
        f"Teacher {recipe.teacher}; budget {recipe.max_steps:,} steps of {recipe.batch_size} x "
        f"{recipe.sequence_length} tokens from {recipe.texts.distil}. Judged in float32 on the "
        f"first {recipe.report_sequences} sequences of {', '.join(texts)}: KL from the teacher "
        "over the whole vocabulary in nats a token, share of equal top-1 words, perplexity. KD as "
        "the reference defines it, on held-out text. KL own words: KL on samples of the student "
        "itself at temperature 1, top-p 0.95; rep-4, distinct: their repeated 4-grams and distinct "
        "tokens. bits/w: all weights, scales and codebooks counted; of linears: of those "
        "alone; MB: the whole model. seconds: the training loop without compiling "
        "and evaluating. Means and standard deviations over seeds.",
        markdown_table(*cells(report.lines, report.texts, report.unmade)).rstrip(),
    ]
    workers = sorted({count for line in report.lines for count in line.workers})
    if workers and workers != [1]:
        words.append(
            f"Rows ran with {' or '.join(map(str, workers))} jobs side by side: seconds compare "
            "between equal ones only (results.jsonl tells)."
        )
    failures = report.failures
    words += [f"Failed: {each.name}, seed {each.seed}: {each.message}" for each in failures]
    found = best(report.lines)
    if found is not None:
        words.append(f"Least KL on {report.texts[0]}: {found.recipe}.")
    return "\n\n".join(words) + "\n"


def charts(lines: Sequence[QualityLine], text: str) -> dict[str, bytes]:
    """Chart KL on `text` against bits and against training time; SVG by file name.

    The teacher is left out.
    """
    students = [line for line in lines if line.method != TEACHER]
    trained = [line for line in students if line.stats["steps"].mean > 0]
    if not students:
        return {}
    marks = {
        line.recipe: {  # the same in both charts
            "fmt": SHAPES[number // len(SERIES) % len(SHAPES)],
            "color": SERIES[number % len(SERIES)],
        }
        for number, line in enumerate(students)
    }
    pictures = {"kl_bits.svg": ("bits_per_weight", "bits per weight", students)}
    if trained:
        pictures["kl_seconds.svg"] = ("seconds", "training seconds", trained)
    return {
        name: Chart(
            name, "", "", partial(_paint, lines=drawn, marks=marks, text=text, key=key, label=label)
        ).render("svg")
        for name, (key, label, drawn) in pictures.items()
    }


def _paint(
    axes: Axes,
    *,
    lines: Sequence[QualityLine],
    marks: dict[str, dict[str, str]],
    text: str,
    key: str,
    label: str,
) -> None:
    for line in lines:
        across, up = line.stats[key], line.stats[f"kl_nats.{text}"]
        axes.errorbar(
            across.mean,
            up.mean,
            yerr=up.std or 0.0,
            markersize=6,
            capsize=2,
            label=line.recipe,
            **marks[line.recipe],
        )
    fit_scale(axes.xaxis, [line.stats[key].mean for line in lines])
    fit_scale(axes.yaxis, [line.stats[f"kl_nats.{text}"].mean for line in lines])
    axes.margins(0.12)
    axes.set_xlabel(label)
    axes.set_ylabel(f"KL on {text}, nats a token")
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside right upper", fontsize=8)
