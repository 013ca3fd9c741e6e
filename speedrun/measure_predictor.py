"""How well `qat bench --plan` foretells steps that were measured: by others, and by us on an H100.

Its rates are fitted on our own steps on one H200 alone. Then full training of dense models is
predicted for every point of `public.toml`, each beside the throughput that its source states.

    python speedrun/measure_predictor.py
    python speedrun/measure_predictor.py --rows runs/bench/TIME/results.jsonl
"""

import json
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from cyclopts import App
from figures import ROOT, commit, record
from transformers import AutoConfig, AutoModelForCausalLM

from qat.bench.config import SHAPES
from qat.bench.results import markdown_table
from qat.bench.run import Rates
from qat.models.cost import (
    Device,
    StepWork,
    device_called,
    devices_named,
    step_work,
    token_flops,
)
from qat.models.language_model import LanguageModel
from qat.nn.swap import linear_names

RECORDS = ROOT / "speedrun" / "records"
HERE = RECORDS / "2026-11-25_predictor"
OURS = (  # rows of one H200; what only waits for launches is left out
    RECORDS / "2026-11-21_fast_path" / "scaling.jsonl",
    RECORDS / "2026-11-21_fast_path" / "step.jsonl",
    RECORDS / "2026-11-21_nsa" / "step.jsonl",
)
OUR_CASES = {"step", "ours", "dense", "latent_exact", "frozen_exact", "frozen_exact_ckpt"}
OUR_CASES |= {"frozen_candidates", "frozen_candidates_504"}
PLAIN = {True: "plain_compiled", False: "plain_eager"}
"""Rows of full training in bf16 without quantization, by whether its small kernels are fused."""
LEAST_TOKENS = 4096
"""Of a step, below which it waits for launches: of such steps the least time of a layer is told."""
ADAMW_BYTES = 28
"""Float32 weight, gradient and two moments are read; all but the gradient are written."""
LINK_GB_S = {  # both directions, of one device
    **dict.fromkeys(("A100-40", "A100-80"), 600),  # NVLink 3
    **dict.fromkeys(("H100", "H200"), 900),  # NVLink 4
    "B200": 1800,  # NVLink 5
    "MI300X": 896,  # Infinity Fabric, seven links
    "TPU-v6e": 800,  # inter-chip interconnect
}
"""Of the makers' data sheets: how fast the devices of a host exchange what FSDP shards."""
SHARDED_BYTES = 8
"""A weight is gathered twice in bf16, and its gradient reduced in float32, in each micro-batch."""

LEAST_ROWS, LEAST_POINTS = 5, 10
FIGURES = {"predict_error_public": "<= 0.15", "predict_error_h100": "<= 0.10"}
WAYS = ("our step's", "full training's", "full training's, with transfers")
"""Whose traffic a point is predicted with; the last way is the one that counts."""

app = App(help=__doc__)


@dataclass(frozen=True)
class Point:
    """A throughput that somebody published, and the conditions it was reached under."""

    source: str
    card: str
    shape: str
    batch: int
    seq_len: int
    tokens_per_s: float
    accumulation: int = 1
    gpus: int = 8
    recompute: float = 0.0
    fused: bool = True
    bandwidth_gb_s: float | None = None
    """What the source states, where it is not the data sheet's."""

    @property
    def device(self) -> Device:
        """The card's entry in the table of devices, with the source's own bandwidth."""
        (device,) = devices_named((self.card,))
        return replace(device, bandwidth_gb_s=self.bandwidth_gb_s or device.bandwidth_gb_s)


def read_points(path: Path) -> tuple[list[Point], dict[str, dict]]:
    """The points of a file, and the sizes of the shapes that they name.

    Raises:
        SystemExit: a point names no such shape, or lacks a condition.
        ConfigError: it names no such card.
    """
    told = tomllib.loads(path.read_text(encoding="utf-8"))
    points = []
    for source in told["sources"]:
        for row in source["points"]:
            try:
                point = Point(source=source["repo"], **{**source.get("all", {}), **row})
            except TypeError as error:
                raise SystemExit(
                    f"{path.name}: a point of {source['repo']} is not whole ({error}); expected "
                    "the conditions that the file's head lists; mend that line"
                ) from None
            if point.shape not in told["shapes"]:
                raise SystemExit(
                    f"{path.name}: shape={point.shape} has no sizes; expected one of "
                    f"{', '.join(told['shapes'])}; add [shapes.{point.shape}]"
                )
            devices_named((point.card,))
            points.append(point)
    return points, told["shapes"]


