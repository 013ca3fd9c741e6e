"""What fits a TPU, without one: seconds of a plan, and the largest batch of a 32 GB v6e at 64.

Both the reference's 24 sequences of 64 tokens and the 32 at which it ran out of memory on a v6e
are compiled beside ours. Needs the extra tpu-plan. On two cores that nothing else uses:

python speedrun/measure_tpu_plan.py speed --figures runs/tpu_plan/figures.jsonl
python speedrun/measure_tpu_plan.py largest --figures runs/tpu_plan/figures.jsonl
"""

from pathlib import Path
from time import perf_counter

from cyclopts import App
from figures import record
from rich.console import Console

from qat.bench.config import BenchConfig
from qat.bench.tpu_plan.compiling import Planner
from qat.bench.tpu_plan.search import Planned, plan_tpu
from qat.bench.tpu_plan.topologies import TOPOLOGIES
from qat.logs import configure

app = App(help=__doc__)
BY_NAME = {topology.name: topology for topology in TOPOLOGIES}
REFERENCE = "24,32"
"""Sequences of 64 tokens that the reference ran on a v6e, and those that it could not."""


@app.command
def speed(*, figures: Path, shape: str = "qwen3-0.6b", batch_size: int = 512) -> None:
    """Trace and compile one step, as a user's first plan does; imports are not counted."""
    began = perf_counter()
    config = BenchConfig(seq_len=64, gradient_checkpointing=True)
    found = Planner(config, shape, BY_NAME["v6e"]).compile(batch_size)
    seconds = perf_counter() - began
    Console().print(f"batch {batch_size}: {found}; {seconds:.1f} s in all")
    record(figures, "planner_seconds", round(seconds, 1), "s", "<= 120")


@app.command
def largest(*, figures: Path, shape: str = "qwen3-0.6b", guess: int = 512) -> None:
    """The largest batch with checkpointing, then the reference's sizes without and with it."""
    configure()
    common = {"seq_len": 64, "batch_size": guess}
    config = BenchConfig(**common, gradient_checkpointing=True, find_max_batch=True)
    found = plan_tpu(config, shape, BY_NAME["v6e"])
    _show(found)
    record(figures, "planned_max_batch_v6e_l64", found.max_batch, "sequences", ">= 512")
    for recomputes in (False, True):
        beside = BenchConfig(**common, gradient_checkpointing=recomputes, batch_sizes=REFERENCE)
        _show(plan_tpu(beside, shape, BY_NAME["v6e"]))


def _show(found: Planned) -> None:
    kept = "with" if found.gradient_checkpointing else "without"
    for trial in found.trials:
        Console().print(f"{found.device} {kept} checkpointing: {trial}")


if __name__ == "__main__":
    app()
