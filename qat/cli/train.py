"""`qat train`: teach a quantized student from a teacher cache."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from qat.cli.export import show_targets
from qat.cli.health import show_end, show_health
from qat.cli.parser import print_result
from qat.config import Careful, Required
from qat.errors import QatError
from qat.logs import RECIPE
from qat.losses.config import parse_losses
from qat.observe.follow import TrackConfig
from qat.train.config import TrainConfig

if TYPE_CHECKING:
    from qat.ranks import Ranks

logger = logging.getLogger(__name__)

UNTRACKED = TrackConfig()
Flag = Annotated[bool, Parameter(negative=())]


def train(
    student: Required[str],
    *,
    config: Annotated[TrainConfig, Parameter(name="*")],
    out: Required[Path],
    tracking: Annotated[TrackConfig, Parameter(name="*")] = UNTRACKED,
    resume: Careful[Literal["latest", "auto"] | None] = None,
    dry_run: Careful[Flag] = False,
    force: Careful[Flag] = False,
) -> dict[str, object]:
    """Train STUDENT, a packed checkpoint, against a teacher cache.

    Args:
        student: checkpoint directory that 'qat convert' wrote (or a run, for its best one).
        config: settings.
        out: run directory to make.
        tracking: who follows the run.
        resume: go on with the run in OUT, if there is one, from its newest checkpoint that is
            whole (`latest` may be left out). Where OUT is gone, as in a new session, it is brought
            back from --gdrive-dir. `auto`, for jobs that restart by themselves, also begins anew
            where a run was killed before its first checkpoint, and keeps what that one recorded.
        dry_run: take a few steps, say how long the run will take, what it will hold and what
            speaks against it, and leave nothing behind.
        force: train in spite of the preflight's errors (recorded in run.json).
    """
    from qat.cli.inputs import check_inputs, with_fitting_loss

    parse_losses(config.loss)
    check_inputs(models=[student, config.teacher], caches=[config.cache_dir], out=out)
    if config.teacher is None:
        config = with_fitting_loss(config, config.cache_dir)
    from qat.backend.device import select
    from qat.observe.follow import follow
    from qat.observe.restore import restore
    from qat.ranks import joined
    from qat.train.start import train_student

    session = select(config.device).session(config.xla_cache_dir)
    with session, joined(config.device) as ranks:
        if dry_run:
            return ranks.together(lambda: _dry_run(config, student, out, ranks=ranks))
        if resume is not None and tracking.gdrive_dir is not None:
            ranks.together(lambda: restore(out, tracking.gdrive_dir) if ranks.is_first else None)
        forced = []
        if not (out / RECIPE).exists():  # what goes on has been looked at, or is refused
            forced = ranks.together(
                lambda: _preflight(config, student, out, ranks=ranks, force=force)
            )
        with follow(out, tracking if ranks.is_first else UNTRACKED):
            report = train_student(
                config,
                student,
                out,
                resume=resume is not None,
                begins_anew=resume == "auto",
                forced=forced,
                ranks=ranks,
            )
            if tracking.gdrive_dir is not None and ranks.is_first:
                _write_page(out)
        if not ranks.is_first:
            return {}
    show_health(out)
    show_end(out, report, config)
    return dict(run=out, final=report.final, steps=report.steps, best_nats=report.best)


def _preflight(
    config: TrainConfig, student: str, out: Path, *, ranks: "Ranks", force: bool
) -> list[str]:
    """The codes of the errors that `force` goes on in spite of; the first rank looks for all."""
    from qat.cli.findings import show_findings
    from qat.models.source import resolve
    from qat.train.preflight import codes_forced, examine

    if not ranks.is_first:
        return []
    checked = examine(config, student, out, world=ranks.size)
    show_targets(Path(resolve(student)), adapters="lora" in config.kinds)
    if checked.is_long or checked.errors():
        show_findings(checked)
    return codes_forced(checked.findings, force=force)


def _dry_run(config: TrainConfig, student: str, out: Path, *, ranks: "Ranks") -> dict[str, object]:
    from qat.cli.findings import predicted, show_findings
    from qat.train.preflight import examine, refuse

    if not ranks.is_first:
        return {}
    checked = examine(config, student, out, world=ranks.size, measures=True)
    show_findings(checked)
    found = predicted(checked, config, out)
    if checked.errors():
        print_result(found)
        refuse(checked.findings)
    return found


def _write_page(run: Path) -> None:
    """The report that an upload takes along; a run that has its student does not fail for it."""
    from qat.observe.page import write_report

    try:
        write_report([run], run / "report.html")
    except (OSError, QatError) as error:
        logger.warning("no report of %s: %s", run, error)
