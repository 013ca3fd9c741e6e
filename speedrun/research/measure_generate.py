"""Measure how much faster a packed student generates than the same model in bf16, at batch 1.

All loops are the same: a static cache, a whole step (sampling too) as one graph, replayed. In bf16
the step is computed twice: by the packed student's own kernels on dense weights, and by
`torch.compile` of plain PyTorch layers; the faster one is compared with. Weights are random codes
of a published shape. On a GPU without tuned tiles run `qat bench kernels --tune` first.

python speedrun/research/measure_generate.py --figures FILE.jsonl
"""

import copy
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, Parameter
from plain_decode import PlainStep
from torch import Tensor
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from figures import record
from speed_case import Figure, Row, record_median, show, tell

from qat.backend.base import Backend
from qat.backend.device import on, select
from qat.extensions.bench.config import MeasureConfig
from qat.extensions.bench.measure import measure_roofline
from qat.extensions.bench.student import quantize_at_random_, random_model
from qat.extensions.decode.decoder import Generation
from qat.extensions.decode.kernels.launch import one_after_the_other
from qat.extensions.decode.kernels.lut_matvec import Norm
from qat.extensions.decode.kernels.lut_rows import spread
from qat.extensions.decode.step import DecodeStep, FusedLinears, read_bytes
from qat.generate.sampling import Sampling
from qat.models.language_model import LanguageModel
from qat.nn.swap import with_tables
from qat.quant.spec import PRESETS, QuantPlan

GOAL = 2.0
HEADLINE = "q2a2, tables of 4 bits"
BF16_TABLES = "q2a2, bf16 tables"
VECTORS = "v2a2 in groups of 16, tables of 4 bits"
COPIES = 8
"""Copies of a head that are read in turn: a packed one of the 0.6B shape takes 88 MB."""
STUDENTS = {
    HEADLINE: ("q2a2", 4, None),
    BF16_TABLES: ("q2a2", None, None),
    "q2a4, tables of 4 bits": ("q2a4", 4, None),
    VECTORS: ("v2a2", 4, 16),
    "v2a2, tables of 4 bits": ("v2a2", 4, None),
}
"""Preset, bits of the tables, and the group size where the preset's is another. In groups of 16
vectors have as many bits as levels, but for their codebook."""
LOOP_COLUMNS = (
    ("Loop", "case", "{}"),
    ("ms a token", "token_ms", "{:.4f}"),
    ("tokens/s", "tokens_per_s", "{:,.1f}"),
    ("spread", "spread_ms", "{:.4f}"),
    ("GB a token", "gb", "{:.3f}"),
    ("MBU", "mbu_frac", "{:.3f}"),
    ("over bf16", "over_bf16", "{:.2f}"),
)
NO_OVERLAP, COMPILED = ", no overlap", "bf16 model, torch.compile"


@dataclass(frozen=True)
class Loop:
    """A generation that goes on for as long as it is asked to."""

    name: str
    run: Generation
    num_bytes: int
    """Bytes of the weights that a token reads."""
    head: FusedLinears


@dataclass(frozen=True)
class Asked:
    """Settings of the generation that is timed."""

    shape: str = "qwen3-4b"
    device: str = "auto"
    runs: int = 20
    tokens: int = 64
    """Tokens of a run."""
    prompt: int = 64
    """Tokens of the prompt."""
    packed_only: bool = False
    """Leave the bf16 model out."""
    tiny: bool = False
    """A tiny model, to try the script."""
    figures: Path | None = None


app = App(help=__doc__)
DEFAULTS = Asked()


