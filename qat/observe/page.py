"""The report: one self-contained HTML page, and its charts as PNG files in the same directory."""

import base64
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template

from qat.convert.config import REPORT_NAME
from qat.errors import ConfigError
from qat.files import write_atomically
from qat.models.attention import load_sparse_attention
from qat.observe.charts import Chart, conversion_charts, in_dark, run_charts, size_charts
from qat.observe.health import Check, health, worst
from qat.observe.runs import (
    EXAM_CAPTION,
    EXAM_COLUMNS,
    Conversion,
    Exams,
    Module,
    TrainingRun,
    exam_rows,
    read_directory,
    read_exam,
    sections_in,
    stages_in,
    with_stages,
)
from qat.observe.summary import (
    Result,
    Summary,
    summary_of_conversion,
    summary_of_pipeline,
    summary_of_run,
)

COLUMNS = (
    ("run", ""),
    ("steps", ""),
    ("loss", "nats, last"),
    ("KL with tail", "nats, best"),
    ("KD", "nats, best"),
    ("top-1", "%, last"),
    ("perplexity", "best"),
    ("speed", "tokens/s"),
    ("MFU", "%"),
    ("memory", "GiB, peak"),
    ("device", ""),
)
BEST_COLUMNS = (3, 4, 6)
SIGNS = (b'<meta name="generator" content="qat">', b"Software\0qat")  # marks of what a report wrote
SIGNED_BYTES = 4096
ARROW = "\u2192"
HASH = re.compile(r"[0-9a-f]{13,}")  # a hash that is too long to compare by eye


@dataclass(frozen=True)
class Section:
    """A section of the page that an extension writes (`qat.sections`): a table and its charts."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]
    caption: str
    charts: list[Chart]


@dataclass(frozen=True)
class Written:
    """The files of a written report."""

    page: Path
    pictures: list[Path]


def write_report(directories: list[Path], out: Path) -> Written:
    """Read runs and conversions, write the page to `out` and `<stem>-<chart>.png` next to it.

    The page loads nothing from the network and follows the reader's light or dark setting.

    Raises:
        CheckpointError: a directory is missing, damaged or neither a run nor a conversion.
        ConfigError: a file of that name exists that was not written by a report.
    """
    exam = read_exam(directories[0]) if len(directories) == 1 else {}
    found = stages_in(directories[0]) if exam else with_stages(directories)
    sections = _sections(dict.fromkeys([*directories, *found]))
    sources = with_unique_labels([read_directory(path) for path in found])
    runs = [source for source in sources if isinstance(source, TrainingRun)]
    conversions = [source for source in sources if isinstance(source, Conversion)]
    summary = _summary(directories, found, sources, exam)
    sizes = size_charts(summary.results) if summary else []
    curves = run_charts(runs)
    layers = {each.label: conversion_charts(each) for each in conversions}
    counts = [(len(runs), "training run"), (len(conversions), "conversion")]
    # the number of sequences that the evaluations used, from the recipes
    judged = [re.search(r"^eval_sequences = (\d+)$", run.recipe, re.MULTILINE) for run in runs]
    views = [{**vars(s), "images": [picture(chart) for chart in s.charts]} for s in sections]
    html = template("page.html").render(
        title=summary.title if summary else "qat report",
        subtitle=(summary and summary.date)
        or ", ".join(f"{n} {word}{'s' if n > 1 else ''}" for n, word in counts if n),
        summary=summary and _summary_view(summary),
        sizes=[picture(chart) for chart in sizes],
        exam=exam and {"columns": EXAM_COLUMNS, "rows": exam_rows(exam), "caption": EXAM_CAPTION},
        sections=views,
        columns=COLUMNS,
        table=run_table(runs),
        judged_on=" or ".join(dict.fromkeys(each[1] for each in judged if each)) or "few",
        curves=[picture(chart) for chart in curves],
        runs=[_run_view(run) for run in runs],
        conversions=[_conversion_view(each, layers[each.label]) for each in conversions],
    )
    of_sections = [chart for section in sections for chart in section.charts]
    of_layers = [chart for charts in layers.values() for chart in charts]
    charts = [*sizes, *of_sections, *curves, *of_layers]
    pictures = {out.with_name(f"{out.stem}-{chart.name}.png"): chart for chart in charts}
    for path in (out, *pictures):
        check_replaceable(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, chart in pictures.items():
        write_atomically(path, chart.render("png"))
    write_atomically(out, html.encode("utf-8"))
    return Written(out, [*pictures])


def _sections(directories: Iterable[Path]) -> list[Section]:
    """Return the sections about all directories; charts of equal names are numbered."""
    seen: Counter[str] = Counter()
    sections = []
    for point, file in (each for path in directories for each in sections_in(path)):
        section = point.load()(file)
        charts = []
        for chart in section.charts:
            seen[chart.name] += 1
            count = seen[chart.name]
            charts.append(chart if count == 1 else replace(chart, name=f"{chart.name}-{count}"))
        sections.append(replace(section, charts=charts))
    return sections


def _summary(
    directories: list[Path], found: list[Path], sources: list[TrainingRun | Conversion], exam: Exams
) -> Summary | None:
    runs = [source for source in sources if isinstance(source, TrainingRun)]
    if exam:
        return summary_of_pipeline(directories[0], exam, runs[-1] if runs else None)
    if len(runs) == 1:  # with or without the checkpoint that it started from
        place = found[sources.index(runs[0])]
        return summary_of_run(place, runs[0])
    if len(sources) == 1 and isinstance(sources[0], Conversion):
        return summary_of_conversion(found[0], REPORT_NAME, sources[0])
    return None


def _summary_view(summary: Summary) -> dict[str, Any]:
    tiles, warning = [], None
    if summary.results:
        first, last = summary.results[0], summary.results[-1]
        students = [each for each in summary.results if each.kl_nats != 0]
        if first.megabytes and last.megabytes and first is not last:
            times = first.megabytes / last.megabytes
            if first.kl_nats == 0 and times <= 1:
                warning = (
                    f"The student has {number(last.megabytes)} MB, the teacher "
                    f"{number(first.megabytes)} MB: nothing became smaller."
                )
            if times > 1:
                size = f"{number(first.megabytes)} {ARROW} {number(last.megabytes)} MB"
                tiles.append((f"size: {times:.1f} times smaller", size))
        tiles += [
            _tile("distance from the teacher (KL)", students, "kl_nats"),
            _tile("picks the teacher's next word", students, "top1_frac", percent=True),
            _tile("perplexity", summary.results, "ppl"),
        ]
    return {
        "tiles": [(label, value) for label, value in tiles if value],
        "warning": warning,
        "text": summary.text,
        "sample": summary.sample,
        "commands": summary.commands,
    }


def _tile(label: str, results: list[Result], key: str, *, percent: bool = False) -> tuple[str, str]:
    """Return a label with the models' names and their values; an empty value if one is missing."""
    values = [getattr(each, key) for each in results]
    if None in values:
        return label, ""
    cells = [f"{100 * value:.1f} %" if percent else number(value) for value in values]
    names = ", ".join(each.name for each in results)
    return f"{label}: {names}", f" {ARROW} ".join(cells)


