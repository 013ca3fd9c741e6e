"""What sparse attention costs a small real model, and which of its sizes cost less.

The model is swapped and distilled from itself as it was (exact KL, float weights, every parameter)
on chats; blocks are so small that most are left out at the length of a row. The figure is the KL on
held-out chats after all steps; the ablation trains each variant for fewer.

python speedrun/research/measure_nsa_quality.py --model DIR --texts A.json --texts B.jsonl --out OUT
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import research_records as figures
import torch
from cyclopts import App, Parameter
from nsa_students import chat_rows, distil, divergence, token_batches
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qat.backend.device import select
from qat.kernels.nsa.config import NSAConfig
from qat.logs import configure
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.models.regions import as_written
from qat.nsa.fit import attention_health, fit_attention, health_numbers
from qat.nsa.swap import swap_attention

app = App(help=__doc__)
SIZES: dict[str, Any] = {
    "compress_block": 8,
    "compress_stride": 4,
    "select_block": 16,
    "num_selected": 32,
    "window": 64,
    "select_tile": 16,
    "backend": "reference",
}
"""Reaches 512 positions; a kernel would compile anew for every variant."""
SMALL_SIZES = {"num_selected": 6, "compress_block": 4, "select_block": 8, "window": 16}
SMALL_SIZES |= {"select_tile": 8}
MERGED = {"mode": "merged", "local_blocks": 5}
EACH = {"select_tile": 1}
BOUNDS = {"compress_block": 4, "compress_stride": 4, "bound": 0.3}
"""As many pooled keys as in `SIZES`, side by side, judged by what their keys reach at most."""
LONG: dict[str, dict[str, Any]] = {
    "residual": {},
    "merged": MERGED,
    "for each token": EACH,
    "merged, for each token": {**MERGED, **EACH},
    "24 blocks": {"num_selected": 24},
    "24 blocks, for each token": {"num_selected": 24, **EACH},
    "16 blocks": {"num_selected": 16},
    "16 blocks, for each token": {"num_selected": 16, **EACH},
    "16 blocks, for each token by bounds": {"num_selected": 16, **EACH, **BOUNDS},
}
"""What differs from `SIZES` and the mode `residual`; trained for all steps."""
SHORT: dict[str, dict[str, Any]] = {
    "for 64 tokens": {"select_tile": 64},
    "for 128 tokens": {"select_tile": 128},
    "16 blocks of 32": {"compress_block": 16, "compress_stride": 8, "select_block": 32}
    | {"num_selected": 16},
    "8 blocks of 64": {"compress_block": 32, "compress_stride": 16, "select_block": 64}
    | {"num_selected": 8},
    "16 blocks of 32, pooled by 8": {"select_block": 32, "num_selected": 16},
    "pooled by 4": {"compress_block": 4, "compress_stride": 2},
    "pooled, then rotated": {"cmp_rope": "pre"},
    "learned pooling": {"pooling": "weighted"},
    "sigmoid gates": {"mode": "sigmoid"},
    "merged, 2 local blocks": {"mode": "merged"},
    "window of 16": {"window": 16},
    "window of 128": {"window": 128},
}
"""The same, trained for fewer."""
FIGURES = {"residual": "", "16 blocks, for each token by bounds": "_16_blocks"}
"""Variants that are figures, and the ends of their names."""
GOAL = "<= 0.02"


@dataclass(frozen=True)
class Options:
    """How it is measured."""

    device: str = "auto"
    """Where."""
    steps: int = 500
    """Of the variants that are trained to the end."""
    ablation_steps: int = 100
    """Of the others."""
    fit_steps: int = 0
    """Of the per-layer stage before the distillation."""
    batch_size: int = 8
    """Rows of a step."""
    lr: float = 2e-4
    """Relative: a step moves a tensor by about this share of its size."""
    rows: int = 1200
    """To train on."""
    held_out: int = 32
    """Rows to judge on."""
    only: str = ""
    """Names of variants, joined by semicolons; all for none."""
    limit_s: float = 200.0
    """No variant begins after so many seconds."""
    small: bool = False
    """A trial on a CPU: rows of 256 tokens, blocks that reach 48 of them."""

    def wants(self, name: str) -> bool:
        """Whether that variant is to be run."""
        return not self.only or name in self.only.split(";")


@dataclass(frozen=True)
class Setting:
    """What all variants share."""

    model: str
    options: Options
    train: Tensor
    held_out: Tensor
    teacher: LanguageModel
    sizes: dict[str, Any]


@app.default
def measure(
    *,
    model: str,
    texts: list[Path],
    out: Path,
    options: Annotated[Options, Parameter(name="*")] = Options(),  # noqa: B008 - frozen
) -> None:
    """Write rows, a table and the figure to OUT.

    Parameters
    ----------
    model
        Float model, a directory or hub id.
    texts
        Files of questions and answers, .json or .jsonl.
    """
    configure()
    torch.set_float32_matmul_precision("high")
    setting = opened(model, texts, options)
    began, found = time.perf_counter(), []
    out.mkdir(parents=True, exist_ok=True)
    for name, changes in {**LONG, **SHORT}.items():
        if not options.wants(name) or time.perf_counter() - began > options.limit_s:
            continue
        steps = options.steps if name in LONG else options.ablation_steps
        found.append(run(setting, name, changes, steps))
        with (out / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found[-1]) + "\n")
        if name in FIGURES and not options.small:
            kl = found[-1]["kl_after"]
            path = out / "figures.jsonl"
            figures.record(path, f"nsa_kl_after_{steps}{FIGURES[name]}", kl, "nats", GOAL)
    show(found)


def opened(model: str, texts: list[Path], options: Options) -> Setting:
    """Teacher and rows on the device."""
    length = 256 if options.small else 1024
    count = options.rows + options.held_out
    tokens = chat_rows(texts, load_tokenizer(model), length, count).to(
        select(options.device).device
    )
    teacher = load_model(model, device=options.device, dtype="fp32")
    teacher.model.requires_grad_(False)
    return Setting(
        model=model,
        options=options,
        train=tokens[options.held_out :],
        held_out=tokens[: options.held_out],
        teacher=teacher,
        sizes=SIZES | SMALL_SIZES if options.small else SIZES,
    )


def run(setting: Setting, name: str, changes: dict[str, Any], steps: int) -> dict[str, Any]:
    """Swap, look, fit, distil, look again."""
    config, options = NSAConfig(**{**setting.sizes, **changes}), setting.options
    torch.manual_seed(0)
    student = load_model(setting.model, device=setting.options.device, dtype="fp32")
    swap_attention(student.model, config)
    row = {"name": name, "steps": steps, **config.model_dump(mode="json")}
    row |= _looked(student, setting, config, "before")
    if options.fit_steps:
        batches = token_batches(setting.train[: 8 * options.batch_size], options.batch_size)
        fits = fit_attention(student, batches, steps=options.fit_steps)
        row |= _looked(student, setting, config, "fitted")
        for when in ("before", "after"):
            errors = [getattr(fit, f"error_{when}") for fit in fits]
            row[f"attention_error_{when}"] = sum(errors) / len(errors)
    course = []

    def note(step: int, kl: float) -> None:
        course.append((step, kl))
        print(f"  {name}: step {step}, KL {kl:.4f}", flush=True)

    row["seconds"] = distil(
        student,
        setting.teacher,
        setting.train,
        steps=steps,
        batch_size=options.batch_size,
        lr=options.lr,
        note=note,
    )
    row |= {"course": course, **_looked(student, setting, config, "after")}
    print(f"{name}: KL {row['kl_before']:.4f} to {row['kl_after']:.4f}", flush=True)
    return row


def _looked(
    student: LanguageModel, setting: Setting, config: NSAConfig, when: str
) -> dict[str, float]:
    """Divergence and health on held-out rows."""
    found = asdict(divergence(student, setting.teacher, setting.held_out, config.reach))
    (first,) = token_batches(setting.held_out[:2], 2)
    with as_written(student.model):
        health = health_numbers(attention_health(student, first))
    found |= {k.removeprefix("nsa_"): v for k, v in health.items() if isinstance(v, float)}
    return {f"{name}_{when}": value for name, value in found.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """The table: `limited` are queries that do not read all of their past, `beyond` their KL."""
    columns = ("variant", "limited", "recall", "KL at the swap", "steps", "KL after", "beyond", "s")
    table = Table(*columns)
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['limit_frac_before']:.3f}",
            f"{row['recall_frac_before']:.4f}",
            f"{row['kl_before']:.4f}",
            str(row["steps"]),
            f"{row['kl_after']:.4f}",
            f"{row['kl_beyond_after']:.4f}",
            f"{row['seconds']:.0f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    app()
