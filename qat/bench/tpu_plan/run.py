"""`qat bench --plan v6e`: what a student's step takes on TPUs that nobody has rented yet."""

from dataclasses import asdict, dataclass
from pathlib import Path

from qat.backend.device import select
from qat.bench.config import BenchConfig
from qat.bench.results import Results, environment
from qat.bench.tpu_plan.search import MARGIN, Planned, plan_tpu
from qat.bench.tpu_plan.topologies import Topology, check_installed


@dataclass(frozen=True)
class PlanReport:
    """What was compiled, for whoever shows it."""

    path: Path
    planned: tuple[Planned, ...]


def run_tpu_plan(
    config: BenchConfig, student: str, topologies: tuple[Topology, ...], out: Path | None
) -> PlanReport:
    """Compile the step for TPUs alone; nothing is measured on this machine.

    Raises:
        ConfigError: the extra is absent, or the step is one that cannot be planned.
    """
    with Results(out, environment(select("cpu"), config)) as results:
        planned = plan_tpus(config, student, topologies, results)
        results.finish(margin=MARGIN)
    return PlanReport(results.path, planned)


def plan_tpus(
    config: BenchConfig, student: str, topologies: tuple[Topology, ...], results: Results
) -> tuple[Planned, ...]:
    """Each topology without and with gradient checkpointing; a row for every size compiled.

    Raises:
        ConfigError: see `run_tpu_plan`.
    """
    if topologies:
        check_installed()
    planned = []
    for topology in topologies:
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