def model_of(sizes: dict) -> LanguageModel:
    """A model of these sizes that holds no memory."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**sizes)
        return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def our_work(
    model: LanguageModel, S: int, *, recompute: float, loss: str = "tail", K: int = 0
) -> StepWork:
    """Of a step of ours in which all linears learn and the head passes gradients on."""
    config = SimpleNamespace(kinds={"scales"}, losses={loss})
    flops = token_flops(model, linear_names(model.model), config, S=S, K=K)
    return step_work(model, flops, recompute=recompute)


def full_work(model: LanguageModel, S: int, *, recompute: float) -> StepWork:
    """Of full training: the head learns as well, which costs half as much again."""
    work = our_work(model, S, recompute=recompute)
    head = model.head.out_features * model.head.in_features
    return replace(work, matmul_flops=work.matmul_flops + 2 * head)


# Fitting on one H200.


@dataclass(frozen=True)
class OwnRow:
    """A step that `qat bench` or a script of ours timed."""

    case: str
    device: str
    dtype: str
    positions: int
    """Of a step."""
    work: StepWork
    tokens_per_s: float

    def terms(self, device: Device) -> list[float]:
        """Seconds a position of a busy device for a rate of one, in the order of `Rates`."""
        peak, bandwidth = device.peak_flops(self.dtype), device.bandwidth
        return [
            self.work.matmul_flops / peak,
            self.work.attention_flops / peak,
            self.work.elements / bandwidth,
            self.work.weights / self.positions / bandwidth,
        ]


@cache
def shape_called(name: str) -> LanguageModel:
    """A shape that `qat bench` knows, without memory."""
    return model_of(SHAPES[name])


@cache
def work_called(name: str, S: int, *, recompute: float, loss: str, K: int) -> StepWork:
    """The work of a step of ours on a shape that `qat bench` knows."""
    return our_work(shape_called(name), S, recompute=recompute, loss=loss, K=K)


def read_rows(paths: Iterable[Path]) -> list[OwnRow]:
    """The timed steps on all linears of a known shape, one of each setting."""
    found = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            case, shape = row.get("case", "").partition(",")[0], row.get("student")
            is_known = shape in SHAPES and case in OUR_CASES | set(PLAIN.values())
            if not is_known or row["scope"] != "e2e" or row.get("tokens_per_s") is None:
                continue
            S, recompute = row["seq_len"], float(row["gradient_checkpointing"])
            work = work_called(shape, S, recompute=recompute, loss=row["loss"], K=row["top_k"])
            positions = row["batch_size"] * S * row["grad_accum_steps"]
            own = OwnRow(case, row["device"], row["dtype"], positions, work, row["tokens_per_s"])
            found[case, row["device"], shape, S, positions] = own  # a median follows its rounds
    return list(found.values())


def fit(rows: Sequence[OwnRow], device: Device) -> tuple[Rates, dict[bool, Rates]]:
    """Rates of our step, and of full training by whether small kernels are fused.

    Least squares of relative errors over our steps; full training shares them but for its traffic,
    which is what its one row leaves.
    """
    ours = [row for row in rows if row.case in OUR_CASES and row.positions >= LEAST_TOKENS]
    terms = np.array([row.terms(device) for row in ours])
    speeds = np.array([row.tokens_per_s for row in ours])
    matmul, attention, traffic, weight = np.linalg.lstsq(
        terms * speeds[:, None], np.ones(len(ours)), rcond=None
    )[0].tolist()
    small = [row for row in rows if row.case in OUR_CASES and row.positions < LEAST_TOKENS]
    layer_s = statistics.median(row.positions / row.tokens_per_s / row.work.layers for row in small)
    rates = Rates(1 / matmul, 1 / attention, traffic, weight, layer_s)
    plain = {}
    for fused, case in PLAIN.items():
        (row,) = (row for row in rows if row.case == case)
        inert = replace(rates, traffic=0.0, weight=ADAMW_BYTES)
        left = 1 / row.tokens_per_s - inert.seconds(row.work, device, row.dtype, row.positions)
        plain[fused] = replace(inert, traffic=left * device.bandwidth / row.work.elements)
    return rates, plain


# Predicting.


def transfers_s(point: Point, weights: float) -> float:
    """Seconds a position of what FSDP sends, at the data sheet's rate, with nothing hidden."""
    sent = SHARDED_BYTES * weights * (point.gpus - 1) / point.gpus
    return sent / (LINK_GB_S[point.card] / 2 * 1e9) / (point.batch * point.seq_len)


def predictions(
    point: Point, model: LanguageModel, ours: Rates, plain: dict[bool, Rates]
) -> list[float]:
    """Tokens a second in each of `WAYS`."""
    work, device = full_work(model, point.seq_len, recompute=point.recompute), point.device
    # each device updates its share of the weights
    positions = point.batch * point.seq_len * point.accumulation * point.gpus
    ours_s, plain_s = (
        rates.seconds(work, device, device.dtype, positions) for rates in (ours, plain[point.fused])
    )
    sent_s = transfers_s(point, work.weights)
    return [1 / seconds for seconds in (ours_s, plain_s, plain_s + sent_s)]


# Errors: of a prediction, as a share of what was measured.


