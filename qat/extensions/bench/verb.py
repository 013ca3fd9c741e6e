"""`qat bench`: how fast a training step is, how large it can be, and what others would take."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import App, Parameter

from qat.cli.parser import OTHERS
from qat.cli.tables import row_table, wide_console
from qat.errors import ConfigError
from qat.extensions.bench.config import (
    CPU_SHAPE,
    DEFAULT_SHAPE,
    AttentionConfig,
    BenchConfig,
    MeasureConfig,
    SweepConfig,
)
from qat.hooks import extension
from qat.losses.config import parse_losses
from qat.models.attention import load_sparse_attention, read_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from qat.extensions.bench.run import BenchReport, DevicePrediction, Planned

logger = logging.getLogger(__name__)

Measured = TypeVar("Measured", bound=MeasureConfig)
SUMMARY = (
    *("batch_size", "step_s", "tokens_per_s", "mfu_frac", "mfu_of_matmul_frac", "peak_gib"),
    "peak_reserved_gib",
)
LIKE_SUMMARY = ("run_tokens_per_s", "run_mfu_frac", "real_run_over_bench")
LIKE_PARTS = (  # where the seconds of a step of the run went
    ("run_step_s", "in all"),
    ("run_step_s_p50", "in the median"),
    ("run_data_wait_s", "waiting for its batches"),
    ("run_rollout_s", "in rollouts, which are not timed here"),
)
SUMMARY_DIGITS = 6
FILE_WIDTH, ATTENTION_WIDTH, SWEEP_WIDTH = 120, 130, 240  # columns where output goes to a file
SPEED_COLUMNS = (  # the reference's columns, MFU beside them
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

bench_app = App(
    name="bench",
    help="Measure the training step of a student.",
    help_format="markdown",
    help_epilogue="Example: qat bench qwen3-0.6b --find-max-batch",
    group_parameters=OTHERS,
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
    if config.like is not None:
        report = _like(student, config, config.like, out)
    else:
        student = _student(student, config)
        config = checked(student, config, out)
        from qat.backend.device import select
        from qat.extensions.bench.run import run_bench

        if config.tpus and config.planned is None:
            path, planned = extension("qat.plans", "tpu").run_tpu_plan(config, student, out)
            wide_console(FILE_WIDTH).print(_predicted((), planned))
            found = [{k: rounded(v) for k, v in tpu.summary().items()} for tpu in planned]
            return dict(out=path, planned=found)
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


@bench_app.command(
    help_epilogue="Example: qat bench sweep speedrun/recipes/sweep_runbook.toml --tiny"
)
def sweep(
    recipe: Path,
    /,
    *,
    config: Annotated[SweepConfig, Parameter(name="*")] = SweepConfig(),  # noqa: B008 - frozen
    out: Path | None = None,
) -> dict[str, object]:
    """Run the groups of RECIPE in turns, each repeat a process of its own, and compare them.

    The same command again goes on where it stopped.

    Args:
        recipe: TOML file, such as speedrun/recipes/sweep_runbook.toml.
        config: settings.
        out: directory for rows, logs and results; by default runs/sweep/NAME of the recipe.
    """
    return extension("qat.sweeps", "lab")(config, recipe, out)


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
    path, rows, crossovers = load_sparse_attention().run_benchmark(config, out)
    console = wide_console(ATTENTION_WIDTH)
    console.print(row_table(ATTENTION_COLUMNS, rows))
    for row in crossovers:
        since, heads = row["length"], f"{row['heads']}/{row['key_heads']} heads"
        found = "dense is as fast at every length" if since is None else f"faster from {since:,} on"
        line = f"{row['way']}, {row['pass']}, {heads}: {found}"
        console.print(line, markup=False, highlight=False)
    return dict(out=path, crossovers=crossovers)


def _like(student: str | None, config: BenchConfig, run: Path, out: Path | None) -> "BenchReport":
    from qat.cli.inputs import check_inputs
    from qat.extensions.bench.like import time_like

    if student is not None:
        raise ConfigError(
            f"student={student} beside like={run}, which has its own, expected one; drop the other"
        )
    check_inputs(out=out)
    return time_like(config, run, out)


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


def checked(student: str, config: Measured, out: Path | None) -> Measured:
    """`config` for what `check_inputs` accepts; a student may be the name of a shape."""
    from qat.cli.inputs import check_inputs, with_fitting_loss
    from qat.extensions.bench.config import SHAPES, shape_called

    parse_losses(config.loss)
    if config.attention is not None:
        read_attention(config.attention)
    if "/" not in student and not Path(student).exists():
        shape_called(student)
    models = [] if student.lower() in SHAPES else [student]
    check_inputs(models=models, caches=[config.cache_dir], out=out)
    return with_fitting_loss(config, config.cache_dir)


def _cell(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)


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
    for row in report.rows:
        notes = [*row.get("fallbacks", ()), *filter(None, [row.get("error")])]
        lines += [f"batch {row['batch_size']}: {note}" for note in notes]
        if "like" in row:
            known = [(row[name], what) for name, what in LIKE_PARTS if row[name] is not None]
            parts = ", ".join(f"{seconds:.4g} s {what}" for seconds, what in known)
            speed, outside = f"{row['run_tokens_per_s']:,.0f} t/s", f"{row['run_outside_frac']:.1%}"
            mfu, ratio = _cell(row["run_mfu_frac"], "{:.3f}"), row["real_run_over_bench"]
            lines += [
                f"{row['like']} logged {speed} (MFU {mfu}), {ratio:.3f} of that",
                f"a step took it {parts}; evaluations and saves took {outside} of its time",
            ]
    if report.fit:
        lines.append(
            f"cost of a step: {report.fit.fixed_s:.4g} s fixed, then "
            f"{report.fit.marginal_tokens_per_s:,.0f} t/s (within {report.fit.worst_error:.1%})"
        )
    if search := report.search:
        told = ""
        if search.predicted is not None:
            told = (
                f", {search.predicted} predicted from {search.model.fixed_gib:.3f} GiB + "
                f"{search.model.per_sequence_gib:.3g} GiB a sequence"
            )
        lines.append(f"largest batch: {search.largest} measured{told}")
        speeds = search.confirmed
        gain = speeds[search.fastest] / speeds[search.largest] - 1
        told = "the largest" if search.fastest == search.largest else f"{gain:.1%} faster"
        # what a trial of two steps ranks first may be slower than the largest over more steps
        full = (
            f"{size} {'out of memory' if speed is None else f'at {speed:,.0f} t/s'}"
            for size, speed in search.confirmed.items()
        )
        lines.append(
            f"fastest batch: {search.fastest} ({told}); {len(search.trials)} sizes tried, "
            f"{len(search.confirmed)} timed again: {', '.join(full)}"
        )
    return lines


def _predicted(
    predictions: "Sequence[DevicePrediction]", planned: "Sequence[Planned]", how: str = ""
) -> "Table":
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
        table.add_row(*tpu.cells())
    return table


def _summary(report: "BenchReport") -> dict[str, object]:
    timed = [row for row in report.rows if "samples" in row]
    if not timed:  # a plan where the student has no room
        return {"out": report.path}
    best = max(timed, key=lambda row: row["tokens_per_s"])
    summary = {name: rounded(best[name]) for name in (*SUMMARY, *LIKE_SUMMARY) if name in best}
    if report.search:
        summary["max_batch"] = report.search.largest
        summary["fastest_batch"] = report.search.fastest
        summary["predicted_max_batch"] = report.search.predicted
    return dict(out=report.path, **summary)


def rounded(value: object) -> object:
    """Return a number with the digits of the last line; other values as they are."""
    return float(f"{value:.{SUMMARY_DIGITS}g}") if isinstance(value, float) else value
