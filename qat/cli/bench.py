"""`qat bench`: how fast a training step is, how large it can be, and what others would take."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import App, Parameter

from qat.bench.config import (
    CPU_SHAPE,
    DEFAULT_SHAPE,
    AttentionConfig,
    BaselinesConfig,
    BenchConfig,
    KernelsConfig,
    MeasureConfig,
    QualityConfig,
)
from qat.cli.bench_compare import compare, record, sweep
from qat.cli.tables import numbers_table, row_table, wide_console
from qat.config import OTHERS, Required
from qat.errors import ConfigError
from qat.losses.config import parse_losses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from qat.bench.run import BenchReport, DevicePrediction
    from qat.extensions.lab.kernels.run import KernelsReport
    from qat.extensions.lab.tpu_plan.run import Planned

logger = logging.getLogger(__name__)

Measured = TypeVar("Measured", bound=MeasureConfig)
SUMMARY = (
    *("batch_size", "step_s", "tokens_per_s", "mfu_frac", "mfu_of_matmul_frac", "peak_gib"),
    "peak_reserved_gib",
)
SUMMARY_DIGITS = 6
FILE_WIDTH, ATTENTION_WIDTH, KERNELS_WIDTH, QUALITY_WIDTH = 120, 130, 150, 400
"""Columns of a table where output goes to a file."""
US = 1e6
SPEED_COLUMNS = (
    ("Batch", "batch_size", "{}", 1),
    ("Step(s)", "step_s", "{:.4g}", 1),
    ("Memory", "peak_gib", "{:.2f} GiB", 1),
    ("reserved", "peak_reserved_gib", "{:.2f} GiB", 1),
    ("t/s", "tokens_per_s", "{:,.0f}", 1),
    ("Loss", "loss_nats", "{:.4f}", 1),
    ("Status", "status", "{}", 1),
    ("MFU", "mfu_frac", "{:.3f}", 1),
    ("of matmul", "mfu_of_matmul_frac", "{:.3f}", 1),
)
"""The reference's columns, MFU beside them."""
KERNELS_COLUMNS = (
    ("Kernel", "case", "{}", 1),
    ("us a call", "p50_s", "{:,.2f}", US),
    ("p90", "p90_s", "{:,.2f}", US),
    ("p99", "p99_s", "{:,.2f}", US),
    ("95 % from", "low_s", "{:,.2f}", US),
    ("to", "high_s", "{:,.2f}", US),
    ("reference", "reference_s", "{:,.2f}", US),
    ("GB/s", "gb_per_s", "{:,.0f}", 1),
    ("TFLOP/s", "tflops", "{:,.1f}", 1),
    ("Bound by", "bound", "{}", 1),
    ("Of roofline", "roofline_frac", "{:.3f}", 1),
    ("x reference", "over_reference", "{:.1f}", 1),
    ("Status", "status", "{}", 1),
)
ATTENTION_COLUMNS = (
    ("Way", "way", "{}", 1),
    ("Pass", "pass", "{}", 1),
    ("S", "length", "{:,}", 1),
    ("Heads", "heads", "{}", 1),
    ("ms a call", "p50_s", "{:,.3f}", 1e3),
    ("95 % from", "low_s", "{:,.3f}", 1e3),
    ("to", "high_s", "{:,.3f}", 1e3),
    ("x best dense", "over_dense", "{:.2f}", 1),
    ("Memory", "peak_gib", "{:.2f} GiB", 1),
    ("First call", "compile_s", "{:.1f} s", 1),
    ("Status", "status", "{}", 1),
)

bench_app = App(help="Measure the training step of a student.", group_parameters=OTHERS)
bench_app.command(
    compare, help_epilogue="Example: qat bench compare runs/bench/BEFORE runs/bench/AFTER"
)
bench_app.command(
    sweep, help_epilogue="Example: qat bench sweep speedrun/recipes/sweep_runbook.toml --tiny"
)
bench_app.command(
    record, help_epilogue="Example: qat bench record two-words --from runs/bench/TIME"
)


