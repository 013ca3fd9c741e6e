"""Ships a model whose inputs are rounded to int8, and compares what each program computes of it.

The model is converted in formats that both hold, exported to torchao (read by transformers, in
float32) and to ExecuTorch (its program, run by XNNPACK on this CPU), and given rows of a text. How
far the rounding of float32 takes our own logits is measured beside: every layer gives each value
off by as much, as in docs/export.md, which now and then moves an input by a whole step.

pip install -e '.[executorch]'
python speedrun/measure_shipped_inputs.py MODEL=TEXT.txt --figures FILE.jsonl
"""

import tempfile
from pathlib import Path

import torch
from cyclopts import App
from figures import record
from measure_llamacpp import compared, tokens
from torch import Tensor

from qat.cli import run_verb
from qat.export.model import SUMS
from qat.export.parts import logits_of
from qat.export.targets import load_target
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_tokenizer
from qat.models.noise import disturbed

TARGETS = {"torchao": "torchao_a8", "executorch": "executorch"}
"""What the figures of each begin with."""
KIND = "int8-asymmetric"
EPS = torch.finfo(torch.float32).eps
GOAL = 0.999
"""The share of places at which both think the same token the likeliest."""


app = App(help=__doc__)


@app.default
def main(
    named: str,
    *,
    plan: str = "q2a4",
    sequences: int = 16,
    length: int = 128,
    figures: Path | None = None,
) -> None:
    """Print a line for each target, and record the largest difference and the agreement.

    Args:
        named: a float model and a text file, as MODEL=TEXT.
    """
    source, _, text = named.rpartition("=")
    content = Path(text).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        student = Path(place, "student")
        words = ["convert", source, "--to", plan, "--activations", KIND]
        run_verb([*words, "--for", ",".join(TARGETS), "--out", str(student)])
        ids = tokens(load_tokenizer(str(student)), content, sequences, length)
        agrees = [measure(target, student, ids, figures) for target in TARGETS]
    raise SystemExit(not min(agrees) >= GOAL)


def measure(target: str, student: Path, ids: Tensor, figures: Path | None) -> float:
    """Ship to `target` and compare; the share of places with the same likeliest token."""
    out = student.parent / target
    run_verb(["export", str(student), "--to", target, "--dtype", "fp32", "--out", str(out)])
    model = load_checkpoint(student, torch.float32)
    ours = torch.cat([logits_of(model, row[None]) for row in ids])
    theirs = load_target(target).read_logits(model, out, ids)
    found, difference = compared(ours, theirs), _most(ours, theirs)
    print(
        f"{target}: logits up to {ours.abs().max().item():.3g} differ by up to {difference:.3g} "
        f"over {ids.numel()} tokens; KL {found.kl:.3g} nats; the likeliest token is the same in "
        f"{found.agrees:.3%}"
    )
    moved = {}
    for units in (1, round(SUMS / EPS)):
        with disturbed(model, units * EPS):
            moved[units] = torch.cat([logits_of(model, row[None]) for row in ids])
        own, most = compared(ours, moved[units]), _most(ours, moved[units])
        print(
            f"  ours with every layer off by {units} units in the last place: up to {most:.3g}, "
            f"KL {own.kl:.3g} nats, the same in {own.agrees:.3%}",
            flush=True,
        )
    if figures:
        name = TARGETS[target]
        goal = "== 0" if target == "torchao" else f"<= {most:.3g}"
        record(figures, f"{name}_logit_diff", difference, "logit", goal)
        record(figures, f"{name}_top1", found.agrees, "fraction", f">= {GOAL:g}")
        if target == "executorch":
            own = compared(ours, moved[1]).agrees
            record(figures, "a8_ulp_top1", own, "fraction", "stated")
    return found.agrees


def _most(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


if __name__ == "__main__":
    app()
