"""`qat train`: teach a quantized student from a teacher cache."""

import logging
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qat.errors import QatError
from qat.track.config import TrackConfig
from qat.train.config import TrainConfig

logger = logging.getLogger(__name__)

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
    from qat.track.follow import follow
    from qat.train.start import train_student

    with follow(out, tracking):
        report = train_student(config, student, out, resume=resume)
        if tracking.gdrive_dir is not None:
            _write_page(out)
    return dict(run=out, final=report.final, steps=report.steps, best_nats=report.best)


def _write_page(run: Path) -> None:
    """The report that an upload takes along; a run that has its student does not fail for it."""
    from qat.report.page import write_report

    try:
        write_report([run], run / "report.html")
    except (OSError, QatError) as error:
        logger.warning("no report of %s: %s", run, error)
