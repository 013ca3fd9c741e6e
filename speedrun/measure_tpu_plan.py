"""What fits a TPU, without one: seconds of a plan, and the largest batches of a v6e at 64 tokens.

The reference's 24 sequences of 64 tokens and the 32 at which it ran out of memory on a v6e can be
compiled beside ours. Needs the extra tpu-plan. On two cores that nothing else uses:

python speedrun/measure_tpu_plan.py speed --figures runs/tpu_plan/figures.jsonl
python speedrun/measure_tpu_plan.py largest --figures runs/tpu_plan/figures.jsonl
python speedrun/measure_tpu_plan.py largest --memory 16 --guess 1024 --figures ...
python speedrun/measure_tpu_plan.py largest --keep --guess 128 --figures ...
python speedrun/measure_tpu_plan.py reference
python speedrun/measure_tpu_plan.py levels
"""

from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Literal

from cyclopts import App, Parameter
from figures import record
from rich.console import Console

from qat.bench.config import TOPOLOGIES, BenchConfig
from qat.bench.tpu_plan.run import Planned, Planner, memory_for, plan_tpu
from qat.logs import configure

app = App(help=__doc__)
BY_NAME = {topology.name: topology for topology in TOPOLOGIES}
REFERENCE = "24,32"
"""Sequences of 64 tokens that the reference ran on a v6e, and those that it could not."""
TOO_LITTLE = {True: ((512, 10), (1536, 13), (5120, 28.8)), False: ((32, 11), (96, 14.4), (160, 26))}
"""With checkpointing and without: batch sizes, and GiB that the compiler soon finds too little."""


@app.command
def speed(*, figures: Path, shape: str = "qwen3-0.6b", batch_size: int = 512) -> None:
    """Trace and compile one step, as a user's first plan does; imports are not counted."""
    began, busy = perf_counter(), process_time()
    config, v6e = BenchConfig(seq_len=64, gradient_checkpointing=True), BY_NAME["v6e"]
    found = Planner(config, shape, v6e, memory_for(v6e, config)).compile(batch_size)
    seconds, busy = perf_counter() - began, process_time() - busy
    Console().print(f"batch {batch_size}: {found}; {seconds:.1f} s in all")
    record(figures, "planner_seconds", round(seconds, 1), "s", "<= 120")
    record(figures, "planner_cpu_seconds", round(busy, 1), "s", "<= 120")


@app.command
def largest(
    *,
    figures: Path,
    shape: str = "qwen3-0.6b",
    memory: Literal[16, 32] = 32,
    keep: Annotated[bool, Parameter(negative="")] = False,
    guess: int = 512,
) -> None:
    """The largest batch in so many GB, with checkpointing or, with --keep, without it."""
    configure()
    common = {"seq_len": 64, "batch_size": guess, "memory_limit": f"{memory}GiB"}
    config = BenchConfig(**common, gradient_checkpointing=not keep, find_max_batch=True)
    found = plan_tpu(config, shape, BY_NAME["v6e"])
    _show(found)
    name = "planned_max_batch_v6e_l64" + "_16gb" * (memory == 16) + "_kept" * keep
    record(figures, name, found.max_batch, "sequences", "" if keep else ">= 512")
    record(figures, f"{name}_gib", round(found.best.peak_gib, 2), "GiB", "")


@app.command
def reference(*, shape: str = "qwen3-0.6b") -> None:
    """The reference's sizes of batches without and with checkpointing."""
    configure()
    for recomputes in (False, True):
        config = BenchConfig(seq_len=64, gradient_checkpointing=recomputes, batch_sizes=REFERENCE)
        _show(plan_tpu(config, shape, BY_NAME["v6e"]))


@app.command
def levels(*, shape: str = "qwen3-0.6b") -> None:
    """What batches need at the planner's level of optimization and at the compiler's own.

    Told by the compiler's refusals, which cost seconds: whole compiles at its own level take long.
    """
    from qat.bench.tpu_plan.xla import jax

    for recomputes, cases in TOO_LITTLE.items():
        config = BenchConfig(seq_len=64, gradient_checkpointing=recomputes)
        for batch_size, memory_gib in cases:
            needed = {}
            for level in ("UNKNOWN", "O0"):
                jax.config.update("jax_optimization_level", level)
                planner = Planner(config, shape, BY_NAME["v6e"], memory_gib)
                needed[level] = planner.compile(batch_size).needed_gib
            Console().print(f"recomputes={recomputes}, batch {batch_size}: GiB {needed}")


def _show(found: Planned) -> None:
    kept = "with" if found.gradient_checkpointing else "without"
    for trial in found.trials:
        Console().print(f"{found.device} {kept} checkpointing: {trial}")


if __name__ == "__main__":
    app()