@bench_app.default
def bench(
    student: str | None = None,
    *,
    config: Annotated[BenchConfig, Parameter(name="*")] = BenchConfig(),  # noqa: B008 - frozen
    out: Path | None = None,
) -> dict[str, object]:
    """Time the training step of STUDENT; compiling and warming up are reported apart.

    Args:
        student: packed checkpoint, or a shape: tiny, qwen3-0.6b, llama-3.2-1b, gemma-3-270m, ...
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    student = _student(student, config)
    config = _checked(student, config, out)
    from qat.backend.device import select
    from qat.bench.run import run_bench
    from qat.extensions.lab.tpu_plan.run import run_tpu_plan

    if config.topologies and config.planned is None:
        path, planned = run_tpu_plan(config, student, out)
        wide_console(FILE_WIDTH).print(_predicted((), planned))
        return dict(out=path, planned=_planned(planned))
    with select(config.device).session(config.xla_cache_dir):
        report = run_bench(config, student, out)
    console = wide_console(FILE_WIDTH)
    measured = [row for row in report.rows if row["kind"] != "predicted"]
    if measured:
        console.print(row_table(SPEED_COLUMNS, measured, justify="left"))
        for line in _findings(report):
            console.print(line, markup=False, highlight=False)
    if report.predictions or report.planned:
        how = "memory model" if measured else "without a run"
        console.print(_predicted(report.predictions, report.planned, how))
    return _summary(report)


@bench_app.command(help_epilogue="Example: qat bench baselines tiny --only ours,plain-eager")
def baselines(
    student: Required[str],
    *,
    config: Annotated[BaselinesConfig, Parameter(name="*")] = BaselinesConfig(),  # noqa: B008
    out: Path | None = None,
) -> dict[str, object]:
    """Time other ways to train the same layers on the same data beside ours.

    Args:
        student: packed checkpoint or shape, as for 'qat bench'.
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    config = _checked(student, config, out)
    from qat.extensions.lab.baselines.run import run_baselines

    report = run_baselines(config, student, out)
    first, last = ("Case", "case", "{}", 1), ("x ours", "ours_over_this", "{:.2f}", 1)
    columns = (first, *SPEED_COLUMNS, last)
    wide_console(FILE_WIDTH).print(row_table(columns, report.rows, justify="left"))
    return dict(out=report.path, tokens_per_s=report.speeds, ours_over=report.ours_over)


@bench_app.command(
    help_epilogue="Example: qat bench quality speedrun/recipes/quality_tiny.toml --out runs/tiny"
)
def quality(
    recipe: Required[Path],
    /,
    *,
    config: Annotated[QualityConfig, Parameter(name="*")] = QualityConfig(),  # noqa: B008
    out: Required[Path],
) -> dict[str, object]:
    """Train the recipes of RECIPE on one teacher, data and budget, and judge every student.

    The same command again goes on where it stopped.

    Args:
        recipe: TOML file, such as speedrun/recipes/quality_tiny.toml.
        config: settings.
        out: directory for caches, students, runs and results.
    """
    from qat.cli.inputs import check_inputs
    from qat.extensions.lab.quality.plan import read_quality

    check_inputs(models=[read_quality(recipe).teacher], out=out)
    from qat.extensions.lab.quality.run import best, cells, run_quality

    report = run_quality(config, recipe, out)
    title = "Mean +- standard deviation over seeds; KL and KD in nats"
    headings, body = cells(report.lines, report.texts, report.unmade)
    wide_console(QUALITY_WIDTH).print(numbers_table(headings, body, title))
    report.check()
    found, text = best(report.lines), report.texts[0]
    if found is None:
        return dict(out=report.path)
    kl_nats = found.stats[f"kl_nats.{text}"].mean
    return dict(out=report.path, best=found.recipe, kl_nats=_rounded(kl_nats))


