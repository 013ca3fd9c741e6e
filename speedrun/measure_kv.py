"""How many bytes keys and values of a token take in a cache, and how fast a step reads them.

The model has a published shape and random weights, whose values no time depends on. Its caches hold
keys and values in bf16 and packed in 8 and 4 bits, up to a number of positions; a round takes a few
steps behind them with each of the caches in turn. The step and its weights are the same for all.
Steps behind nothing say what all else takes, and so how much faster a smaller cache can be at most.

python speedrun/measure_kv.py --figures FILE.jsonl
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from cyclopts import App
from figures import record
from speed_case import Row, show

from qat.backend.base import Backend
from qat.backend.device import on, select
from qat.bench.config import MeasureConfig
from qat.bench.student import random_model
from qat.generate.decode import Generation, Sampling
from qat.generate.step import DecodeStep
from qat.kernels.cache import EVERY, Cache
from qat.models.language_model import LanguageModel
from qat.models.regions import set_kv
from qat.quant.spec import KvSpec

app = App(help=__doc__)
BYTES_GOAL, SPEED_GOAL = "<= 0.27", ">= 1.5"
HEADLINE = 4
NO_PAST = "bf16, no past"
SPECS: dict[str, KvSpec | None] = {"bf16": None, "8 bits": KvSpec(bits=8), "4 bits": KvSpec(bits=4)}
FILLED = 1024
"""Positions that are filled at a time."""
COLUMNS = (
    ("Keys and values", "name", "{}"),
    ("bytes a token", "token_bytes", "{:,.0f}"),
    ("of bf16", "bytes_frac", "{:.4f}"),
    ("ms a step", "step_ms", "{:.3f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("over bf16", "speed", "{:.3f}"),
    ("of it the past", "past_frac", "{:.3f}"),
)


@dataclass(frozen=True)
class Case:
    """A generation whose past is kept in one way."""

    name: str
    caches: list[Cache]
    run: Generation
    seconds: list[float]
    """Of a step, one for each round."""

    def token_bytes(self) -> float:
        """Of what the tensors of all layers hold, what falls on a position of a sequence."""
        B, _, N, _ = self.caches[0].shape
        return sum(part.nbytes for cache in self.caches for part in cache) / (B * N)


@app.default
def measure(
    *,
    shape: str = "qwen3-0.6b",
    layers: int | None = None,
    batch: int = 8,
    positions: int = 32768,
    steps: int = 32,
    rounds: int = 5,
    device: str = "auto",
    figures: Path | None = None,
) -> None:
    """Print a table of all ways to keep keys and values, and append the figures to FIGURES; speed
    is a figure only where steps are recorded as graphs."""
    backend = select(device)
    config = MeasureConfig(device=backend.device.type, layers=layers)
    step = DecodeStep(LanguageModel(random_model(shape, config)))
    more = steps * (rounds + 1)
    cases = [
        opened(name, step, spec, batch=batch, positions=positions, more=more)
        for name, spec in SPECS.items()
    ]
    cases.append(opened(NO_PAST, step, None, batch=batch, positions=0, more=more))
    for turn in range(rounds + 1):
        for case in cases:
            with timed(backend, case.seconds, steps):
                for _ in range(steps):
                    case.run.advance()
        print("warm" if turn == 0 else f"round {turn} of {rounds}", flush=True)
    base = cases[0]
    ratios = {
        case.name: [a / b for a, b in zip(base.seconds[1:], case.seconds[1:], strict=True)]
        for case in cases
    }
    rows = [row(case, cases, ratios[case.name], batch) for case in cases]
    show(rows, columns=COLUMNS)
    limit = statistics.median(ratios[NO_PAST])
    print(f"the past takes {rows[0]['past_frac']:.1%} of a bf16 step: {limit:.2f} times at most")
    conclude(cases[:-1], ratios, figures, has_speed=backend.records())


def opened(
    name: str, step: DecodeStep, spec: KvSpec | None, *, batch: int, positions: int, more: int
) -> Case:
    """A generation behind `positions` tokens, which takes up to `more` steps."""
    set_kv(step.model.model, spec)
    caches = step.new_caches(batch, positions + more)
    for cache in caches:
        B, J, N, D = cache.shape
        for start in range(0, N, FILLED):
            places = slice(start, min(start + FILLED, N))
            shape = (2, B, J, places.stop - start, D)
            key, value = torch.randn(shape, dtype=step.dtype, device=step.model.device)
            cache.put(key, value, EVERY, EVERY, places)
    run = Generation(step, caches, step.angles(positions + more), Sampling(0.0))
    run.start(torch.zeros(batch, dtype=torch.long, device=step.model.device), positions, more + 1)
    backend = on(step.model.device)
    if backend.records():
        run.record(backend)
    return Case(name, caches, run, [])


@contextmanager
def timed(backend: Backend, seconds: list[float], steps: int) -> Iterator[None]:
    """Note the seconds of each of the block's steps."""
    backend.synchronize()
    began = time.perf_counter()
    yield
    backend.synchronize()
    seconds.append((time.perf_counter() - began) / steps)


def row(case: Case, cases: list[Case], ratios: list[float], batch: int) -> Row:
    """A case's line of the table."""
    base, *_, bare = cases
    seconds = statistics.median(case.seconds[1:])
    return {
        "name": case.name,
        "token_bytes": case.token_bytes(),
        "bytes_frac": case.token_bytes() / base.token_bytes(),
        "step_ms": 1e3 * seconds,
        "tokens_per_s": batch / seconds,
        "speed": statistics.median(ratios),
        "past_frac": 1 - statistics.median(bare.seconds[1:]) / seconds,
    }


def conclude(
    cases: list[Case], ratios: dict[str, list[float]], path: Path | None, *, has_speed: bool
) -> None:
    """Say and record the figures."""
    base, found = cases[0].token_bytes(), []
    for case in cases[1:]:
        bits, runs = SPECS[case.name].bits, ratios[case.name]
        is_headline = bits == HEADLINE
        name = "kv_bytes_per_token" if is_headline else f"kv{bits}_bytes_per_token"
        goal = BYTES_GOAL if is_headline else ""
        found.append((name, round(case.token_bytes() / base, 4), "of bf16", goal, [0.0]))
        if has_speed:
            goal = SPEED_GOAL if is_headline else ""
            value = round(statistics.median(runs), 3)
            found.append((f"kv{bits}_decode_over_bf16", value, "times", goal, runs))
    for name, value, unit, goal, runs in found:
        spread = round(statistics.stdev(runs), 4) if len(runs) > 1 else None
        print(f"{name}: {value} {unit} (goal {goal or 'none'}; spread {spread})")
        if path is not None:
            record(path, name, value, unit, goal, runs=len(runs), spread=spread)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    app()
