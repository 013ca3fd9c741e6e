"""Steps of students too large to form at once: what they cost, and the largest that takes any.

Students are random packed weights in published shapes, made on the device without a float model.
Forming by layer and at once take turns; every other case runs alone, each shape from the largest
down until one takes its steps.

python speedrun/measure_layerwise.py --out runs/layerwise
"""

import gc
import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App
from speed_case import (
    EXACT,
    FROZEN,
    LATENT,
    SPEED_COLUMNS,
    Figure,
    Row,
    record,
    results_in,
    settled,
    show,
    timed_row,
)

from qat.backend.device import select
from qat.bench.find_max import unless_out_of_memory
from qat.bench.run import RESERVED_GIB, prepare, time_ours
from qat.bench.student import Ours
from qat.errors import ConfigError
from qat.logs import configure
from qat.models.cost import devices_named

logger = logging.getLogger(__name__)
app = App(help=__doc__)
BF16 = {"latent_dtype": "bf16"}
VECTORS = {"to": "v2a2"}
"""Groups of 64: in groups of 16 a 70B student's scales and their moments take 64 GiB."""
(CARD,) = devices_named(("H100",))
"""What the sizes of students speak of, whichever device measures."""
RATIO = Figure("layerwise_over_whole", "x", "<= 1.05")


@dataclass(frozen=True)
class Case:
    """One way to take a step, of the first of some shapes that fits."""

    name: str
    shapes: tuple[str, ...]
    settings: Row
    speed: Figure | None = None
    share: Figure | None = None
    """Of its MFU."""
    size: Figure | None = None
    """Of its parameters, in billions, where what it reserved fits `CARD`."""


CASES = (
    Case("whole", ("qwen3-4b",), FROZEN | {"form": "whole"}),
    Case("layer", ("qwen3-4b",), FROZEN | {"form": "layer"}),
    Case(
        "8b_latent",
        ("qwen3-8b",),
        LATENT | BF16,
        speed=Figure("step_8b_latent_tok_s", "tokens/s", "with its MFU >= 0.45"),
        share=Figure("step_8b_latent_mfu", "", ">= 0.45"),
    ),
    Case(
        "70b_frozen",
        ("llama-3.3-70b",),
        FROZEN | VECTORS,
        speed=Figure("step_70b_frozen_tok_s", "tokens/s", ">= 1200"),
        share=Figure("step_70b_frozen_mfu", "", ">= 0.45"),
        size=Figure("max_model_one_h100_frozen", "B", ">= 70"),
    ),
    Case(
        "max_latent",
        ("qwen3-32b", "qwen3-14b", "qwen3-8b"),
        LATENT | BF16 | {"learn": "weights", "offload": "latents"},
        size=Figure("max_model_one_h100_latent", "B", ">= 14"),
    ),
)


@app.default
def measure(
    *,
    out: Path,
    only: str = ",".join(case.name for case in CASES),
    shape: str | None = None,
    device: str = "auto",
    batch_size: int = 32,
    seq_len: int = 512,
    rounds: int = 3,
    steps: int = 5,
) -> None:
    """Write rows, a table and the figures to OUT.

    Parameters
    ----------
    only
        Cases to run, joined by commas.
    shape
        In the place of every case's own, for a trial.
    batch_size
        Sequences of a step, in which layers are recomputed.
    rounds
        Turns of forming by layer and at once.
    """
    configure()
    chosen = [case for case in CASES if case.name in only.split(",")]
    if not chosen:
        raise ConfigError(f"only={only} names no case; choose among {[c.name for c in CASES]}")
    common = EXACT | {"device": device, "batch_size": batch_size, "seq_len": seq_len}
    common |= {"steps": steps, "gradient_checkpointing": True}
    pair = [case for case in chosen if case.name in ("whole", "layer")]
    turns = [*pair * rounds, *(case for case in chosen if case not in pair)]
    rows: dict[str, list[Row]] = defaultdict(list)
    with results_in(out, settled(**common)) as results:
        for case in turns:
            for name in (shape,) if shape else case.shapes:
                row = _run(case, name, common)
                results.add(**row)
                rows[case.name].append(row)
                if row["status"] == "OK":
                    break
        results.finish()
        columns = (*SPEED_COLUMNS, ("Reserved", "peak_reserved_gib", "{:.2f} GiB"))
        every = [row for found in rows.values() for row in found]
        show(every, ("Case", "case", "{}"), ("Student", "student", "{}"), columns=columns)
        seconds = [[row["step_s"] for row in _fitting(rows[name])] for name in ("layer", "whole")]
        ratios = [mine / whole for mine, whole in zip(*seconds, strict=False)]
        if ratios:
            record(results.path, RATIO, ratios, digits=3)
        for case in chosen:
            for row in _fitting(rows[case.name])[:1]:
                _record(results.path, case, row)


def _run(case: Case, shape: str, common: Row) -> Row:
    """One turn of a case in a shape; its row has no numbers where memory ran out."""
    config = settled(**common, **case.settings)
    backend = select(config.device)

    def run() -> Row:
        setting, student = prepare(config, shape)
        timing = time_ours(setting, Ours(student, config), config.batch_size)
        return timed_row(setting, case.name, timing)

    backend.free_memory()
    try:
        row = unless_out_of_memory(run, backend)
    except ConfigError as error:  # the host has no room for what is offloaded
        logger.warning("%s: %s", shape, error)
        row = None
    gc.collect()
    return row or {"kind": "step", "case": case.name, "student": shape, "status": "OOM"}


def _fitting(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "OK"]


def _record(out: Path, case: Case, row: Row) -> None:
    """The figures that one row of a case answers."""
    if case.speed is not None:
        record(out, case.speed, [row["tokens_per_s"]])
    if case.share is not None and row["mfu_frac"] is not None:
        record(out, case.share, [row["mfu_frac"]], digits=3)
    if case.size is not None:
        reserved, room = row["peak_reserved_gib"], CARD.memory_gib - RESERVED_GIB
        if reserved is not None and reserved <= room:
            record(out, case.size, [row["parameters"] / 1e9], digits=2)
        else:
            found = "no GPU" if reserved is None else f"{reserved:.1f} GiB"
            print(
                f"{case.size.name} is not written: {row['student']} reserved {found}, expected at "
                f"most {room:.1f} GiB of one {CARD.name}; measure a smaller --shape there"
            )


if __name__ == "__main__":
    app()
