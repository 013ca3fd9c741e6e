"""The verdict of `qat train --soak`: the first steps of a run against bounds, in one table."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from qat.observe.health import Check, State, health
from qat.observe.runs import TrainingRun, read_directory
from qat.train.launch import LEAST_LOSSES, LaunchConfig

LEFT_OUT = (
    *("speed", "device memory", "host memory", "waiting for data", "slowest rank", "loss"),
    *("held-out", "over-fitting", "GPU, hottest", "resumed", "forced"),
)
"""Health checks that need a long run, or that no bound is about; all others must be ok."""


def judge(path: Path, launch: LaunchConfig) -> list[Check]:
    """Return the checks of the run in `path`; those that failed are `bad`."""
    run = read_directory(path)
    others = [check for check in health(run) if check.name not in LEFT_OUT]
    return [
        _steps(run, launch.soak),
        _falling(run),
        *_bounds(run, launch),
        *(check._replace(state=_state(check.state == "ok")) for check in others),
    ]


def _state(is_met: bool) -> State:
    return "ok" if is_met else "bad"


def _steps(run: TrainingRun, wanted: int) -> Check:
    halts = (event for event in run.events if event["kind"] == "halted")
    # a step that is not logged leaves no heartbeat
    taken = max((line["step"] for line in (*run.heartbeats, *halts)), default=0)
    return Check("steps", _state(taken >= wanted), f"{taken:,}", f"{wanted:,}")


def _falling(run: TrainingRun) -> Check:
    losses = [row["loss_nats"] for row in run.steps]
    limit = "a fall from the first quarter to the last"
    if len(losses) < LEAST_LOSSES:
        found = f"{len(losses)} logged losses: lower --log-every"
        return Check("loss", "bad", found, limit)
    quarter = len(losses) // 4
    first, last = statistics.median(losses[:quarter]), statistics.median(losses[-quarter:])
    return Check("loss", _state(last < first), f"{first:.4g} to {last:.4g} nats", limit)


def _bounds(run: TrainingRun, launch: LaunchConfig) -> Iterator[Check]:
    """Yield the checks of reserved memory, over all ranks, and of the median speed."""
    beats = [beat for each in (run.heartbeats, *run.others) for beat in each]
    reserved = [gib for beat in beats if (gib := beat.get("mem_reserved_gib")) is not None]
    most, speed = launch.soak_reserved_gib, run.tokens_per_s() or 0.0
    if reserved or most:  # a device that does not say what it reserved meets no bound
        is_met = not most or max(reserved, default=most + 1) <= most
        found = f"{max(reserved):.2f} GiB" if reserved else "not known on this device"
        yield Check("reserved memory", _state(is_met), found, f"{most:g} GiB" if most else "-")
    least = launch.soak_tokens_per_s
    limit = f"at least {least:,g}" if least else "-"
    yield Check("tokens/s", _state(speed >= least), f"{speed:,.0f}", limit)