@app.default
def main(*, asked: Annotated[Asked, Parameter(name="*")] = DEFAULTS) -> None:
    """Print the tables and record how many times as fast the packed student is."""
    if asked.tiny:
        asked = replace(asked, shape="tiny", runs=2, tokens=3, prompt=5)
    backend = select(asked.device)
    copy_rate = measure_roofline(backend, "bf16").copy_bytes
    tell(f"{backend.name()}: a large copy moves {copy_rate / 1e9:,.0f} GB/s")
    with torch.no_grad():
        loops = [*loops_of(asked, backend)]
        tell("recorded; timing")
        seconds = timed(loops, backend, asked)
    said = {loop.name: loop.run.said for loop in loops}
    is_same = torch.equal(said[HEADLINE], said[HEADLINE + NO_OVERLAP])
    tell(f"tokens said with and without overlap are the same: {is_same}")
    if not is_same:
        raise SystemExit("overlapped kernels say other tokens: no speed of theirs counts")
    rows = [row_of(loop, seconds[loop.name], copy_rate) for loop in loops]
    compare_formats(asked, seconds)
    with torch.no_grad():
        compare_heads(asked, backend, {loop.name: loop.head for loop in loops})
    if asked.packed_only:
        show(rows, columns=LOOP_COLUMNS[:-1])
        return
    bf16 = min((row for row in rows if "bf16 model" in row["case"]), key=lambda r: r["token_ms"])
    for row in rows:
        row["over_bf16"] = bf16["token_ms"] / row["token_ms"]
    show(rows, columns=LOOP_COLUMNS)
    ours = next(row for row in rows if row["case"] == HEADLINE)
    compiled = next(row for row in rows if row["case"] == COMPILED)
    ours["over_compiled"] = compiled["token_ms"] / ours["token_ms"]
    ratios = [b / o for b, o in zip(seconds[bf16["case"]], seconds[HEADLINE], strict=True)]
    finish(asked, ours, statistics.stdev(ratios))


def compare_formats(asked: Asked, seconds: dict[str, list[float]]) -> None:
    """Say and record how many times as fast as levels vectors of as many bits are read.

    And how many times as fast as one with a bf16 head a whole step with a packed head is.
    """
    over = [h / v for h, v in zip(seconds[HEADLINE], seconds[VECTORS], strict=True)]
    figure = Figure("vector_generate_over_scalar", "times", ">= 1")
    record_median(asked.figures, figure, over, digits=4)
    over = [bf16 / h for h, bf16 in zip(seconds[HEADLINE], seconds[BF16_TABLES], strict=True)]
    figure = Figure("packed_head_step_over_bf16", "times", "")
    record_median(asked.figures, figure, over, digits=4)


