"""`qat bench --plan v6e`: memory of a student's step on TPUs that are not at hand.

The largest batch is found by compiling: every size in the results was compiled. `qat bench` reaches
this module by the entry point `tpu` of the group `qat.plans`.
"""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from qat.backend.device import select
from qat.errors import ConfigError
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.find_max import largest_that_fits
from qat.extensions.bench.results import Results, environment
from qat.extensions.lab.tpu_plan.pieces import Compiled, Traceable, check_installed
from qat.extensions.lab.tpu_plan.topologies import TOPOLOGIES, Topology

logger = logging.getLogger(__name__)

MARGIN = 0.1
"""Fraction of the memory left free for the runtime's own buffers and other versions' schedules."""
OCTAVES, STEPS = 16, 4  # the search tries sizes from 1 to below 2**OCTAVES, STEPS in each octave


@dataclass(frozen=True)
class PlanTrial:
    """One compiled batch size."""

    batch_size: int
    fits: bool
    peak_gib: float | None  # peak memory; None if the step did not fit
    needed_gib: float | None  # memory that the step needs, according to the compiler
    trace_s: float
    compile_s: float


@dataclass(frozen=True)
class Planned:
    """COMPILED numbers of one TPU."""

    device: str
    dtype: str
    gradient_checkpointing: bool
    memory_gib: float  # memory that the step may use, without the margin
    trials: tuple[PlanTrial, ...]  # trials in ascending order of size

    @property
    def best(self) -> PlanTrial | None:
        """The largest trial that fits."""
        return max((t for t in self.trials if t.fits), key=lambda t: t.batch_size, default=None)

    @property
    def max_batch(self) -> int:
        """The largest compiled size that fits; 0 if none does."""
        return self.best.batch_size if self.best else 0

    def cells(self) -> tuple[str, ...]:
        """Return its line in the table of predictions."""
        needed = self.best.peak_gib if self.best else self.trials[0].needed_gib
        memory = f"{'-' if needed is None else f'{needed:.1f}'} of {self.memory_gib:.1f} GiB"
        recomputes = "yes" if self.gradient_checkpointing else "no"
        return self.device, self.dtype, recomputes, f"{self.max_batch:,}", memory, "-", "compiled"

    def summary(self) -> dict[str, object]:
        """Return the largest batch, for the last line of the verb."""
        return {
            "device": self.device,
            "gradient_checkpointing": self.gradient_checkpointing,
            "max_batch": self.max_batch,
            "peak_gib": self.best.peak_gib if self.best else None,
        }


