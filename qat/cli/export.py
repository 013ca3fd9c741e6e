"""`qat export`: a deployable form of a packed checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from qat.config import Required
from qat.errors import ConfigError, ExportError
from qat.export.config import ExportConfig, TargetName
from qat.files import check_free
from qat.hooks import extension

if TYPE_CHECKING:
    from qat.export.model import ExportReport
    from qat.export.targets import Lack

HUB = Parameter(group=Group.create_ordered("Repository of a hub"))


def export(
    model: Required[str],
    *,
    config: Annotated[ExportConfig, Parameter(name="*")],
    out: Required[Path],
    push: Annotated[str | None, HUB] = None,
    private: Annotated[bool, HUB, Parameter(negative=())] = False,
) -> dict[str, object]:
    """Write MODEL in a deployable form, read it back and compare its logits with MODEL's.

    Args:
        model: Directory of a packed checkpoint, or of a run.
        config: Settings.
        out: Directory to make.
        push: OWNER/NAME of a repository of the Hugging Face hub, to push OUT to.
        private: Make that repository private if it is new.
    """
    from qat.cli.inputs import check_inputs
    from qat.hub.files import REPOSITORY

    push = push and push.removeprefix(REPOSITORY)
    if private and not push:
        raise ConfigError(
            "private=True without push, expected a repository; add --push OWNER/NAME or drop it"
        )
    from qat.models.directory import stored_config

    check_inputs(models=[model], out=out)
    check_free(out)
    found = stored_config(model)
    if found and "quantization_config" not in found:
        raise ExportError(
            f"{model} is not a packed checkpoint, expected one; make one with 'qat convert'"
        )
    if push:
        extension("qat.publish", "repository").check_push(push, private=private)
    from qat.export.model import export_model

    report = export_model(model, config, out, repository=push)
    _show(report, config, out)
    is_equal = report.logits_max_diff == 0
    done = dict(out=out, to=config.to, logits_equal=is_equal, **report._asdict())
    if push:
        done["pushed"] = extension("qat.publish", "push").publish(out, push, private=private).url
    return done


def _show(report: "ExportReport", config: ExportConfig, out: Path) -> None:
    from rich.table import Table

    from qat.logs import Terminal
    from qat.models.sizes import SIZE_COLUMNS

    sizes, console = report.sizes(), Terminal()
    warning = sizes.warning(_why_large(report, config))
    if warning is not None:
        console.print(warning, style="bold red", highlight=False, soft_wrap=True)
    table = Table("form", "dtype", *SIZE_COLUMNS, "logits", title=str(out))
    difference = report.logits_max_diff
    logits = "equal" if difference == 0 else f"within {difference:.2g}"
    dtype = report.dtype
    if dtype != report.saved_dtype:
        dtype += f" (saved in {report.saved_dtype})"
    table.add_row(config.to, dtype, *sizes.cells(), logits)
    console.print(table)


def _why_large(report: "ExportReport", config: ExportConfig) -> str:
    if config.to == "dense":
        half = ", and --dtype bf16 takes half" if report.dtype == "float32" else ""
        return f"dense weights are in {report.dtype}; --to packed keeps them small{half}"
    if report.has_float_tables:
        return (
            "the embedding and the head are in floating point; convert with --embedding-bits 8 for "
            "a target that holds quantized tables (docs/export.md)"
        )
    return f"{config.to} takes that for these formats; convert with fewer bits, such as --to q2a2"


def show_targets(directory: Path, *, adapters: bool = False) -> list[str]:
    """Say where a packed checkpoint can be shipped to as it is, and where not; the former.

    Args:
        directory: The checkpoint.
        adapters: Training will add some.
    """
    from qat.export.targets import ships_to

    return show_lacks(ships_to(directory, adapters=adapters))


def show_lacks(lacks: "Mapping[TargetName, Lack | None]") -> list[str]:
    """Say which targets lack nothing for a student, and why the others do; the former."""
    from qat.logs import Terminal

    to = [name for name, lack in lacks.items() if lack is None]
    words = f"ships to {', '.join(to)}"
    others: dict[str, list[str]] = {}
    for name, lack in lacks.items():
        if lack is not None:
            others.setdefault(lack.reason, []).append(name)
    if others:
        named = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in others.items())
        words += f"\nnot to {named}"
    if any(lack is not None and lack.is_format for lack in lacks.values()):
        words += " (choose before training: qat convert --for NAME,NAME)"
    Terminal().print(words, highlight=False, soft_wrap=True)
    return to
