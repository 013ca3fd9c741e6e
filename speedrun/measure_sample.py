"""Measure the tokens per second of `qat sample` and their share of what memory allows.

The model has a published shape and random weights, whose values no time depends on; no token ends a
row. A round samples a batch of rows of one length from nothing, from the first request to the lists
of tokens; rounds of all cases take turns. The limit is the time of a large copy of as many bytes as
the steps must read: every weight in each step, and of each row the keys and values so far.

Packed students are measured beside bf16: one that keeps keys and values as they are, and two that
keep them in 8 and 4 bits. With 64 rows of the 4B shape their figures have names of their own.

python speedrun/measure_sample.py --figures FILE.jsonl
python speedrun/measure_sample.py --shape qwen3-4b --batch 64 --length 256 --figures FILE.jsonl
"""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cyclopts import App
from figures import record
from speed_case import Figure, Row, record_median, show, tell

from qat.backend.base import Backend
from qat.backend.device import select
from qat.convert.config import ConvertConfig, read_kv, read_plan
from qat.extensions.bench.config import MeasureConfig
from qat.extensions.bench.measure import measure_roofline
from qat.extensions.bench.student import quantize_at_random_, random_model
from qat.extensions.decode.kernels.cache import Cache
from qat.extensions.decode.slots import Batch, Request, Sampler, Slots, SlotStep, open_sampler
from qat.generate.sampling import Sampling
from qat.models.attention import kv_spec
from qat.models.document_attention import set_kv
from qat.models.language_model import LanguageModel

