"""Which share of a step's time rolling out takes, where the student learns on its own words.

Student and teacher have a published shape and random weights, whose values no time depends on. Half
of a step's rows are the student's own: a prompt of 16 tokens and its words behind it. Rows of a
cache alone are measured first, then rollouts for every step, and for some steps together. A step
ends when its optimizer has moved, a rollout when its tokens are on the host.

python speedrun/measure_onpolicy.py --figures FILE.jsonl
python speedrun/measure_onpolicy.py --batch-size 64 --seq-len 256
python speedrun/measure_onpolicy.py --device cpu --shape tiny --batch-size 4 --steps 4
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from cyclopts import App
from figures import record
from speed_case import Row, show

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.config import MeasureConfig
from qat.bench.student import quantized_model, random_model
from qat.data.packing import Batch
from qat.models.language_model import LanguageModel
from qat.train.config import TrainConfig
from qat.train.rollout import Rollouts
from qat.train.start import make_trainable
from qat.train.step import EAGER_STEPS, OwnRows, TrainingStep, check_dtype

app = App(help=__doc__)
GOAL = "<= 0.5"
FORMAT, TOP_K, PROMPT, ROUNDS = "q2a2", 64, 16, 5
COLUMNS = (
    ("Rollout", "case", "{}"),
    ("step, s", "step_s", "{:.4f}"),
    ("rolling out, s a step", "rollout_s", "{:.4f}"),
    ("its share", "share", "{:.3f}"),
    ("spread", "spread", "{:.3f}"),
    ("own tokens/s", "own_tokens_per_s", "{:,.0f}"),
    ("positions/s", "positions_per_s", "{:,.0f}"),
    ("GiB", "peak_gib", "{:.2f}"),
)


@dataclass(frozen=True)
class Synthetic:
    """What of a cache a training run reads: rows of random words, each one document."""

    sequence_length: int
    vocab_size: int
    directory: str = "synthetic"

    def num_sequences(self, split: str) -> int:
        """More than any measurement sees."""
        return 2**20

    def batch(self, indices: np.ndarray, split: str = "train", targets: object = ()) -> Batch:
        """Rows that a seed of their own makes."""
        B, S, K = len(indices), self.sequence_length, TOP_K
        draw = torch.Generator().manual_seed(int(indices[0]))
        ids = torch.randint(self.vocab_size, (B, S), generator=draw)
        mask = torch.ones(B, S, dtype=torch.bool)
        mask[:, -1] = False
        return Batch(
            input_ids=ids,
            position_ids=torch.arange(S).expand(B, S).clone(),
            mask=mask,
            labels=ids.roll(-1, 1),
            topk_ids=(ids[..., None] + torch.arange(K)) % self.vocab_size,
            topk_logprobs=torch.full((B, S, K), -float(np.log(2 * K))),
            tail_logprob=torch.full((B, S), -float(np.log(2))),
            sample_ids=torch.zeros(B, S, 0, dtype=torch.int64),
            sample_counts=torch.zeros(B, S, 0),
        )


@dataclass
class Case:
    """A way to train, and what its steps took."""

    name: str
    config: TrainConfig
    take_step: TrainingStep
    rollouts: Rollouts | None
    taken: int = 0
    step_s: list[float] = field(default_factory=list)
    """Seconds of a step, of each round."""
    rollout_s: list[float] = field(default_factory=list)
    """Of which rolling out took so many."""
    own_tokens: list[float] = field(default_factory=list)
    """Tokens a step that were rolled out."""

    def round(self, cache: Synthetic, steps: int, backend: Backend) -> None:
        """Take so many steps, and note their mean times."""
        rolled, tokens = 0.0, 0.0
        backend.synchronize()
        began = time.perf_counter()
        for step in range(self.taken, self.taken + steps):
            count = self.config.batch_size
            batches = [cache.batch(np.arange(step * count, (step + 1) * count))]
            if self.rollouts is not None:
                backend.synchronize()
                before = time.perf_counter()
                batches = self.rollouts.into(batches, step)
                rolled += time.perf_counter() - before
                tokens += self.rollouts.told()["own_tokens"]
            self.take_step(batches, step)
        backend.synchronize()
        self.step_s.append((time.perf_counter() - began) / steps)
        self.rollout_s.append(rolled / steps)
        self.own_tokens.append(tokens / steps)
        self.taken += steps

    def shares(self) -> list[float]:
        """The share of each round's time that rolling out took."""
        return [a / b for a, b in zip(self.rollout_s, self.step_s, strict=True)]

    def row(self, cache: Synthetic, backend: Backend) -> Row:
        """Its line of the table."""
        step_s, rollout_s = statistics.median(self.step_s), statistics.median(self.rollout_s)
        tokens = statistics.median(self.own_tokens)
        return {
            "case": self.name,
            "step_s": step_s,
            "rollout_s": rollout_s,
            "share": statistics.median(self.shares()),
            "spread": statistics.stdev(self.shares()) if len(self.step_s) > 1 else 0.0,
            "own_tokens_per_s": tokens / rollout_s if rollout_s else 0.0,
            "positions_per_s": self.config.batch_size * cache.sequence_length / step_s,
            "peak_gib": backend.peak_memory_gib() or float("nan"),
        }


