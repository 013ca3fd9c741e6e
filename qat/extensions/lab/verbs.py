"""The lab's verbs of `qat bench`, added by the entry point `lab` of the group `qat.verbs`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from qat.cli.parser import print_result
from qat.cli.tables import numbers_table, row_table, wide_console
from qat.config import Required
from qat.errors import ConfigError
from qat.extensions.bench.verb import FILE_WIDTH, SPEED_COLUMNS, checked, rounded
from qat.extensions.lab.config import (
    ARCHITECTURES,
    BaselinesConfig,
    GgufConfig,
    KernelsConfig,
    QualityConfig,
    TargetsConfig,
)
from qat.files import described

if TYPE_CHECKING:
    from rich.table import Table

    from qat.extensions.lab.compare import Comparison, Pair
    from qat.extensions.lab.kernels.run import KernelsReport
    from qat.extensions.lab.kernels.token_tiles import TunedToken

KERNELS_WIDTH, COMPARE_WIDTH, QUALITY_WIDTH, GGUF_WIDTH, TARGETS_WIDTH = 220, 150, 400, 170, 230
"""Columns of a table where output goes to a file."""
RUN_FILES = "export/gguf/*.gguf"
"""The place of a GGUF file in the directory of `qat run`."""
RECORDS = Path("speedrun/records")
US = 1e6
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
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
    ("Rounds", "rounds", "{}", 1),
    ("Registers", "registers", "{}", 1),
    ("Spilled", "spilled_bytes", "{}", 1),
    ("Shared", "shared_bytes", "{:,}", 1),
    ("DRAM", "ncu_dram_frac", "{:.2f}", 1),
    ("Tensor cores", "ncu_tensor_frac", "{:.2f}", 1),
    ("Warps", "ncu_warps_frac", "{:.2f}", 1),
    ("Status", "status", "{}", 1),
)
GGUF_COLUMNS = (
    ("File", "case", "{}", 1),
    ("MB", "megabytes", "{:,.1f}", 1),
    ("bits, all weights", "bits_per_weight", "{:.2f}", 1),
    ("KL, nats", "kl_nats", "{:.4f}", 1),
    ("+-", "kl_stderr_nats", "{:.4f}", 1),
    ("p99", "kl_p99_nats", "{:.3f}", 1),
    ("top-1 %", "top1_frac", "{:.2f}", 100),
    ("flips %", "flips_frac", "{:.2f}", 100),
    ("perplexity", "ppl", "{:.3f}", 1),
    ("teacher's", "teacher_ppl", "{:.3f}", 1),
    ("x best", "over_best", "{:.3f}", 1),
    ("best at no more MB", "best", "{}", 1),
)


def baselines(
    student: Required[str],
    *,
    config: Annotated[BaselinesConfig, Parameter(name="*")] = BaselinesConfig(),  # noqa: B008
    out: Path | None = None,
) -> dict[str, object]:
    """Time other methods that train the same layers on the same data, in turns with ours.

    Args:
        student: packed checkpoint or shape, as for 'qat bench'.
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    config = checked(student, config, out)
    from qat.extensions.lab.baselines.run import run_baselines

    path, rows = run_baselines(config, student, out)
    first, last = ("Case", "case", "{}", 1), ("x ours", "ours_over_this", "{:.2f}", 1)
    columns = (first, *SPEED_COLUMNS, last)
    wide_console(FILE_WIDTH).print(row_table(columns, rows, justify="left"))
    speeds, ours_over = (
        {row["case"]: row[name] for row in rows if name in row}
        for name in ("tokens_per_s", "ours_over_this")
    )
    return dict(out=path, tokens_per_s=speeds, ours_over=ours_over)


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
    return dict(out=report.path, best=found.recipe, kl_nats=rounded(kl_nats))