@bench_app.command(help_epilogue="Example: qat bench kernels --only lut")
def kernels(
    *,
    config: Annotated[KernelsConfig, Parameter(name="*")] = KernelsConfig(),  # noqa: B008 - frozen
    out: Path | None = None,
) -> dict[str, object]:
    """Put every kernel through its gates: compile, correct, fast; the first that fails is the last.

    Args:
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    from qat.extensions.lab.kernels.run import run_kernels

    report = run_kernels(config, out)
    console = wide_console(KERNELS_WIDTH)
    console.print(row_table(KERNELS_COLUMNS, report.rows))
    for line in _remarks(report):
        console.print(line, markup=False, highlight=False)
    report.check()
    figures = {each["figure"]: each["value"] for each in report.figures()}
    return dict(out=report.path, kernels=len(report.rows), **figures)


@bench_app.command(help_epilogue="Example: qat bench attention --lengths 4096,16384")
def attention(
    *,
    config: Annotated[AttentionConfig, Parameter(name="*")] = AttentionConfig(),  # noqa: B008
    out: Path | None = None,
) -> dict[str, object]:
    """Time one layer's attention, dense and sparse in turns; compiling is reported apart.

    Args:
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    from qat.bench.attention import run_attention

    report = run_attention(config, out)
    console = wide_console(ATTENTION_WIDTH)
    console.print(row_table(ATTENTION_COLUMNS, report.rows))
    for row in report.crossovers:
        since, heads = row["length"], f"{row['heads']}/{row['key_heads']} heads"
        found = "dense is as fast at every length" if since is None else f"faster from {since:,} on"
        line = f"{row['way']}, {row['pass']}, {heads}: {found}"
        console.print(line, markup=False, highlight=False)
    return dict(out=report.path, crossovers=report.crossovers)


def _student(student: str | None, config: BenchConfig) -> str:
    """The student that was named, or the shape in its place.

    Raises:
        ConfigError: both are named.
    """
    if student is None and config.shape is not None:
        logger.info("no student is named: measuring %s with random weights", config.shape)
        return config.shape
    if student is None:
        from qat.backend.device import select

        # a step of 0.6B parameters takes a CPU minutes; a plan for other devices takes none
        is_slow = not config.plan and select(config.device).device.type == "cpu"
        found, other = (CPU_SHAPE, DEFAULT_SHAPE) if is_slow else (DEFAULT_SHAPE, CPU_SHAPE)
        logger.info(
            "no student is named: measuring the shape %s with random weights; for another: "
            "qat bench %s, or qat bench CHECKPOINT",
            found,
            other,
        )
        return found
    if config.shape is not None:
        raise ConfigError(
            f"student={student} beside shape={config.shape}, expected one of them; drop the other"
        )
    return student


def _checked(student: str, config: Measured, out: Path | None) -> Measured:
    """`config` for what `check_inputs` accepts; a student may be the name of a shape."""
    from qat.bench.config import SHAPES, shape_called
    from qat.cli.inputs import check_inputs, with_fitting_loss

    parse_losses(config.loss)
    if "/" not in student and not Path(student).exists():
        shape_called(student)
    models = [] if student.lower() in SHAPES else [student]
    check_inputs(models=models, caches=[config.cache_dir], out=out)
    return with_fitting_loss(config, config.cache_dir)


def _cell(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)


def _remarks(report: "KernelsReport") -> list[str]:
    rates = report.rates
    lines = [
        f"copy {rates.copy_bytes / 1e9:,.0f} GB/s, matmul {rates.matmul_flops / 1e12:,.1f} TFLOP/s"
    ]
    for row in report.rows:
        if row["status"] == "FAILED":
            lines.append(f"{row['case']} failed the gate {row['gate']}: {row['difference']}")
    if report.least is not None:
        lines.append(f"furthest from the roofline: {report.least['case']}")
    for each in report.tuned:
        kernel, best = each.space.kernel, each.adopted
        words = "default stays" if best is None else f"{best.configuration}, {each.ratio:.3f} x"
        lines.append(f"tuned {each.case} ({kernel}): {words}")
    return [*lines, *([report.note] if report.note else [])]