@app.default
def measure(
    *,
    shape: str = "qwen3-0.6b",
    batch_size: int = 512,
    seq_len: int = 64,
    every: tuple[int, ...] = (1, 4),
    steps: int = 8,
    layers: int | None = None,
    device: str = "auto",
    figures: Path | None = None,
) -> None:
    """Print a table, and append the share at the first of EVERY to FIGURES."""
    backend = select(device)
    made = check_dtype(MeasureConfig(device=device, to=FORMAT, layers=layers))
    teacher = LanguageModel(random_model(shape, made).to(backend.dtype(made.dtype)))
    teacher.model.requires_grad_(False)
    cache = Synthetic(seq_len, teacher.config.vocab_size)
    shared = {
        **{"cache_dir": Path("synthetic"), "teacher": "synthetic", "device": device},
        **{
            "dtype": made.dtype,
            "batch_size": batch_size,
            "max_steps": 2**31,
            "schedule": "constant",
        },
        **{"warmup_steps": 0, "rollout_tokens": seq_len - PROMPT},
        **{f"lr{name}": 0.0 for name in ("", "_scales", "_codebook")},
    }
    settings = {"plain rows": TrainConfig(**shared)}
    for count in every:
        own = TrainConfig(**shared, on_policy=0.5, rollout_every=count)
        settings[f"every {count} step{'s' * (count > 1)}"] = own
    rows = []
    for name, config in settings.items():
        backend.free_memory()
        backend.reset_peak_memory()
        case = opened(name, config, shape, made, teacher=teacher, cache=cache)
        # whole rounds of rollouts alone, the first of them before the clock
        length = -(-max(steps, EAGER_STEPS + 1) // config.rollout_every) * config.rollout_every
        for _ in range(ROUNDS + 1):
            case.round(cache, length, backend)
        case.take_step.close()
        for values in (case.step_s, case.rollout_s, case.own_tokens):
            del values[0]
        rows.append(case.row(cache, backend))
        print(f"{name}: {rows[-1]['step_s']:.4f} s a step", flush=True)
    show(rows, columns=COLUMNS)
    for found, count in zip(rows[1:], every, strict=True):
        name = "rollout_share_seconds" if count == every[0] else f"rollout_share_every_{count}"
        value, spread = round(found["share"], 3), round(found["spread"], 4)
        print(f"{name}: {value} fraction (goal {GOAL}; spread {spread})")
        if figures is not None:
            record(figures, name, value, "fraction", GOAL, runs=ROUNDS, spread=spread)


def opened(
    name: str,
    config: TrainConfig,
    shape: str,
    made: MeasureConfig,
    *,
    teacher: LanguageModel,
    cache: Synthetic,
) -> Case:
    """A student of random codes that learns so."""
    student = LanguageModel(quantized_model(shape, made))
    optimizer = make_trainable(student.model, config)
    rollouts = Rollouts(student, cache, config, end=None) if config.on_policy else None
    beside = teacher if config.on_policy else None
    take_step = TrainingStep(student, optimizer, config, beside, own=OwnRows.of(config))
    return Case(name, config, take_step, rollouts)


if __name__ == "__main__":
    app()
