"""Whether sparse attention still finds a needle: a small model learns to, is swapped and distilled.

A needle is a token that says a key and a value at once; rows are filler with needles anywhere, and
end with questions: a key, then its value. The dense model learns this at growing lengths; each
sparse one is swapped in, judged, distilled from it at the second longest length and judged again.

python speedrun/research/measure_nsa_needle.py --out runs/nsa_needle
python speedrun/research/measure_nsa_needle.py --out /tmp/needle --small --device cpu
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))

from figures import record

from qat.backend.device import select
from qat.extensions.nsa.kernels.config import PRESETS, NSAConfig
from qat.extensions.nsa.swap import swap_attention
from qat.logs import configure
from qat.models.language_model import LanguageModel

app = App(help=__doc__)
FILLERS, QUESTIONS = 128, 8
"""Kinds of filler; needles, and questions, in a row."""
JUDGED_ON = 32
"""Rows, of so many questions each."""
LR, LR_LONG, LR_SWAPPED = 2e-3, 5e-4, 3e-4
"""Of the first length, of the longer ones, and of the distillation."""
CHOICES: dict[str, dict[str, Any]] = {
    "": {},
    ", blocks judged by means": {"bound": 0.0},
    ", a choice for 128 tokens": {"select_tile": 128},
}
VARIANTS: dict[str, NSAConfig] = {
    name + choice: PRESETS[name].model_copy(update={"backend": "reference", **changes})
    for name in ("nsa", "nsa-merged")
    for choice, changes in CHOICES.items()
}
"""The presets, and what each part of how they choose is for; a kernel would compile anew for each
of few calls."""
SMALL_SIZES = {"compress_block": 4, "compress_stride": 2, "select_block": 8, "num_selected": 6}
SMALL_SIZES |= {"window": 16, "local_blocks": 2}


@dataclass(frozen=True)
class Stage:
    """Steps of the dense model at one length."""

    length: int
    batch_size: int
    steps: int


STAGES = (
    Stage(64, 256, 1500),
    Stage(256, 64, 300),
    Stage(1024, 32, 300),
    Stage(4096, 8, 200),
    Stage(16384, 2, 150),
)
SMALL = (Stage(48, 32, 250), Stage(96, 16, 40), Stage(192, 8, 40))


@dataclass(frozen=True)
class Task:
    """Rows with needles, for `keys` keys of as many values each."""

    keys: int
    generator: torch.Generator
    device: torch.device

    @property
    def vocabulary(self) -> int:
        """Questions, answers, fillers, needles."""
        return 2 * self.keys + FILLERS + self.keys**2

    def rows(self, count: int, length: int) -> Tensor:
        """`(count, length)` tokens."""
        first = 2 * self.keys
        ids = self._integers(first, first + FILLERS, (count, length))
        keys, values = (
            self._shuffled(count, self.keys),
            self._integers(0, self.keys, (count, QUESTIONS)),
        )
        places = self._shuffled(count, length - 2 * QUESTIONS)
        ids.scatter_(1, places, first + FILLERS + keys * self.keys + values)
        order = self._shuffled(count, QUESTIONS)
        ids[:, -2 * QUESTIONS :: 2] = keys.gather(1, order)
        ids[:, 1 - 2 * QUESTIONS :: 2] = self.keys + values.gather(1, order)
        return ids

    def _integers(self, low: int, high: int, shape: tuple[int, int]) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def _shuffled(self, count: int, of: int) -> Tensor:
        """`(count, QUESTIONS)`: different numbers below `of` in any order."""
        drawn = torch.rand(count, of, generator=self.generator, device=self.device)
        return drawn.argsort(1)[:, :QUESTIONS]


def answers(model: LanguageModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `(B, QUESTIONS, V)` behind each question, and the right tokens."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    hidden = model.hidden(ids, positions, is_packed=False)
    logits = model.logits(hidden[:, -2 * QUESTIONS :: 2]).float()
    return logits, ids[:, 1 - 2 * QUESTIONS :: 2]


@torch.no_grad()
def accuracy(model: LanguageModel, task: Task, length: int, rows: int) -> float:
    """Share of questions answered right, a row at a time."""
    right = 0
    for _ in range(rows):
        logits, wanted = answers(model, task.rows(1, length))
        right += (logits.argmax(-1) == wanted).sum().item()
    return right / (rows * QUESTIONS)


def learn(model: LanguageModel, task: Task, stage: Stage, lr: float) -> None:
    """Train every parameter on the right answers."""

    def loss(ids: Tensor) -> Tensor:
        logits, wanted = answers(model, ids)
        return cross_entropy(logits.flatten(0, 1), wanted.flatten())

    _train(model, task, stage, lr, loss)


def distil(student: LanguageModel, teacher: LanguageModel, task: Task, stage: Stage) -> None:
    """Train every parameter on the KL to the teacher's answers."""

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = answers(teacher, ids)[0].log_softmax(-1)
        log_q = answers(student, ids)[0].log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    _train(student, task, stage, LR_SWAPPED, loss)