def sizes() -> list[int]:
    """Return the batch sizes that a search considers, ascending."""
    parts = range(STEPS, 2 * STEPS)
    return sorted({2**octave * part // STEPS for octave in range(OCTAVES) for part in parts})


def memory_for(topology: Topology, config: BenchConfig) -> float:
    """Return the GiB that a step may take on the chip, or on an emulated smaller one.

    Raises:
        ConfigError: the limit exceeds the chip's memory.
    """
    limit = config.memory_limit_gib
    if limit is not None and limit > topology.hbm_gib:
        raise ConfigError(
            f"memory_limit={limit:.4g}GiB, but a {topology.name} chip has {topology.hbm_gib} GiB; "
            "lower --memory-limit or plan another TPU"
        )
    return (limit or topology.hbm_gib) * (1 - MARGIN)


def plan_tpu(config: BenchConfig, source: str, topology: Topology) -> Planned:
    """Compile the step of `source` at several batch sizes, without a TPU.

    With `--find-max-batch` it searches; otherwise it compiles each of `--batch-sizes`, or
    `--batch-size`.

    Raises:
        ConfigError: the extra is not installed, or the step is not supported.
    """
    memory_gib = memory_for(topology, config)
    planner = Planner(config, source, topology, memory_gib)
    trials: dict[int, PlanTrial] = {}

    def fits(size: int) -> bool:
        began = perf_counter()
        found = planner.compile(size)
        trace_s = perf_counter() - began - found.seconds
        peak = found.peak_gib
        is_within = peak is not None and peak <= memory_gib
        trials[size] = PlanTrial(size, is_within, peak, found.needed_gib, trace_s, found.seconds)
        outcome = "out of memory" if peak is None else f"{peak:.2f} GiB"
        logger.info("%s, batch %d: %s (%.0f s)", topology.name, size, outcome, found.seconds)
        return is_within

    if config.find_max_batch:
        considered = list(config.sizes) or sizes()
        guess = sum(size <= config.batch_size for size in considered)
        largest_that_fits(lambda n: fits(considered[n - 1]), guess, len(considered))
    else:
        for size in config.sizes or (config.batch_size,):
            fits(size)
    ordered = tuple(trials[size] for size in sorted(trials))
    recomputes = config.gradient_checkpointing
    return Planned(f"TPU-{topology.name}", planner.dtype, recomputes, memory_gib, ordered)


def run_tpu_plan(
    config: BenchConfig, student: str, out: Path | None
) -> tuple[Path, tuple[Planned, ...]]:
    """Compile the step for TPUs only, without measuring; also return the directory of results.

    Raises:
        ConfigError: the extra is not installed, or the step is not supported.
    """
    with Results(out, environment(select("cpu"), config)) as results:
        planned = plan_tpus(config, student, results)
        results.finish(margin=MARGIN)
    return results.path, planned


def plan_tpus(config: BenchConfig, student: str, results: Results) -> tuple[Planned, ...]:
    """Plan each named TPU without and with gradient checkpointing; add a row per compiled size.

    Raises:
        ConfigError: see `run_tpu_plan`.
    """
    check_plan(config)
    planned = []
    for topology in map(TOPOLOGIES.__getitem__, config.tpus):
        for recomputes in (False, True):
            setting = config.model_copy(update={"gradient_checkpointing": recomputes})
            found = plan_tpu(setting, student, topology)
            for trial in found.trials:
                results.add(
                    kind="planned",
                    student=student,
                    on=found.device,
                    dtype=found.dtype,
                    gradient_checkpointing=recomputes,
                    memory_gib=found.memory_gib,
                    status="COMPILED" if trial.fits else "OOM",
                    **asdict(trial),
                )
            planned.append(found)
    return tuple(planned)


class Planner:
    """One student's step, traced once, for compilation for one TPU at any batch size."""

    def __init__(
        self, config: BenchConfig, source: str, topology: Topology, memory_gib: float
    ) -> None:
        self.dtype = "bf16" if config.dtype == "auto" else config.dtype
        self._topology = topology
        self._memory_gib = memory_gib
        check_plan(config)
        on_cpu = {"device": "cpu", "dtype": self.dtype, "compile": "off"}
        self._student = Traceable(config.model_copy(update=on_cpu), source)

    def compile(self, batch_size: int) -> Compiled:
        """Compile the whole step at `batch_size` within the given memory."""
        from qat.extensions.lab.tpu_plan.xla import compile_step

        return compile_step(self._student, batch_size, self._topology, self._memory_gib)


def check_plan(config: BenchConfig) -> None:
    """Check that the extra is installed and that these settings can be planned.

    Raises:
        ConfigError: see `run_tpu_plan`.
    """
    check_installed()
    if config.dtype in ("fp16", "tf32"):
        raise ConfigError(
            f"dtype={config.dtype}, but a TPU computes in bf16 or fp32; use --dtype bf16 or fp32"
        )
    fixed = {
        "optimizer": ("adamw", config.optimizer),
        "latent_dtype": ("fp32", config.latent_dtype),
        "grad_accum_steps": (1, config.grad_accum_steps),
        "checkpoint_every": (1, config.checkpoint_every),
    }
    for name, (expected, found) in fixed.items():
        if found != expected:
            raise ConfigError(
                f"{name}={found}, but steps are planned for a TPU with {name}={expected} alone; "
                f"leave out --{name.replace('_', '-')}"
            )
