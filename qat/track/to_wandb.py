"""A run in Weights & Biases, or on the disk for `wandb sync` where that cannot be reached."""

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from qat.track.tracker import Sample, Start

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30
OFFLINE = "wandb: %s: the run is kept here; send it later with 'wandb sync %s'"


class Wandb:
    """Logs with the optimizer step as a metric of its own, so that order does not matter."""

    def __init__(self, start: Start) -> None:
        import wandb

        self.id = start.id or secrets.token_hex(4)
        self._table = wandb.Table
        self._run = _open(start, self.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point of each curve."""
        self._run.log({"step": step, **numbers})

    def samples(self, rows: list[Sample]) -> None:
        """The table of the latest samples."""
        table = self._table(columns=[*Sample._fields], data=[list(row) for row in rows])
        self._run.log({"step": rows[-1].step, "eval/samples": table})

    def flush(self) -> None:
        """Nothing: a process of wandb's own has it already."""

    def close(self, *, failed: bool) -> None:
        """Send what is left."""
        self._run.finish(exit_code=int(failed))


def _open(start: Start, run_id: str) -> Any:
    """Online if somebody is logged in and the server answers, else offline, which is said once."""
    import wandb

    def init(mode: str | None) -> Any:
        return wandb.init(
            project=start.project,
            name=start.name,
            id=run_id,
            resume="allow",
            config=start.config,
            dir=start.directory,
            mode=mode,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_TIMEOUT_S,
                # the command line and the address of a git remote, with the secrets in them; what
                # of it matters is among the run's facts
                x_disable_meta=True,
                disable_git=True,
            ),
        )

    reason = "not logged in"
    # WANDB_MODE=offline and its like are the user's word: wandb follows them by itself
    mode = wandb.setup().settings.mode
    if mode != "online" or wandb.login(prompt=False, verify=False):
        try:
            run = init(None)
        except wandb.errors.CommError as error:
            reason = f"no answer from the server ({str(error).splitlines()[0]})"
            wandb.teardown()  # else the run's id would stay in use
        else:
            logger.info("wandb: %s", run.url if mode == "online" else mode)
            return run
    run = init("offline")
    logger.warning(OFFLINE, reason, run.settings.sync_dir)
    return run