def kernels(
    *,
    config: Annotated[KernelsConfig, Parameter(name="*")] = KernelsConfig(),  # noqa: B008 - frozen
    out: Path | None = None,
) -> dict[str, object]:
    """Put every kernel through its gates: compile, correct, resources, fast, until one fails.

    Args:
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    from qat.extensions.lab.compare import compare_kernels, read_cases
    from qat.extensions.lab.kernels.run import run_kernels

    if config.beat is not None:
        read_cases(config.beat)  # a mistake in it is told before the minutes that follow
    report = run_kernels(config, out)
    console = wide_console(KERNELS_WIDTH)
    console.print(row_table(KERNELS_COLUMNS, report.rows))
    for line in _kernels_remarks(report):
        console.print(line, markup=False, highlight=False)
    report.check()
    if config.beat is not None:
        found = compare_kernels(config.beat, report.path, config.gain)
        verdict = ("faster", f"not faster by {config.by}", "not comparable")[found.beats_code]
        _end_comparison(found, verdict, found.beats_code)
    figures = {each["figure"]: each["value"] for each in report.figures()}
    return dict(out=report.path, kernels=len(report.rows), **figures)


def _kernels_remarks(report: "KernelsReport") -> list[str]:
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
    if report.token is not None:
        lines += _token_remarks(report.token)
    return [*lines, *([report.note] if report.note else [])]


def _token_remarks(token: "TunedToken") -> list[str]:
    from qat.extensions.lab.kernels.token_tiles import name_of

    times = (
        f"{name} {1e3 * each.median_s:.4f} ms ({each.ratio.median:.3f} x, "
        f"{each.ratio.low:.3f} to {each.ratio.high:.3f})"
        for name, each in token.times.items()
    )
    lines = [f"token of {token.shape}: {'; '.join(times)}"]
    for site, tile in token.entries().items():
        words = "default stays" if tile is None else str(tile)
        lines.append(f"tuned within the token ({name_of(site)}): {words}")
    return [*lines, *(f"refused within the token: {x}: {why}" for x, why in token.refused.items())]


def targets(
    *,
    config: Annotated[TargetsConfig, Parameter(name="*")] = TargetsConfig(),  # noqa: B008 - frozen
) -> dict[str, object]:
    """Compile every kernel for GPUs that are not here: registers / spilled bytes / shared KiB.

    A kernel that the package chooses on a GPU where it does not compile or fit is an error.

    Args:
        config: settings.
    """
    from qat.extensions.lab.kernels.targets import run_targets

    report = run_targets(config)
    names = (name for name in ARCHITECTURES if name in config.architectures)
    columns = (("Kernel", "case", "{}", 1), *((name, name, "{}", 1) for name in names))
    last = ("Elsewhere", "fallback", "{}", 1)
    wide_console(TARGETS_WIDTH).print(row_table((*columns, last), report.rows()))
    report.check()
    figures = {each["figure"]: each["value"] for each in report.figures()}
    return dict(kernels=len(report.kernels), **figures)


def compare(
    before: Path,
    after: Path,
    /,
    *,
    threshold: Annotated[float, Parameter(validator=Number(gte=0))] = 0.03,
) -> None:
    """Compare AFTER with BEFORE case by case; exit 0 same or faster, 1 slower, 2 not comparable.

    A case is slower if its median is by more than the threshold and the 95 % intervals of both
    medians share nothing.

    Args:
        before: results.jsonl, a directory of results, or a record.
        after: the same of what is judged.
        threshold: share of the first median that a difference must exceed.
    """
    from qat.extensions.lab.compare import compare_files

    found = compare_files(before, after, threshold)
    verdict = ("same", "regression", "not comparable")[found.exit_code]
    _end_comparison(found, verdict, found.exit_code)


def _end_comparison(found: "Comparison", verdict: str, exit_code: int) -> None:
    """Print a comparison and end with its exit code."""
    console = wide_console(COMPARE_WIDTH)
    console.print(comparison_table(found))
    for line in remarks(found):
        console.print(line, markup=False, highlight=False)
    differences = {pair.name: pair.difference for pair in found.pairs if pair.difference}
    last_line = {
        "verdict": verdict,
        "cases": {pair.name: pair.verdict for pair in found.pairs},
        "ratios": {name: round(each.ratio, 4) for name, each in differences.items()},
        "between_cases": found.between_cases,
        "between_runs": found.between_runs,
    }
    print_result(last_line)
    raise SystemExit(exit_code)


def comparison_table(found: "Comparison") -> "Table":
    """A row a case: both medians with their intervals, what lies between them, the verdict."""
    from rich.table import Table

    table = Table("Case", title="Medians with 95 % intervals; above 1 is slower")
    for heading in ("Before", "After", "Ratio", "Effect", "p", "CV before", "CV after"):
        table.add_column(heading, justify="right")
    table.add_column("Verdict")
    for pair in found.pairs:
        table.add_row(pair.name, *_cells(pair))
    return table


def remarks(found: "Comparison") -> list[str]:
    """Return lines about noise and hosts, without which the table cannot be judged."""
    cases, runs = found.between_cases, found.between_runs
    noise = "not known: no case has two runs" if runs is None else f"{runs:.1%}"
    lines = [
        f"variation between cases {cases:.1%}; between runs of one case {noise} "
        f"({found.hosts} host{'s' if found.hosts > 1 else ''})"
    ]
    if found.is_single_run:
        lines.append(
            "fewer than 3 runs a side: an interval holds for those runs, not for the next; measure "
            "in turns, or repeat the command"
        )
    for name, (before, after) in found.settings.items():
        lines.append(f"differs in {name}: {before} and {after}")
    lines += [f"only before: {name}" for name in found.gone]
    return lines + [f"only after: {name}" for name in found.new]


def _cells(pair: "Pair") -> list[str]:
    if pair.difference is None:
        return ["-"] * 7 + [f"not comparable ({pair.reason})"]
    found = pair.difference
    # the unit that gives the first median a number of at least 1
    scale, unit = next((each for each in UNITS if found.before.median >= each[0]), UNITS[-1])
    medians = [
        f"{each.median / scale:.4g} [{each.low / scale:.4g}, {each.high / scale:.4g}] {unit}"
        for each in (found.before, found.after)
    ]
    return [
        *medians,
        f"{found.ratio:.3f}",
        f"{found.effect:+.2f}",
        f"{found.p:.2g}",
        f"{pair.before.within_runs:.1%}",
        f"{pair.after.within_runs:.1%}",
        found.verdict,
    ]


def record(
    slug: str,
    /,
    *,
    from_: Annotated[Path, Parameter(name="--from")],
    records: Path = RECORDS,
    date: str = "",
) -> dict[str, object]:
    """Freeze a result into RECORDS/DATE_SLUG: recipe, raw samples, environment, figures, page.

    Args:
        slug: two or three lower-case words, joined by hyphens.
        from_: directory of results; every case needs three samples or runs at least.
        records: where records are kept.
        date: day of the measurement as YYYY-MM-DD; today by default.
    """
    from qat.extensions.lab.compare import write_record

    return {"record": write_record(slug, from_, records, date or None)}


def gguf(
    teacher: Required[str],
    /,
    *files: Path,
    against: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    config: Annotated[GgufConfig, Parameter(name="*")] = GgufConfig(),  # noqa: B008 - frozen
    out: Path | None = None,
) -> dict[str, object]:
    """Run TEACHER and FILES in llama.cpp: KL, top-1, flips and perplexity beside MB.

    Args:
        teacher: float model that the files come from: directory, hub id or GGUF file.
        files: GGUF files to judge, or the directories of an export or of `qat run` that hold them.
        against: GGUF files to compare them with: each of FILES with the best of these at no more
            MB.
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    from qat.cli.inputs import check_inputs

    if not files:
        raise ConfigError(
            "FILES is missing, expected at least one GGUF file; for example: qat bench gguf "
            "TEACHER exports/q2/model.gguf --text TEXT"
        )
    if (config.text is None) == (config.cache_dir is None):
        raise ConfigError(
            f"text={config.text} beside cache_dir={config.cache_dir}, expected one of them; give "
            "--text FILE or --cache-dir CACHE"
        )
    judged, others = [*map(gguf_file, files)], [*map(gguf_file, against or ())]
    check_inputs(models=[teacher], caches=[config.cache_dir], texts=[config.text], out=out)
    from qat.extensions.lab.gguf_files import run_gguf

    report = run_gguf(config, teacher, judged, others, out=out)
    wide_console(GGUF_WIDTH).print(row_table(GGUF_COLUMNS, report.rows))
    kl_nats = {row["case"]: rounded(row["kl_nats"]) for row in report.rows}
    ratios = {name: rounded(ratio) for name, ratio in report.ratios.items()}
    return dict(out=report.path, kl_nats=kl_nats, over_best=ratios)