app = App(help=__doc__)
GOAL, PACKED_GOAL = ">= 40000", ">= 1.2"
HEADLINE = "bf16"
PACKED = {"": "q2a2", "_kv8": "q2a2_kv8", "_kv4": "q2a2_kv4"}
"""Formats of the packed students, by what their figures' names say of the cache."""
SERVED, SERVED_GOAL = ("qwen3-4b", 64), ">= 1.5"
"""Shape and rows of the figure that is named after them."""
COLUMNS = (
    ("Case", "case", "{}"),
    ("Rows", "rows", "{}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("spread", "spread", "{:,.0f}"),
    ("ms a step", "step_ms", "{:.3f}"),
    ("GB a step", "step_gb", "{:.2f}"),
    ("of the limit", "limit_share", "{:.3f}"),
)


@dataclass(frozen=True)
class Case:
    """A way to sample."""

    name: str
    sampler: Sampler
    requests: list[Request]
    weight_bytes: int  # bytes of the weights that a step reads
    token_bytes: int  # keys and values of a token
    seconds: list[float]

    def num_tokens(self) -> int:
        """New tokens of a round."""
        return sum(request.limit for request in self.requests)

    def round_bytes(self, num_slots: int) -> float:
        """Return the bytes that the steps of a round must read if all slots are always in use."""
        steps = self.num_tokens() / num_slots
        seen = sum(n.limit * (len(n.ids) + (n.limit - 1) / 2) for n in self.requests)
        return steps * self.weight_bytes + seen * self.token_bytes

    def row(self, num_slots: int, copy_rate: float) -> Row:
        """Its line of the table."""
        seconds, steps = statistics.median(self.seconds), self.num_tokens() / num_slots
        found = self.round_bytes(num_slots)
        speeds = [self.num_tokens() / each for each in self.seconds]
        return {
            "case": self.name,
            "rows": len(self.requests),
            "tokens_per_s": self.num_tokens() / seconds,
            "spread": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
            "step_ms": 1e3 * seconds / steps,
            "step_gb": found / steps / 1e9,
            "limit_share": found / copy_rate / seconds,
        }


@app.default
def measure(
    *,
    shape: str = "qwen3-0.6b",
    batch: int = 256,
    length: int = 512,
    rounds: int = 5,
    device: str = "auto",
    packed: bool = True,
    figures: Path | None = None,
) -> None:
    """Print a table of all cases, and append the figures to FIGURES."""
    backend = select(device)
    copy_rate = measure_roofline(backend, "bf16").copy_bytes
    tell(f"{backend.name()}: a large copy moves {copy_rate / 1e9:,.0f} GB/s")
    cases = dense_cases(shape, batch, length, backend)
    if packed:
        cases += [packed_case(shape, batch, length, backend, to=each) for each in PACKED.values()]
    for turn in range(rounds + 1):
        for case in cases:
            began = time.perf_counter()
            list(case.sampler.sample(case.requests))
            case.seconds.append(time.perf_counter() - began)
        tell("warm" if turn == 0 else f"round {turn} of {rounds}")
    cases = [replace(case, seconds=case.seconds[1:]) for case in cases]
    rows = {case.name: case.row(batch, copy_rate) for case in cases}
    show(list(rows.values()), columns=COLUMNS)
    conclude(cases, rows, figures, is_served=(shape, batch) == SERVED)


def conclude(
    cases: list[Case], rows: dict[str, Row], figures: Path | None, *, is_served: bool = False
) -> None:
    """Say and record the figures; where SERVED was measured, those of the packed students alone."""
    runs, ours = len(cases[0].seconds), rows[HEADLINE]
    found = [
        ("sample_tok_s", round(ours["tokens_per_s"]), "tokens/s", GOAL, round(ours["spread"])),
        ("sample_bandwidth_frac", round(ours["limit_share"], 3), "fraction", "", None),
    ]
    if is_served:
        found, over, goal = [], "generate_over_bf16_batch_64{}", SERVED_GOAL
    else:
        over, goal = "sample_packed{}_over_bf16", PACKED_GOAL
    for name, value, unit, bound, spread in found:
        tell(f"{name}: {value} {unit} (goal {bound or 'none'}; spread {spread})")
        record(figures, name, value, unit, bound, runs=runs, spread=spread)
    seconds = {case.name: case.seconds for case in cases}
    for cache, student in PACKED.items():
        if student in rows:
            pairs = zip(seconds[HEADLINE], seconds[student], strict=True)
            ratios = [dense / packed for dense, packed in pairs]
            figure = Figure(over.format(cache), "times", "" if cache else goal)
            record_median(figures, figure, ratios, digits=3)


def dense_cases(shape: str, batch: int, length: int, backend: Backend) -> list[Case]:
    """The bf16 model: rows of one length; with a nucleus; and rows of all lengths up to that, of
    which each begins where another ended."""
    model = LanguageModel(random_model(shape, MeasureConfig(device=backend.device.type)))
    whole = Batch(batch, 1 + length, length, Sampling(1.0), ())
    nucleus = replace(whole, sampling=Sampling(1.0, 0.95))
    step = SlotStep(model, batch)
    sizes = {"weight_bytes": step.read_bytes(), "token_bytes": token_bytes(model)}
    sampler = Slots(step, whole)
    tell("the bf16 model is recorded")
    same = asked(batch * [length])
    mixed = asked([1 + 97 * row % length for row in range(2 * batch)])
    return [
        Case(HEADLINE, sampler, same, seconds=[], **sizes),
        Case("bf16, top-p 0.95", open_sampler(model, nucleus), same, seconds=[], **sizes),
        Case("bf16, rows of all lengths", sampler, mixed, seconds=[], **sizes),
    ]


def packed_case(shape: str, batch: int, length: int, backend: Backend, *, to: str) -> Case:
    """A student in that format, whose linears hold 2 bits a weight."""
    model = random_model(shape, MeasureConfig(device=backend.device.type))
    formats = ConvertConfig(to=to)
    set_kv(model, read_kv(formats))
    quantize_at_random_(model, read_plan(formats))
    student = LanguageModel(model)
    step = SlotStep(student, batch)
    sampler = Slots(step, Batch(batch, 1 + length, length, Sampling(1.0), ()))
    tell(f"the student in {to} is recorded")
    sizes = {"weight_bytes": step.read_bytes(), "token_bytes": token_bytes(student)}
    return Case(to, sampler, asked(batch * [length]), seconds=[], **sizes)


def asked(limits: list[int]) -> list[Request]:
    """Rows from nothing of these lengths."""
    return [Request([0], limit, (0, row)) for row, limit in enumerate(limits)]


def token_bytes(model: LanguageModel) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    config, kv = model.config, kv_spec(model.config)
    shape = (1, config.num_key_value_heads, 1, config.head_dim)
    bits = None if kv is None else kv.bits
    cache = Cache.empty(shape, model.dtype, torch.device("cpu"), bits)
    return config.num_hidden_layers * sum(part.nbytes for part in cache)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    app()
