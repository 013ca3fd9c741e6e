"""`qat train`: teach a quantized student from a teacher cache."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qat.track.config import TrackConfig
from qat.train.config import TrainConfig

UNTRACKED = TrackConfig()


def train(
    student: str,
    *,
    config: Annotated[TrainConfig, Parameter(name="*")],
    out: Path,
    tracking: Annotated[TrackConfig, Parameter(name="*")] = UNTRACKED,
    resume: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, object]:
    """Train STUDENT, a packed checkpoint, against a teacher cache.

    Args:
        student: checkpoint directory that 'qat convert' wrote (or a run, for its best one).
        config: settings.
        out: run directory to make.
        tracking: who follows the run.
        resume: go on with the run in OUT from its latest checkpoint, if it has one.
    """
    from qat.report.page import write_report
    from qat.track.follow import follow
    from qat.train.start import train_student

    with follow(out, tracking):
        report = train_student(config, student, out, resume=resume)
        if tracking.gdrive_dir is not None:
            write_report([out], out / "report.html")
    return dict(run=out, final=report.final, steps=report.steps, best_nats=report.best)