def gguf_file(path: Path) -> Path:
    """Return the GGUF file `path`, or the one in the directory of an export or of `qat run`.

    Raises:
        ConfigError: there is none, or it is not clear which one is meant.
    """
    if path.is_file():
        return path
    found = next(filter(None, (sorted(path.glob(form)) for form in ("*.gguf", RUN_FILES))), [])
    if len(found) == 1:
        return found[0]
    held = f"holds {len(found)} GGUF files" if found else described(path)
    raise ConfigError(
        f"{path} {held}, expected a GGUF file or a directory that holds one; name one, such as "
        f"{found[0] if found else 'exports/q2/model.gguf'}"
    )


VERBS = {
    baselines: "qat bench baselines tiny --only ours,plain-eager",
    quality: "qat bench quality speedrun/recipes/quality_tiny.toml --out runs/tiny",
    kernels: "qat bench kernels --only matvec",
    targets: "qat bench targets --only sm_75",
    compare: "qat bench compare runs/bench/BEFORE runs/bench/AFTER",
    record: "qat bench record two-words --from runs/bench/TIME",
    gguf: "qat bench gguf Qwen/Qwen3-0.6B exports/q2/model.gguf --text held_out.txt",
}
"""The verbs, each with the example that ends its help."""


def add(bench: App) -> None:
    """Add the verbs to `qat bench`."""
    for verb, example in VERBS.items():
        bench.command(verb, help_epilogue=f"Example: {example}")