def check_replaceable(path: Path) -> None:
    """Raise ConfigError if `path` exists and was not written by a report."""
    if path.is_dir():
        raise ConfigError(f"out={path} is a directory, expected a file to write; name a .html file")
    if path.is_file() and not any(sign in path.read_bytes()[:SIGNED_BYTES] for sign in SIGNS):
        raise ConfigError(
            f"{path} is there and no report of qat's, so it is not replaced; move it or choose "
            "another --out"
        )


def with_unique_labels(sources: list[TrainingRun | Conversion]) -> list[TrainingRun | Conversion]:
    """Return the same sources, with a number appended to each label that repeats an earlier one."""
    seen: dict[str, int] = {}
    result = []
    for source in sources:
        count = seen[source.label] = seen.get(source.label, 0) + 1
        label = source.label if count == 1 else f"{source.label} ({count})"
        if isinstance(source, TrainingRun):
            result.append(TrainingRun(**{**vars(source), "label": label}))
        else:
            result.append(source.model_copy(update={"label": label}))
    return result


def run_table(runs: list[TrainingRun]) -> list[list[dict[str, Any]]]:
    """Return one row per run: under each of `COLUMNS` a text and whether it is the best."""
    values = [
        [
            run.label,
            run.steps[-1]["step"] if run.steps else None,
            run.steps[-1]["loss_nats"] if run.steps else None,
            run.lowest("kl_tail_nats"),
            run.lowest("kd_nats"),
            _percent(run.evals[-1].get("top1_frac") if run.evals else None),
            run.lowest("ppl"),
            run.tokens_per_s(),
            _percent(run.median("mfu_frac")),
            run.peak_gib(),
            run.info.get("device"),
        ]
        for run in runs
    ]
    best = {
        column: min((row[column] for row in values if row[column] is not None), default=None)
        for column in BEST_COLUMNS
    }
    return [
        [
            {"text": number(value), "best": len(runs) > 1 and best.get(i) == value is not None}
            for i, value in enumerate(row)
        ]
        for row in values
    ]