def _train(model: LanguageModel, task: Task, stage: Stage, lr: float, loss_of: Any) -> None:  # noqa: PLR0917
    parameters = list(model.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50, 2 * (1 - step / stage.steps))
        loss = loss_of(task.rows(stage.batch_size, stage.length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == stage.steps - 1:
            seconds = time.perf_counter() - began
            found = f"loss {loss.item():.4f}, {seconds:.0f} s"
            print(f"  {stage.length}: step {step + 1}, {found}", flush=True)


def new_model(task: Task, *, width: int, seed: int) -> LanguageModel:
    """Two layers of grouped queries."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=task.vocabulary,
        hidden_size=2 * width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width,
        max_position_embeddings=32768,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        tie_word_embeddings=False,
    )
    return LanguageModel(Qwen3ForCausalLM(config).to(task.device))


@app.default
def measure(
    *,
    out: Path,
    device: str = "auto",
    distil_steps: int = 600,
    only: str = "",
    seed: int = 0,
    small: bool = False,
) -> None:
    """Write rows, a table and the figure to OUT.

    Parameters
    ----------
    only
        Names of variants, joined by semicolons; all for none.
    small
        A trial on a CPU: rows of up to 192 tokens.
    """
    configure()
    torch.set_float32_matmul_precision("high")
    place = select(device).device
    task = Task(16 if small else 32, torch.Generator(place).manual_seed(seed), place)
    stages, width = (SMALL, 32) if small else (STAGES, 64)
    dense = new_model(task, width=width, seed=seed)
    for number, stage in enumerate(stages):
        learn(dense, task, stage, LR if number == 0 else LR_LONG)
    lengths = [stage.length for stage in stages[-2:]]
    found = [{"name": "dense", **judged(dense, task, lengths, "after")}]
    keep(out, found, lengths[-1], small=small)
    for name, config in VARIANTS.items():
        if only and name not in only.split(";"):
            continue
        found.append(run(name, config, dense, task, lengths, distil_steps, small=small))
        keep(out, found, lengths[-1], small=small)
    show(found)


def run(  # noqa: PLR0917
    name: str,
    config: NSAConfig,
    dense: LanguageModel,
    task: Task,
    lengths: list[int],
    steps: int,
    *,
    small: bool,
) -> dict[str, Any]:
    """Swap, judge, distil, judge."""
    if small:
        tile = {128: 8, 1: 1}[config.select_tile]
        config = config.model_copy(update={**SMALL_SIZES, "select_tile": tile})
    student = LanguageModel(Qwen3ForCausalLM(dense.model.config).to(task.device))
    student.model.load_state_dict(dense.model.state_dict())
    swap_attention(student.model, config)
    row = {"name": name, **config.model_dump(mode="json")}
    row |= judged(student, task, lengths, "before")
    distil(student, dense, task, Stage(lengths[0], 2, steps))
    return row | judged(student, task, lengths, "after")


def judged(model: LanguageModel, task: Task, lengths: list[int], when: str) -> dict[str, float]:
    """The accuracy at each length."""
    return {f"accuracy_{n}_{when}": accuracy(model, task, n, JUDGED_ON) for n in lengths}


def keep(out: Path, rows: list[dict[str, Any]], longest: int, *, small: bool) -> None:
    """Write the last row, and the figure if it is the preset `nsa`'s."""
    row = rows[-1]
    print({key: value for key, value in row.items() if "accuracy" in key or key == "name"})
    out.mkdir(parents=True, exist_ok=True)
    with (out / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    if row["name"] == "nsa" and not small:
        key = f"accuracy_{longest}_after"
        ratio = round(row[key] / rows[0][key], 3)
        record(out / "figures.jsonl", "needle_over_dense_4x", ratio, "x", ">= 0.8")


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    keys = [key for key in rows[-1] if key.startswith("accuracy")]
    table = Table("attention", *(key.removeprefix("accuracy_").replace("_", ", ") for key in keys))
    for row in rows:
        table.add_row(row["name"], *(f"{row[key]:.3f}" if key in row else "" for key in keys))
    Console(width=110).print(table)


if __name__ == "__main__":
    app()