def _findings(report: "BenchReport") -> list[str]:
    timed = [row for row in report.rows if "samples" in row]
    lines = [
        f"data: {timed[0]['data']}; ready after {report.load_s:.1f} s, compiling and warming up "
        f"took {sum(row['warmup_s'] for row in timed):.1f} s more, both outside the clock"
    ]
    if compiled := [row["step_compile_s"] for row in timed if "step_compile_s" in row]:
        lines.append(f"compiling the steps alone took {sum(compiled):.1f} s")
    if any(row["peak_gib"] is None for row in timed):
        lines.append("memory: a dash where the device's runtime does not say what a step holds")
    for row in timed:
        lines += [f"batch {row['batch_size']}: {word}" for word in row["fallbacks"]]
    if report.fit:
        lines.append(
            f"cost of a step: {report.fit.fixed_s:.4g} s fixed, then "
            f"{report.fit.marginal_tokens_per_s:,.0f} t/s (within {report.fit.worst_error:.1%})"
        )
    if search := report.search:
        told = ""
        if search.model:
            told = (
                f", {search.predicted} predicted from {search.model.fixed_gib:.3f} GiB + "
                f"{search.model.per_sequence_gib:.3g} GiB a sequence"
            )
        lines.append(f"largest batch: {search.largest} measured{told}")
        speeds = search.confirmed
        gain = speeds[search.fastest] / speeds[search.largest] - 1
        told = "the largest" if search.fastest == search.largest else f"{gain:.1%} faster"
        # what a trial of two steps ranks first may be slower than the largest over all steps
        full = (
            f"{size} {'out of memory' if speed is None else f'at {speed:,.0f} t/s'}"
            for size, speed in search.confirmed.items()
        )
        lines.append(
            f"fastest batch: {search.fastest} ({told}); {len(search.trials)} sizes tried, "
            f"{len(search.confirmed)} timed in full: {', '.join(full)}"
        )
    return lines


def _predicted(
    predictions: "Sequence[DevicePrediction]", planned: "Sequence[Planned]", how: str = ""
) -> "Table":
    """`how` the predictions were made."""
    from rich.table import Table

    titles = ("dtype", "Checkpointing", "Max batch", "Memory", "t/s", "How")
    table = Table("Device", *titles, title="PREDICTED, not measured")
    for found in predictions:
        batch, peak = _cell(found.max_batch, "{:,}"), _cell(found.peak_gib, "{:.1f} GiB")
        low, high = found.tokens_per_s_range
        speed = f"{found.tokens_per_s:,.0f}"
        if low < high:
            speed += f" ({low:,.0f} to {high:,.0f})"
        recomputes = "yes" if found.recomputes else "no"
        table.add_row(found.device, found.dtype, recomputes, batch, peak, speed, how)
    for tpu in planned:
        needed = tpu.best.peak_gib if tpu.best else tpu.trials[0].needed_gib
        memory = f"{_cell(needed, '{:.1f}')} of {tpu.memory_gib:.1f} GiB"
        recomputes = "yes" if tpu.gradient_checkpointing else "no"
        batch = f"{tpu.max_batch:,}"
        table.add_row(tpu.device, tpu.dtype, recomputes, batch, memory, "-", "compiled")
    return table


def _planned(planned: "Sequence[Planned]") -> list[dict[str, object]]:
    """The largest batch of each TPU, for the last line."""
    return [
        {
            "device": tpu.device,
            "gradient_checkpointing": tpu.gradient_checkpointing,
            "max_batch": tpu.max_batch,
            "peak_gib": _rounded(tpu.best.peak_gib) if tpu.best else None,
        }
        for tpu in planned
    ]


def _summary(report: "BenchReport") -> dict[str, object]:
    """The fastest row's numbers, and what was searched for."""
    timed = [row for row in report.rows if "samples" in row]
    if not timed:  # a plan where the student has no room
        return {"out": report.path}
    best = max(timed, key=lambda row: row["tokens_per_s"])
    summary = {name: _rounded(best[name]) for name in SUMMARY}
    if report.search:
        summary["max_batch"] = report.search.largest
        summary["fastest_batch"] = report.search.fastest
        summary["predicted_max_batch"] = report.search.predicted
    return dict(out=report.path, **summary)


def _rounded(value: object) -> object:
    return float(f"{value:.{SUMMARY_DIGITS}g}") if isinstance(value, float) else value
