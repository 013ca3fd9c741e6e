"""`qat convert`: float weights to look-up tables, or to smaller ones; dense attention to sparse."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, Token
from cyclopts import convert as coerce

from qat.cli.export import show_lacks, show_targets
from qat.config import Formats, Judged, Required
from qat.convert.config import FLOAT, ConvertConfig, check_asked
from qat.errors import ConfigError
from qat.export.config import TargetName
from qat.files import check_free
from qat.hooks import extension
from qat.quant.spec import name_in_layer

if TYPE_CHECKING:
    from rich.table import Table

    from qat.convert.bits_budget import BudgetReport, FormatTrial
    from qat.convert.forecast import Forecast
    from qat.convert.importing import ImportReport
    from qat.convert.quantize import ModuleReport, QuantizeReport
    from qat.convert.savings import Saving
    from qat.logs import Terminal
    from qat.models.sizes import Sizes

Foreign = Literal["anemll"]  # projects whose checkpoints `--from` imports
# the settings of `qat convert` that an import reads, or what keeps the weights of its source
MEANT = {"from": {"base"}, "keep": {"keep", "embedding_bits"}, "snap": {"snap"}}


TABLES = ("embedding and head", "embedding", "head")
"""Parts of a file that `--embedding-bits` is about."""
MUCH_OF_A_WEIGHT = 0.2
"""Relative error of a linear from which on it is worth a line that nothing was fitted to inputs: 2
bits have about 0.3, 4 have 0.07."""


def _names(_: object, tokens: Sequence[Token]) -> tuple[TargetName, ...]:
    """`a,b` as well as `a` and `b`, each given with a flag of its own."""
    words = [word for token in tokens for word in token.value.split(",")]
    return tuple(coerce(tuple[TargetName, ...], list(dict.fromkeys(words))))


Targets = Annotated[
    tuple[TargetName, ...],
    Parameter(name="--for", negative=(), converter=_names, show_default=False),
]


def convert(
    source: Required[str],
    *,
    config: Annotated[ConvertConfig, Parameter(name="*")] = ConvertConfig(),  # noqa: B008 - frozen
    out: Required[Path],
    evaluate: Judged[Annotated[bool, Parameter(name="--eval", negative=())]] = False,
    cache_dir: Judged[Path | None] = None,
    from_: Formats[Annotated[Foreign | None, Parameter(name="--from")]] = None,
    targets: Formats[Targets] = (),
    dry_run: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, object]:
    """Quantize SOURCE, or change its attention, without training; write a checkpoint.

    Args:
        source: Hub id or directory of a float or packed model; with --from a .pt file or its
            directory.
        config: Settings.
        out: Checkpoint directory to make.
        evaluate: Print KD, KL and perplexity before and after, on a cache's held-out split.
        cache_dir: The cache to evaluate on.
        from_: SOURCE is a checkpoint of Anemll/qwen3_apple_style_2bit_qat_lora, to be kept as it
            is; --base names the float model that it was made from.
        targets: What the student is to be exported to, one or several, joined by commas: formats
            become what all of them hold without loss.
        dry_run: Say how large the student will be, how long it takes, how much memory, and which
            targets hold it; nothing is written.
    """
    if from_ is not None or config.kept:
        _check_kept(config, from_, {"--dry-run": dry_run, "--for": targets, "--eval": evaluate})
    if from_ is not None:
        report = convert_foreign(source, config, out, importer=from_)
        return {**report, "ships_to": show_targets(out)}
    if evaluate and cache_dir is None:
        raise ConfigError("--eval is given without a cache to judge by; add --cache-dir DIR")
    if cache_dir is not None and not evaluate:
        raise ConfigError(
            "--cache-dir is given without --eval, expected both to judge the result; add --eval, "
            "or give the cache to --calibration to fit the weights to it"
        )
    from qat.cli.inputs import check_inputs

    if not config.kept:
        check_asked(config)
    check_inputs(
        models=[source, config.base],
        caches=[cache_dir],
        calibration=config.calibration,
        out=out,
    )
    check_free(out)
    if dry_run:
        return forecast_conversion(source, config, targets)
    from qat.convert.checkpoint import convert_checkpoint
    from qat.evaluate.config import EvalConfig
    from qat.evaluate.judge import judge
    from qat.export.targets import shipping_to

    verdicts, exam = {}, EvalConfig(cache_dir=cache_dir, device=config.device)
    if evaluate:
        verdicts["before"] = judge(source, exam).cached._asdict()
    if config.kept:
        report = extension("qat.keepers", config.kept)(source, out, config)
    else:
        report = convert_checkpoint(source, config, out, shipping_to(targets)).of_file()
    if evaluate:
        verdicts["after"] = judge(str(out), exam).cached._asdict()
    sizes = _sizes(report, source)
    _warn(sizes, report, config, targets)
    _show(report, verdicts)
    ships = [] if math.isnan(report.linear_bits) else show_targets(out)
    _show_parts(sizes, report, f"{report.plan}, {report.seconds:.1f} s: ")
    budget = report.budget
    spending = budget and dict(
        bits_budget=budget.bits_budget,
        budget_bits_per_weight=round(budget.bits_per_weight, 4),
        predicted_kl_nats=round(budget.predicted_kl_nats, 6),
        seconds_to_choose=round(budget.seconds, 2),
    )
    return dict(
        out=out,
        plan=report.plan,
        attention=config.attention,
        activations=report.activations,
        linears=len(report.modules) - report.num_tables,
        tables=report.num_tables,
        kept=report.kept,
        **sizes.rounded(),
        savings=_rounded(report.savings),
        kv_bytes_per_token=report.kv and report.kv.bytes_per_token,
        **(spending or {}),
        seconds=round(report.seconds, 2),
        ships_to=ships,
        **verdicts,
    )


def _check_kept(config: ConvertConfig, from_: Foreign | None, others: dict[str, object]) -> None:
    """Refuse settings that have no meaning where the weights of the source are kept.

    Raises:
        ConfigError: the first one that is given.
    """
    how = config.kept if from_ is None else "from"
    given = [word for word, value in others.items() if value]
    given += [f"{n}={getattr(config, n)}" for n in sorted(config.model_fields_set - MEANT[how])]
    if given:
        raise ConfigError(
            f"{given[0]} is given with --{how}, which keeps weights and sizes of the source as "
            "they are; drop it, and convert or judge the result in a second step"
        )


def forecast_conversion(
    source: str, config: ConvertConfig, targets: Sequence[TargetName] = ()
) -> dict[str, object]:
    """Show what converting `source` would make and take, and return it; nothing is written.

    The calibration text need not be there yet.

    Raises:
        ConfigError, CheckpointError, ExportError: what the conversion itself would refuse.
    """
    from qat.convert.forecast import forecast
    from qat.export.targets import shipping_to

    found = forecast(source, config, shipping_to(targets))
    _warn(found.sizes, found, config, targets)
    shown = show_forecast(found, found.minutes, found.memory_gib)
    if found.parts:
        _show_parts(found.sizes, found)
    return shown


def show_forecast(
    found: "Forecast", minutes: float, memory_gib: float, **counts: int
) -> dict[str, object]:
    """Show what a conversion, or all of `qat run`, will make and take, and return it.

    `counts` are further columns of the table.
    """
    from rich.table import Table

    from qat.export.targets import model_ships_to
    from qat.logs import Terminal, duration
    from qat.models.sizes import SIZE_COLUMNS
    from qat.models.stored_state import quantized_modules

    is_quantized = bool(quantized_modules(found.model))  # or nothing is exported
    table = Table(*SIZE_COLUMNS, *counts, "time, about", "memory, about")
    taken = (duration(60 * minutes), f"{memory_gib:.1f} GiB")
    table.add_row(*found.sizes.cells(), *(f"{n:,}" for n in counts.values()), *taken)
    Terminal().print(table)
    return {
        **found.sizes.rounded(),
        **counts,
        "minutes": round(minutes, 1),
        "memory_gib": round(memory_gib, 2),
        "savings": _rounded(found.savings),
        "ships_to": show_lacks(model_ships_to(found.model)) if is_quantized else [],
    }


def _warn(
    sizes: "Sizes",
    found: "QuantizeReport | Forecast",
    config: ConvertConfig,
    targets: Sequence[TargetName],
) -> None:
    """Say at the top that a student is larger than its source, by which flag, and what helps."""
    from qat.convert.tables import FLOAT_BITS
    from qat.export.targets import load_target
    from qat.logs import Terminal

    if config.to in (None, FLOAT) and config.bits_budget is None and not config.kept:
        return  # nothing was to be quantized
    asked = f"--bits-budget {config.bits_budget}" if config.to is None else f"--to {config.to}"
    asked = f"--{config.kept}" if config.kept else asked
    reason = f"{asked} leaves as many bits as the source has"
    floats = [part for part in found.parts if part.name in TABLES and part.bits >= FLOAT_BITS]
    if floats:
        unable = [name for name in targets if not load_target(name).HOLDS_TABLES]
        why = f"--for {unable[0]}, which holds no others," if unable else asked
        why = "--embedding-bits 16" if config.embedding_bits == FLOAT_BITS else why
        size = sum(part.megabytes for part in floats)
        reason = f"{why} keeps embedding and head in floating point, {size:.1f} MB"
    helps = [f"{each.flag} saves {each.megabytes:.1f} MB" for each in found.savings]
    warning = sizes.warning("; ".join([reason, *helps]))
    if warning is not None:
        Terminal().print(warning, style="bold red", highlight=False, soft_wrap=True)


def _rounded(savings: "Sequence[Saving]") -> dict[str, float]:
    return {saving.flag: round(saving.megabytes, 3) for saving in savings}


def _sizes(report: "QuantizeReport", source: str) -> "Sizes":
    from qat.models.sizes import Sizes, source_megabytes

    return Sizes(
        source_megabytes=source_megabytes(source),
        megabytes=report.megabytes,
        bits_per_weight=report.bits_per_weight,
        linear_bits=report.linear_bits,
    )


def _show_parts(sizes: "Sizes", found: "QuantizeReport | Forecast", title: str = "") -> None:
    """Show what takes how many MB, and below the sum what one more flag would save."""
    from rich.table import Table

    from qat.logs import Terminal

    source, megabytes, bits, linear = sizes.cells()
    became = "" if source == "-" else f"{source} MB become "
    table = Table(title=f"{title}{became}{megabytes} MB")
    for name in ("", "million weights", "MB", "bits per weight"):
        table.add_column(name, justify="right" if name else "left")
    weights = sum(part.num_weights for part in found.parts) / 1e6
    others = sum(part.megabytes for part in found.parts if not part.num_weights)
    for part in found.parts:
        count, own = "", ""
        if part.num_weights:
            count, own = f"{part.num_weights / 1e6:.2f}", f"{part.bits:.3f}"
        table.add_row(part.name, count, f"{part.megabytes:.2f}", own)
    table.add_section()
    table.add_row("all weights", f"{weights:.2f}", f"{sizes.megabytes - others:.2f}", bits)
    if linear != "-":
        table.add_row("quantized linears alone", "", "", linear)
    if others:
        table.add_row("the whole file", "", f"{sizes.megabytes:.2f}")
    table.add_section()
    for saving in found.savings:
        left = sizes.megabytes - saving.megabytes
        saved = f"{saving.flag} saves {saving.megabytes:.2f}"
        table.add_row(saved, "", f"{left:.2f}", f"{8 * (left - others) / weights:.3f}")
    Terminal().print(table)


def _show(report: "QuantizeReport", verdicts: dict[str, dict]) -> None:
    from rich.table import Table

    from qat.logs import Terminal

    console = Terminal()
    if report.modules:
        formats = _formats(report.modules)
        if report.file is not None:
            formats.caption = f"bits: in the packed checkpoint; {formats.caption}"
        console.print(formats)
    for kind, count in report.activations.items():
        console.print(f"inputs of {count} linears and heads are quantized: {kind}")
    unfitted = [m.relative_error for m in report.modules if m.weighted_error is None]
    if max(unfitted, default=0.0) > MUCH_OF_A_WEIGHT:
        console.print(
            "without --calibration so few bits make a student that says little of sense until it "
            "is trained; fitted to a text's inputs it begins far closer: --calibration CACHE"
        )
    if report.budget is not None:
        _show_budget(report.budget, console)
    if report.kv is not None:
        console.print(
            f"keys and values in {report.kv.bits} bits: {report.kv.bytes_per_token:,} bytes a "
            f"token, {report.kv.bf16_frac:.3f} of bfloat16's"
        )
    if report.kept:
        console.print(f"{report.kept} linears and tables had their format already and were kept")
    if verdicts:
        table = Table("held-out", "KD (nats)", "KL with tail (nats)", "top-1", "perplexity")
        for when, found in verdicts.items():
            keys = ("kd_nats", "kl_tail_nats", "top1_frac", "ppl")
            table.add_row(when, *("" if found[k] is None else f"{found[k]:.4f}" for k in keys))
        console.print(table)


def _formats(modules: "Sequence[ModuleReport]") -> "Table":
    from statistics import fmean

    from rich.table import Table

    table = Table(caption="error: the mean over layers; each weight's is in convert_report.json")
    table.add_column("weights", overflow="fold")  # numbers are never cut for it
    has_outputs = any(module.weighted_error is not None for module in modules)
    for name in ("", "format", "bits", "error", *["outputs'"] * has_outputs, "worst"):
        table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    for (name, form), alike in _kinds(modules).items():
        outputs = [m.weighted_error for m in alike if m.weighted_error is not None]
        worst = max(alike, key=lambda module: module.weighted_error or module.relative_error)
        places = re.findall(r"\.(\d+)\.", worst.name)
        table.add_row(
            name,
            str(len(alike)),
            form,
            f"{fmean(module.bits_per_weight for module in alike):.3f}",
            f"{fmean(module.relative_error for module in alike):.4f}",
            *([f"{fmean(outputs):.4f}" if outputs else ""] if has_outputs else []),
            f"layer {places[0]}" if places else "",
        )
    return table


def _kinds(modules: "Sequence[ModuleReport]") -> "dict[tuple[str, str], list[ModuleReport]]":
    """The modules by what they are in their layer and by format: one of each in every layer."""
    kinds: dict[tuple[str, str], list[ModuleReport]] = {}
    for module in modules:
        scale = f"g{module.group_size}" if module.scale == "group" else f"r{module.rank}"
        scale += f" s{module.scale_bits}" if module.scale_bits <= 8 else ""
        kind = (name_in_layer(module.name), f"{module.codebook}{_bits(module)} {scale}")
        kinds.setdefault(kind, []).append(module)
    return kinds


def _bits(report: "ModuleReport | FormatTrial") -> str:
    """`2`, or of vectors `2 v4`: 2 bits a weight in vectors of 4."""
    vectors = f" v{report.vector_size}" if report.vector_size > 1 else ""
    return f"{report.bits:g}{vectors}"


def _show_budget(budget: "BudgetReport", console: "Terminal") -> None:
    from rich.table import Table

    title = (
        f"{budget.bits_per_weight:.3f} of {budget.bits_budget:g} bits per weight"
        f"{'' if budget.is_of_file else ' of linears'}, sum of the KLs "
        f"{budget.predicted_kl_nats:.4f} nats"
    )
    table = Table("module", "format", "KL alone (nats)", "other formats", title=title)
    for name, trials in budget.modules.items():
        shown = {f"{_bits(t)} g{t.group_size}": t for t in trials}
        others = [f"{k}: {t.kl_nats:.5f}" for k, t in shown.items() if not t.is_chosen]
        (taken,) = ((k, t) for k, t in shown.items() if t.is_chosen)
        kl = f"{taken[1].kl_nats:.5f}"
        table.add_row(name.removeprefix("model.layers."), taken[0], kl, "  ".join(others))
    console.print(table)


def convert_foreign(
    source: str, config: ConvertConfig, out: Path, *, importer: Foreign
) -> dict[str, object]:
    """Import the checkpoint at `source` into `out`; what the last line says of it.

    Raises:
        CheckpointError: see `qat.convert.importing.Importer`.
    """
    from qat.convert.importing import load_importer

    report = load_importer(importer).import_checkpoint(Path(source), config.base, out)
    _show_import(report)
    return dict(
        out=out,
        version=report.version,
        linears=report.linears,
        adapters=report.adapters,
        floored=report.floored,
        bits_per_weight=round(report.bits_per_weight, 4),
        linear_bits=round(report.linear_bits, 4),
        megabytes=round(report.megabytes, 3),
    )


def _show_import(report: "ImportReport") -> None:
    from rich.table import Table

    from qat.logs import Terminal

    title = (
        f"version {report.version}: {report.megabytes:.1f} MB, {report.bits_per_weight:.3f} bits "
        f"per weight, {report.linear_bits:.3f} of linears"
    )
    table = Table("format", "linears", title=title)
    for name, count in report.formats.items():
        table.add_row(name, str(count))
    console = Terminal()
    console.print(table)
    if report.adapters:
        console.print(f"{report.adapters} linears have a LoRA, which is kept")
    if report.floored:
        console.print(
            f"{report.floored} weights, whose scale version 1 raises to 1e-8, became zero; their "
            "linears took an entry more in their codebook"
        )
