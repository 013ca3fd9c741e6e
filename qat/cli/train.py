"""`qat train`: teach a quantized student from a teacher cache."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qat.train.config import TrainConfig


def train(
    student: str,
    *,
    config: Annotated[TrainConfig, Parameter(name="*")],
    out: Path,
    resume: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, object]:
    """Train STUDENT, a packed checkpoint, against a teacher cache.

    Args:
        student: checkpoint directory that 'qat convert' wrote (or a run, for its best one).
        config: settings.
        out: run directory to make.
        resume: go on with the run in OUT from its latest checkpoint, if it has one.
    """
    from qat.train.start import train_student

    report = train_student(config, student, out, resume=resume)
    return dict(run=out, final=report.final, steps=report.steps, best_nats=report.best)
