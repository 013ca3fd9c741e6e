"""A page of cards: memory, largest batch and tokens/s of each, from records or predicted from them.

Predictions are those of `qat bench --plan`, whose measured run is a row of a record here.
"""

import statistics
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.find_max import MemoryModel
from qat.extensions.bench.run import DevicePrediction, Measured, predict, seconds_by_rates
from qat.extensions.bench.student import open_student
from qat.extensions.bench.work import StepWork, step_work
from qat.extensions.lab.leaderboard import FIGURES, RecordEntry
from qat.extensions.lab.pages import markdown_table
from qat.logs import read_json_lines
from qat.models.devices import Device, device_called, devices_named
from qat.models.flops import token_flops
from qat.models.language_model import LanguageModel
from qat.train.learnable import weights_in_scope

CARDS = ("T4", "L4", "A100-40", "RTX5090", "H100", "H200", "B200", "TPU-v6e")
STUDENT, LENGTHS, TOP_K = "qwen3-0.6b", (64, 128), 64
STEP = {"student": STUDENT, "learn": "scales,codebook", "scope": "e2e", "to": "q2a4"} | {
    "dtype": "bf16",
    "top_k": TOP_K,
    "grad_accum_steps": 1,
}
"""Facts of the rows that count; other steps are other work."""
CASES = ("ours", "frozen", "step, batch")
"""Beginnings of the names of our own steps among the cases of records."""
SATURATED = 16_384
"""Tokens of a step from which on a token costs the same (record 2026-11-21_fast_path)."""
SPARE = 0.9
"""Share of the predicted largest batch that is recommended, as allocators need room."""
DEFAULT_LOSS = BenchConfig().loss
INTRO = """\
# Cards

What a card reaches with Qwen3-0.6B's shape in `q2a4` whose scales and codebooks learn. This page is
written by one command from the rows of the records and never by hand:

    python speedrun/results.py

A number with a link is measured. All others are predicted, as `qat bench --plan` does, from the
row of the most tokens/s; a range holds what was measured over predicted elsewhere
([predictor](2026-11-25_predictor), and searches with less memory for batches). `compiled`: the
card's compiler says that it fits. Memory is what a driver reports; T4 trains in fp16.
"""


ADVICE = f"""\
## Settings to begin with

The batch of {SATURATED:,} tokens, from which on a token costs the same, without recomputation if
{SPARE:.0%} of the largest batch is that many, else as many as fit; loss `{DEFAULT_LOSS}`. If latent
weights learn too, ask `qat bench STUDENT --find-max-batch`.
"""
ORIGINAL = """\
## Beside the original

Rows that [its log](https://github.com/Anemll/qwen3_apple_style_2bit_qat_lora) published, beside
our fastest step that recomputes as it did. Its clock held evaluations too; timed alone, its step
reached 3,790 tokens/s on an H200 ([record](2026-11-21_fast_path)).
"""


class Kind(NamedTuple):
    """A kind of step: each has a table."""

    recomputes: bool
    loss: str

    @property
    def title(self) -> str:
        """The heading of its table."""
        how = "With gradient checkpointing" if self.recomputes else "Without recomputation"
        return f"{how}, loss `{self.loss}`"


class Row(NamedTuple):
    """A row of a record that is one of our steps."""

    record: str
    kind: Kind
    device: Device
    length: int
    batch: int
    peak_gib: float | None
    tokens_per_s: float | None
    limit_gib: float | None
    is_largest: bool

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.length * self.batch


class Found(NamedTuple):
    """A largest batch that is a figure of a record, without a row."""

    batch: int
    record: str
    card: str
    length: int
    recomputes: bool
    how: str = "measured"


class Cell(NamedTuple):
    """A number of the page; `record` is empty if it is predicted from `low` to `high`."""

    value: float | None
    low: float = 0.0
    high: float = 0.0
    record: str = ""
    how: str = "measured"

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        if self.record:
            how = "" if self.how == "measured" else f", {self.how}"
            return f"[{self.value:,.0f}]({self.record}){how}"
        around = "" if self.low == self.high else f" ({self.low:,.0f} to {self.high:,.0f})"
        return f"{self.value:,.0f}{around}"


def read_rows(records: Path) -> list[Row]:
    """Return the steps among the rows of all records that fit into memory."""
    return [
        found
        for path in sorted(records.glob("*/*.jsonl"))
        if path.name != FIGURES
        for row in read_json_lines(path)
        if (found := row_of(row, path.parent.name)) is not None
    ]