def compare_heads(asked: Asked, backend: Backend, heads: dict[str, FusedLinears]) -> None:
    """Say and record how many times as fast as the product of a bf16 head a packed one's is."""
    names = HEADLINE, BF16_TABLES
    runs = {name: product_of(heads[name], backend) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(asked.runs + 1):
        for name in names:
            seconds[name].append(backend.seconds_of(runs[name]) / COPIES)
    packed, bf16 = (found[1:] for found in seconds.values())
    tell(f"the head's product: {1e3 * statistics.median(packed):.4f} ms packed, "
         f"{1e3 * statistics.median(bf16):.4f} ms in bf16")  # fmt: skip
    over = [slow / fast for fast, slow in zip(packed, bf16, strict=True)]
    figure = Figure("packed_head_over_bf16", "times", ">= 1.3")
    record_median(asked.figures, figure, over, digits=4)


def product_of(head: FusedLinears, backend: Backend) -> Callable[[], object]:
    """Return what multiplies one hidden state by `COPIES` copies of a head, in turn.

    As in a step, nothing of a copy is left in the L2 cache when it is read again.
    """
    copies = [head._replace(rows=tuple(copy.deepcopy(r) for r in head.rows)) for _ in range(COPIES)]
    D = head.rows[0].shape[1]
    x = spread(torch.randn(1, D, device=backend.device), head.order)
    norm = Norm(torch.full((1, 1), float(D), device=backend.device), 1e-6)

    def run() -> list[Tensor]:
        return [each(x, norm) for each in copies]

    run()
    if not backend.records:
        return run
    replay, _ = backend.record(run)

    def again(_kept: object = run) -> None:  # a graph does not keep the tensors that it reads
        replay()

    return again


def finish(asked: Asked, ours: Row, spread: float) -> None:
    """Say and record the figures."""
    ratio = round(ours["over_bf16"], 3)
    tell(f"generate_over_bf16: {ratio} (goal >= {GOAL})")
    common, how = {"runs": asked.runs}, {"goal": f">= {GOAL}", "spread": round(spread, 4)}
    record(asked.figures, "generate_over_bf16", ratio, "times", **how, **common)
    over_compiled = round(ours["over_compiled"], 3)
    record(asked.figures, "generate_over_compiled_bf16", over_compiled, "times", "", **common)
    for name, key in (("generate_tok_s", "tokens_per_s"), ("generate_mbu_frac", "mbu_frac")):
        record(asked.figures, name, round(ours[key], 4), key, "", **common)


def loops_of(asked: Asked, backend: Backend) -> Iterator[Loop]:
    """The bf16 loops and the students' loops, recorded and ready."""
    settings = MeasureConfig(device=asked.device)
    ids = torch.randint(500, (1, asked.prompt), device=backend.device)
    count = (asked.runs + 1) * asked.tokens + 1
    if not asked.packed_only:
        model = random_model(asked.shape, settings).eval()
        dense = DecodeStep(LanguageModel(model))
        yield from both_ways("bf16 model, own kernels", dense, ids, count)
        tell("the bf16 step runs")
        plain = PlainStep(dense, is_compiled=backend.records)
        yield loop_of(COMPILED, dense, plain.logits, ids=ids, count=count)
        tell("the compiled bf16 step runs")
    for name, (preset, table_bits, group_size) in STUDENTS.items():
        student = random_student(asked, preset, table_bits, group_size)
        step = DecodeStep(LanguageModel(student))
        if name == HEADLINE:
            yield from both_ways(name, step, ids, count)
        else:
            yield loop_of(name, step, step.logits, ids=ids, count=count)
        tell(f"{name}: recorded")


def both_ways(name: str, step: DecodeStep, ids: Tensor, count: int) -> Iterator[Loop]:
    """Kernels that start while the one before ends, and kernels that do not."""
    yield loop_of(name, step, step.logits, ids=ids, count=count)
    with one_after_the_other():
        loop = loop_of(f"{name}{NO_OVERLAP}", step, step.logits, ids=ids, count=count)
    yield loop


def random_student(
    asked: Asked, preset: str, table_bits: int | None, group_size: int | None
) -> PreTrainedModel:
    """Random codes in the formats of a preset, in bf16."""
    model = random_model(asked.shape, MeasureConfig(device=asked.device))
    plan = PRESETS[preset]
    if group_size:
        changed = {"group_size": group_size}
        rules = [
            rule.model_copy(update={"spec": rule.spec.model_copy(update=changed)})
            for rule in plan.rules
            if rule.spec is not None
        ]
        plan = QuantPlan(name=f"{preset} in groups of {group_size}", rules=tuple(rules))
    quantize_at_random_(model, with_tables(plan, model, table_bits) if table_bits else plan)
    return model


def loop_of(
    name: str, step: DecodeStep, logits: Callable[..., Tensor], *, ids: Tensor, count: int
) -> Loop:
    """A greedy generation after `ids` by `logits`, recorded where the device can."""
    told = copy.copy(step)
    told.logits = logits
    backend = on(ids.device)
    num_positions = -(-(ids.shape[1] + count) // 256) * 256
    first, caches = step.prefill(ids, num_positions)
    run = Generation(told, caches, step.angles(num_positions), Sampling(0.0))
    run.start(first.argmax(-1), ids.shape[1], count)
    if backend.records:
        run.record(backend)
    return Loop(name, run, read_bytes(step), step.head)


def timed(loops: list[Loop], backend: Backend, asked: Asked) -> dict[str, list[float]]:
    """Seconds a token of every run of every loop, in turns; the first round is not counted."""
    seconds: dict[str, list[float]] = {loop.name: [] for loop in loops}
    for _ in range(asked.runs + 1):
        for loop in loops:
            first = backend.mark()
            for _ in range(asked.tokens):
                loop.run.advance()
            last = backend.mark()
            seconds[loop.name].append(backend.seconds_between(first, last) / asked.tokens)
    return {name: found[1:] for name, found in seconds.items()}


def row_of(loop: Loop, seconds: list[float], copy_rate: float) -> Row:
    """One loop's line of the table."""
    token_s = statistics.median(seconds)
    return {
        "case": loop.name,
        "token_ms": 1e3 * token_s,
        "tokens_per_s": 1 / token_s,
        "spread_ms": 1e3 * statistics.stdev(seconds),
        "gb": loop.num_bytes / 1e9,
        "mbu_frac": loop.num_bytes / token_s / copy_rate,
    }


if __name__ == "__main__":
    app()
