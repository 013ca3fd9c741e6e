"""The shared parts of the speed scripts: settings, turns of a case, tables and figures."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import figures

from qat.backend.device import select
from qat.cli.tables import row_table, wide_console
from qat.extensions.bench.batches import open_source
from qat.extensions.bench.config import MeasureConfig
from qat.extensions.bench.measure import Timing
from qat.extensions.bench.results import Results, environment
from qat.extensions.bench.run import Setting
from qat.models.flops import token_flops
from qat.models.language_model import LanguageModel
from qat.train.learnable import weights_in_scope
from qat.train.start import check_dtype

FROZEN = {"learn": "scales,codebook"}
LATENT = {"learn": "weights,scales,codebook"}
CANDIDATES = {"loss": "candidates", "temperature": 2.0}
EXACT = {"loss": "tail"}
WIDTH = 130
START = time.perf_counter()

Row = dict[str, object]
Column = tuple[str, str, str]  # title, key of a row, format
SPEED_COLUMNS: tuple[Column, ...] = (
    ("Batch", "batch_size", "{}"),
    ("Step(s)", "step_s", "{:.4g}"),
    ("t/s", "tokens_per_s", "{:,.0f}"),
    ("MFU", "mfu_frac", "{:.3f}"),
    ("of matmul", "mfu_of_matmul_frac", "{:.3f}"),
    ("Memory", "peak_gib", "{:.2f} GiB"),
    ("Loss", "loss_nats", "{:.4f}"),
    ("Status", "status", "{}"),
)


@dataclass(frozen=True)
class Figure:
    """A number that the issue asks for."""

    name: str
    unit: str
    goal: str


def settled(**settings: object) -> MeasureConfig:
    """The settings of a measurement, with its dtype as the device has it."""
    return check_dtype(MeasureConfig(**settings))


def varied(setting: Setting, student: LanguageModel, **settings: object) -> Setting:
    """The same student and device under other settings; the device is not measured again."""
    config = settled(**{**setting.config.model_dump(), **settings})
    data = open_source(config, student)
    names = weights_in_scope(student.model, config.scope)
    flops = token_flops(student, names, config, S=data.seq_len, K=data.top_k)
    return replace(setting, config=config, data=data, flops=flops)


@contextmanager
def results_in(out: Path, config: MeasureConfig) -> Iterator[Results]:
    """The files of one script's measurements, which hold its own command."""
    found = environment(select(config.device), config)
    with Results(out, {**found, "command": figures.command()}) as results:
        yield results


def record_median(
    path: Path | None, figure: Figure, values: Sequence[float], *, digits: int = 0
) -> None:
    """Print the median of `values` and append it to a file, with their standard deviation."""
    value = round(statistics.median(values), digits)
    figures.record(
        path,
        figure.name,
        value if digits else int(value),
        figure.unit,
        figure.goal,
        runs=len(values),
        spread=round(statistics.stdev(values), digits + 2) if len(values) > 1 else None,
    )
    tell(f"{figure.name}: {value:,.{digits}f} {figure.unit} (goal {figure.goal or 'none'})")


def tell(line: str) -> None:
    """Print with the time since the start."""
    print(f"[{time.perf_counter() - START:6.1f} s] {line}", flush=True)


def show(rows: Sequence[Row], *first: Column, columns: Sequence[Column] = SPEED_COLUMNS) -> None:
    """Print rows as one table; a key that a row lacks is a dash."""
    chosen = [(*column, 1) for column in (*first, *columns)]
    wide_console(WIDTH).print(row_table(chosen, rows))


def timed_row(setting: Setting, case: str, timing: Timing | None, **more: object) -> Row:
    """A row of one case, whose numbers are missing where it did not fit into memory."""
    numbers = {} if timing is None else setting.numbers(timing)
    status = "OOM" if timing is None else "OK"
    size = setting.config.batch_size
    return {**setting.row("step", case, size), **numbers, "status": status, **more}