def row_of(row: dict[str, Any], record: str) -> Row | None:
    """Return a row of a record as one of this page, None if it is another step or did not fit."""
    device = device_called(str(row.get("device", "")))
    is_ours = str(row.get("case", "")).startswith(CASES)
    if device is None or not is_ours or any(row.get(name) != fact for name, fact in STEP.items()):
        return None
    if row.get("status") not in {"OK", "MAX", "FASTEST"} or row.get("attention"):
        return None
    return Row(
        record,
        Kind(row["gradient_checkpointing"], row["loss"]),
        device,
        row["seq_len"],
        row["batch_size"],
        row.get("peak_gib"),
        row.get("tokens_per_s"),
        row.get("limit_gib") or None,
        row.get("kind") == "max",
    )


@cache
def work_of(length: int, recomputes: bool) -> StepWork:
    """Return the work of a step on sequences of `length`."""
    student, names, config = _student()
    flops = token_flops(student, names, config, S=length, K=TOP_K)
    return step_work(student, flops, recompute=float(recomputes))


@cache
def _student() -> tuple[LanguageModel, list[str], BenchConfig]:
    config = BenchConfig(device="cpu", learn=str(STEP["learn"]), to=str(STEP["to"]))
    student = open_student(STUDENT, config, "meta")
    return student, weights_in_scope(student.model, config.scope, config.kinds), config


class Predictor:
    """Largest batches and speeds of cards, from rows of records or predicted from them."""

    def __init__(self, rows: Sequence[Row], found: Sequence[Found] = ()) -> None:
        self.rows, self.found = rows, found

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of step that were timed."""
        return sorted({row.kind for row in self.rows if row.tokens_per_s})

    def memory(self, recomputes: bool) -> MemoryModel | None:
        """Return the line of peak memory against tokens, however they are cut into sequences.

        It runs through the row of the most tokens and the one of the most at no more than half of
        them, both of one loss.
        """
        lines = []
        for loss in {row.kind.loss for row in self.rows}:
            counted = [r for r in self.rows if r.kind == (recomputes, loss) and r.peak_gib]
            high = max(counted, key=lambda row: row.tokens, default=None)
            low = [row for row in counted if high and 2 * row.tokens <= high.tokens]
            if low:
                lines.append((high, max(low, key=lambda row: row.tokens)))
        if not lines:
            return None
        high, low = max(lines, key=lambda pair: pair[0].tokens)
        return MemoryModel.through((low.tokens, low.peak_gib), (high.tokens, high.peak_gib))

    def shares(self) -> tuple[float, float, float]:
        """Return batches found over those of the line: the median, the least and the largest.

        They are of searches with a limit; the line knows no gaps between tensors.
        """
        shares = [
            row.tokens / model.largest(row.limit_gib)
            for row in self.rows
            if row.is_largest and row.limit_gib
            if (model := self.memory(row.kind.recomputes))
        ]
        shares = shares or [1.0]
        return statistics.median(shares), min(shares), max(shares)

    def batch(self, kind: Kind, device: Device, length: int) -> Cell:
        """Return the largest batch of a card."""
        found = [
            Found(row.batch, row.record, device.name, row.length, kind.recomputes)
            for row in self.rows
            if row.is_largest and row.limit_gib is None and (row.kind, row.device) == (kind, device)
        ]
        place = device.name, kind.recomputes
        found += [each for each in self.found if (each.card, each.recomputes) == place]
        own = [each for each in found if each.length == length]
        if own:
            largest = max(own, key=lambda each: each.batch)
            return Cell(largest.batch, record=largest.record, how=largest.how)
        if found:  # of other lengths: as many tokens
            return Cell(max(each.batch * each.length for each in found) // length)
        batch = self._predicted(kind, device, length).max_batch
        return Cell(None) if batch is None else Cell(*(share * batch for share in self.shares()))

    def speed(self, kind: Kind, device: Device, length: int) -> Cell:
        """Return the most tokens/s of a card."""
        own = [row for row in self._of(kind, device, length) if row.tokens_per_s]
        if own:
            fastest = max(own, key=lambda row: row.tokens_per_s)
            return Cell(fastest.tokens_per_s, record=fastest.record)
        predicted = self._predicted(kind, device, length)
        return Cell(predicted.tokens_per_s, *predicted.tokens_per_s_range)

    def advice(self, device: Device, length: int) -> list[str]:
        """Return settings of a card, the tokens of a step and their speed."""
        sizes = {}
        for kind in (Kind(False, DEFAULT_LOSS), Kind(True, DEFAULT_LOSS)):
            fits = SPARE * (self.batch(kind, device, length).value or 0)
            sizes[kind] = int(min(SATURATED / length, fits))
        kind = max(sizes, key=sizes.__getitem__)  # the first of equal ones does not recompute
        flag = " --gradient-checkpointing" * kind.recomputes
        speed = str(self.speed(kind, device, length))
        return [f"`--batch-size {sizes[kind]}{flag}`", f"{sizes[kind] * length:,}", speed]

    def _of(self, kind: Kind, device: Device, length: int) -> list[Row]:
        return [r for r in self.rows if (r.kind, r.device, r.length) == (kind, device, length)]

    def _predicted(self, kind: Kind, device: Device, length: int) -> DevicePrediction:
        """Predict a card from the fastest row of its kind, of this length if there is one."""
        timed = [row for row in self.rows if row.kind == kind and row.tokens_per_s]
        alike = [row for row in timed if row.length == length] or timed
        base = max(alike, key=lambda row: row.tokens_per_s)
        ratio, home = 1.0, (base.device, "bf16", base.tokens)
        if base.length != length:
            as_it_was, now = (work_of(n, kind.recomputes) for n in (base.length, length))
            ratio = seconds_by_rates(as_it_was, *home) / seconds_by_rates(now, *home)
        line = self.memory(kind.recomputes)
        memory = line and MemoryModel(line.fixed_gib, line.per_sequence_gib * length)
        measured = Measured(
            device=base.device,
            dtype="bf16",
            work=work_of(length, kind.recomputes),
            positions=base.tokens,
            tokens_per_s=ratio * base.tokens_per_s,
            memory=memory,
            recomputes=kind.recomputes,
        )
        return predict(measured, device)


def page(records: Path, settings: Path, entries: Sequence[RecordEntry]) -> str:
    """Return the page in Markdown.

    Args:
        records: directory of records.
        settings: TOML file with rows of the original system, and batches that are only figures.
        entries: the newest entry of each figure on each device.
    """
    given = tomllib.loads(settings.read_text(encoding="utf-8"))
    values = {entry.figure.figure: entry for entry in entries}
    found = [
        Found(int(entry.figure.value), f"{entry.day}_{entry.record}", **each)
        for each in given["found"]
        if (entry := values.get(each.pop("figure")))
    ]
    predictor = Predictor(read_rows(records), found)
    cards = devices_named(CARDS)
    parts = [INTRO]
    for kind in predictor.kinds:
        headings = ["card", "GiB", *(f"largest batch of {n}" for n in LENGTHS)]
        headings += [f"tokens/s at {n}" for n in LENGTHS]
        body = []
        for card in cards:
            cells = [f(kind, card, n) for f in (predictor.batch, predictor.speed) for n in LENGTHS]
            body.append([card.name, f"{card.memory_gib:g}", *map(str, cells)])
        parts += [f"## {kind.title}\n", markdown_table(headings, body)]
    headings = ["card", "length", "settings", "tokens a step", "tokens/s"]
    body = [[card.name, str(n), *predictor.advice(card, n)] for card in cards for n in LENGTHS]
    parts += [ADVICE, markdown_table(headings, body)]
    parts += [ORIGINAL, markdown_table(*_beside_original(predictor, given["original"]))]
    return "\n".join(parts)


def _beside_original(
    predictor: Predictor, rows: Sequence[dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    headings = ["card", "length", "dtype", "its batch", "its tokens/s", "ours, recomputing", "x"]
    body = []
    for row in rows:
        (card,) = devices_named((row["card"],))
        kinds = [kind for kind in predictor.kinds if kind.recomputes]
        speeds = [predictor.speed(kind, card, row["length"]) for kind in kinds]
        best = max(speeds, key=lambda cell: cell.value)
        its = row["tokens_per_s"]
        names = [str(row.get(name, "-")) for name in ("card", "length", "dtype", "batch")]
        body.append([*names, f"{its:,}", str(best), f"{best.value / its:,.0f}"])
    return headings, body
