"""How fast sparse attention is beside dense: one layer at two lengths, and a whole training step.

Dense attention is the fastest of PyTorch's kernels, in turns with ours in one run, forward and
backward. Ours includes pooling, scoring, the choice of blocks, their lists and the gates.

python speedrun/measure_nsa.py attention --out runs/nsa_attention
python speedrun/measure_nsa.py step --out runs/nsa_step
"""

from pathlib import Path

from cyclopts import App
from speed_case import EXACT, FROZEN, Figure, Row, record, results_in, settled, show, timed_row

from qat.backend.device import select
from qat.bench.attention import measured, ways_of
from qat.bench.config import AttentionConfig
from qat.bench.measure import Clock, Timing
from qat.bench.results import Results
from qat.bench.run import prepare, time_ours
from qat.bench.student import Ours
from qat.cli.bench import ATTENTION_COLUMNS, ATTENTION_WIDTH
from qat.cli.tables import row_table, wide_console
from qat.kernels.nsa.config import PRESETS
from qat.logs import configure
from qat.nsa.swap import swap_attention, unswap_attention
from qat.nsa.ways import Work

app = App(help=__doc__)
KINDS = {
    "nsa": "nsa_each",
    "nsa-merged": "merged_each",
    "nsa-shared": "nsa",
    "nsa-merged-shared": "merged",
}
"""Presets, and what figures call them: with a choice for each query, and one for 128."""
GOALS = {
    ("nsa-shared", 16384): ">= 1.2",
    ("nsa-shared", 65536): ">= 3.5",
    ("nsa-merged-shared", 16384): ">= 2",
    ("nsa-merged-shared", 65536): ">= 7",
}
STEP = Figure("step_over_dense_32k", "x", ">= 2")
TIMED = ("dense cudnn", "dense flash", "nsa gather", "nsa-merged gather", "nsa-shared flex")
TIMED += ("nsa-merged-shared flex",)


@app.command
def attention(
    *,
    out: Path,
    device: str = "auto",
    lengths: tuple[int, ...] = (16384, 65536),
    repeats: int = 15,
    kinds: tuple[str, ...] = tuple(KINDS),
) -> None:
    """Time one layer of 16 heads over 8, 128 wide."""
    configure()
    backend = select(device)
    config = AttentionConfig(lengths=",".join(map(str, lengths)), device=device, repeats=repeats)
    rows: list[Row] = []
    with results_in(out, config) as results:
        for length in lengths:
            clock = Clock(backend, repeats, config.limit_s)
            rows += one_length(length, kinds, clock, results)
        results.finish()
    wide_console(ATTENTION_WIDTH).print(row_table(ATTENTION_COLUMNS, rows))


def one_length(length: int, kinds: tuple[str, ...], clock: Clock, results: Results) -> list[Row]:
    """The rows of one length, and its figures."""
    work = Work(length, group=2, key_heads=8, width=128, batch=1)
    ways = (way for way in ways_of("train", kinds) if way.name in TIMED)
    rows = measured(ways, work, "train", clock=clock)
    for row in rows:
        results.add(**row)
    able = {row["way"]: row for row in rows if row["status"] == "OK"}
    dense = min((row for row in able.values() if row["is_dense"]), key=lambda row: row["p50_s"])
    for kind in kinds:
        sparse = able.get(f"{kind} gather") or able.get(f"{kind} flex")
        if sparse is not None:
            pairs = zip(dense["samples"], sparse["samples"], strict=True)
            goal = GOALS.get((kind, length), "reported")
            figure = Figure(f"{KINDS[kind]}_over_dense_{length // 1024}k", "x", goal)
            record(results.path, figure, [a / b for a, b in pairs], digits=2)
    return rows


@app.command
def step(
    *,
    out: Path,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    seq_len: int = 32768,
    steps: int = 6,
    rounds: int = 1,
) -> None:
    """Time a whole step of distillation into frozen codes, dense and swapped, one sequence a step.

    The figure is that of `nsa-merged-shared`; the rows of the others stand beside it.
    """
    configure()
    config = settled(**FROZEN, **EXACT, device=device, seq_len=seq_len, steps=steps, batch_size=1)
    kinds = ("dense", "nsa-merged-shared", "nsa-shared", "nsa-merged", "nsa")
    found: dict[str, list[Timing | None]] = {kind: [] for kind in kinds}
    with results_in(out, config) as results:
        setting, student = prepare(config, shape)
        for number in range(rounds):
            for kind in kinds[:: -1 if number % 2 else 1]:
                if kind != "dense":
                    swap_attention(student.model, PRESETS[kind])
                timing = time_ours(setting, Ours(student, config), config.batch_size)
                if kind != "dense":
                    unswap_attention(student.model)
                found[kind].append(timing)
                results.add(**timed_row(setting, kind, timing, kind="round", round=number))
        results.finish()
    show(results.rows, ("Attention", "case", "{}"))
    pairs = zip(found["dense"], found["nsa-merged-shared"], strict=True)
    ratios = [
        merged.tokens_per_s / dense.tokens_per_s for dense, merged in pairs if dense and merged
    ]
    if ratios:
        record(results.path, STEP, ratios, digits=2)


if __name__ == "__main__":
    app()