@dataclass(frozen=True)
class Found:
    """A point beside its predictions."""

    point: Point
    predicted: list[float]

    @property
    def ratio(self) -> float:
        """Measured over predicted, the last way."""
        return self.point.tokens_per_s / self.predicted[-1]

    def error(self, way: int = -1) -> float:
        """How far a prediction is off."""
        return abs(self.predicted[way] / self.point.tokens_per_s - 1)


def by_card(found: Sequence[Found]) -> dict[str, list[Found]]:
    """The points of each card by its name, and all as `all`, the last."""
    of_card = defaultdict(list)
    for each in sorted(found, key=lambda each: each.point.card):
        of_card[each.point.card].append(each)
    return {**of_card, "all": list(found)}


def spreads(found: Sequence[Found]) -> dict[str, tuple[float, float]]:
    """Least and most of measured over predicted, of cards with points enough and of all."""
    enough = {card: own for card, own in by_card(found).items() if len(own) >= LEAST_POINTS}
    ratios = {card: [each.ratio for each in own] for card, own in enough.items()}
    return {card: (round(min(own), 2), round(max(own), 2)) for card, own in ratios.items()}


def ways_table(found: Sequence[Found]) -> str:
    """Errors of each way in Markdown."""
    rows = []
    for way, name in enumerate(WAYS):
        errors = np.array([each.error(way) for each in found])
        numbers = [*np.quantile(errors, [0.25, 0.5, 0.75]), errors.max()]
        rows.append([name, *(f"{number:.3f}" for number in numbers)])
    return markdown_table(
        ["traffic of", "lower quartile", "median", "upper quartile", "worst"], rows
    )


def cards_table(found: Sequence[Found]) -> str:
    """Points, errors and measured over predicted of each card in Markdown, and of all."""
    rows = []
    for card, own in by_card(found).items():
        errors, ratios = [each.error() for each in own], [each.ratio for each in own]
        numbers = [statistics.median(errors), max(errors), min(ratios), max(ratios)]
        rows.append([card, str(len(own)), *(f"{number:.2f}" for number in numbers)])
    headings = ["card", "points", "median error", "worst", "measured / predicted from", "to"]
    return markdown_table(headings, rows)


def own_error(rows: Sequence[OwnRow], rates: Rates) -> float:
    """Median error over steps of ours on another device of the table.

    Raises:
        SystemExit: fewer than `LEAST_ROWS` of them keep the device busy.
    """
    errors = []
    for row in rows:
        device = device_called(row.device)
        if device is not None and row.case in OUR_CASES and row.positions >= LEAST_TOKENS:
            seconds = rates.seconds(row.work, device, row.dtype, row.positions)
            errors.append(abs(1 / seconds / row.tokens_per_s - 1))
    if len(errors) < LEAST_ROWS:
        raise SystemExit(
            f"rows: {len(errors)} steps of {LEAST_TOKENS} tokens and more on a known device, "
            f"expected {LEAST_ROWS} at least; run 'qat bench SHAPE --learn scales,codebook' there "
            "for more shapes and lengths"
        )
    return statistics.median(errors)


@app.default
def measure(*, out: Path = HERE, rows: tuple[Path, ...] = ()) -> None:
    """Predict the published points, or the steps in files of ROWS, and write figures to OUT.

    Parameters
    ----------
    rows
        Files that `qat bench` wrote on one H100; then nothing else is predicted.
    """
    (h200,) = devices_named(("h200",))
    ours, plain = fit(read_rows(OURS), h200)
    figures = out / "figures.jsonl"
    if rows:
        timed = read_rows(rows)
        error = own_error(timed, ours)
        name, device = "predict_error_h100", timed[0].device
        told = {"runs": len(timed), "measured": {"commit": commit(), "device": device}}
        record(figures, name, round(error, 3), "1", FIGURES[name], **told)
        return
    points, shapes = read_points(HERE / "public.toml")
    models = {name: model_of(sizes) for name, sizes in shapes.items()}
    found = [Found(each, predictions(each, models[each.shape], ours, plain)) for each in points]
    errors = [each.error() for each in found]
    print(f"ours {ours}\nfused {plain[True]}\nnot fused {plain[False]}\nspreads {spreads(found)}\n")
    print(ways_table(found), cards_table(found), sep="\n")
    for each in sorted(found, key=Found.error, reverse=True):
        point, predicted = each.point, each.predicted[-1]
        print(
            f"{each.error():.3f} {point.card} {point.shape} L={point.seq_len} {point.source}: "
            f"{predicted:,.0f} predicted, {point.tokens_per_s:,.0f} published"
        )
    name, off = "predict_error_public", statistics.median(errors)
    counts = {"runs": len(errors), "spread": round(statistics.stdev(errors), 3)}
    record(figures, name, round(off, 3), "1", FIGURES[name], **counts)


if __name__ == "__main__":
    app()