def number(value: float | int | str | None) -> str:
    """Format a value: 3 significant digits, thousands grouped, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    return f"{value:.3g}" if abs(value) < 0.001 else f"{value:#.3g}".rstrip(".")


def _run_view(run: TrainingRun) -> dict[str, Any]:
    last = run.evals[-1] if run.evals else {}
    first = run.evals[0] if run.evals else {}
    top1, checks = last.get("top1_frac"), health(run)
    layers = last.get("nsa_layers")
    columns, rows = load_sparse_attention().table(layers) if layers else ((), ())
    tiles = [
        ("held-out KL, first to last (nats)", _change(first, last, "kl_tail_nats")),
        *(
            (f"the same of {key.partition('/')[2]}", _change(first, last, key))
            for key in first
            if key.startswith("kl_tail_nats/")
        ),
        ("perplexity, first to last", _change(first, last, "ppl")),
        ("same first choice as the teacher", "-" if top1 is None else f"{100 * top1:.1f} %"),
        ("tokens/s, median", number(run.tokens_per_s())),
    ]
    return {
        "label": run.label,
        "tiles": [(label, value) for label, value in tiles if value != "-"],
        "health": checks,
        "health_word": _health_word(checks),
        "is_well": worst(checks) == "ok",
        "layer_columns": columns,
        "layers": rows,
        "facts": list(_flatten(_without_marks(run.info))),
        "recipe": run.recipe,
    }


def _health_word(checks: list[Check]) -> str:
    wrong = [check.name for check in checks if check.state != "ok"]
    if not wrong:
        return f"Health: all {len(checks)} checks are ok"
    return f"Health: {len(wrong)} of {len(checks)} checks need a look: {', '.join(wrong)}"


def _without_marks(info: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a run with hashes cut to 12 digits and `judged` as a count."""
    short = {
        key: value[:12] if isinstance(value, str) and HASH.fullmatch(value) else value
        for key, value in info.items()
    }
    if isinstance(short.get("judged"), list):
        short["judged"] = f"{len(short['judged'])} held-out sequences"
    return short


def _conversion_view(conversion: Conversion, charts: list[Chart]) -> dict[str, Any]:
    modules = conversion.modules
    tiles = [
        ("plan", conversion.plan),
        ("bits per weight, all weights", number(conversion.bits_per_weight)),
        ("bits per weight of linears", number(conversion.linear_bits)),
    ]
    tiles += [(f"inputs in {kind}", str(n)) for kind, n in conversion.activations.items()]
    if conversion.kv is not None:
        kv = conversion.kv
        tiles.append((f"bytes a token, keys and values in {kv.bits} bits", f"{kv.bytes_per_token}"))
    if modules:
        mean = sum(module.error for module in modules) / len(modules)
        worst = max(modules, key=lambda module: module.error)
        place = "" if worst.layer is None else f" of layer {worst.layer}"
        tiles += [
            (f"mean {conversion.kind_of_error} error", number(mean)),
            (f"worst, {worst.kind}{place}", number(worst.error)),
        ]
    return {
        "label": conversion.label,
        "tiles": [*tiles, ("seconds", number(conversion.seconds))],
        "images": [picture(chart) for chart in charts],
        "rows": [_module_row(module) for module in modules],
    }


def _module_row(module: Module) -> list[str]:
    vectors = f", vectors of {module.vector_size}" if module.vector_size > 1 else ""
    numbers = (
        f"{module.bits:g}{vectors}",
        module.bits_per_weight,
        module.relative_error,
        module.weighted_error,
        module.seconds,
    )
    return [module.name, *map(number, numbers)]


def picture(chart: Chart) -> dict[str, str]:
    """Return a chart as the template needs it: its texts, and both themes as data URIs."""
    light = chart.render("svg")
    return {
        "title": chart.title,
        "caption": chart.caption,
        "light": _data_uri(light),
        "dark": _data_uri(in_dark(light)),
    }


def _data_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def template(name: str, *folders: Path) -> Template:
    """Return a template of `folders` or of this package with autoescaping."""
    loader = FileSystemLoader([*folders, Path(__file__).parent])
    return Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template(name)


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else number(value)
            yield f"{prefix}{key}", text


def _change(first: dict[str, Any], last: dict[str, Any], key: str) -> str:
    if last.get(key) is None:
        return "-"
    if first is last or first.get(key) is None:
        return number(last[key])
    return f"{number(first[key])} {ARROW} {number(last[key])}"


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction
