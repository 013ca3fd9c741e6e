"""What a tracker is, and what it is told of a run: numbers by step, and samples of text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Start:
    """What a tracker is opened with."""

    name: str
    """Name of the run."""
    project: str
    directory: Path
    """Where the tracker may keep files of its own."""
    config: dict[str, Any]
    """Settings and facts of the run: `train.lr`, `run.device`, ..."""
    id: str | None
    """What the tracker called the run when it was followed before; None for a new one."""


class Sample(NamedTuple):
    """What a student wrote when it was judged."""

    step: int
    prompt: str
    text: str


class Tracker(Protocol):
    """One run in one tracking library."""

    id: str
    """What the library calls the run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take numbers of one step; units are in their names."""

    def samples(self, rows: list[Sample]) -> None:
        """Take the latest samples, the newest one last."""

    def flush(self) -> None:
        """Bring what was taken to where a kill does not lose it."""

    def close(self, *, failed: bool) -> None:
        """The run ended, by an error if `failed`."""


class Event(NamedTuple):
    """One line of a run's files, as trackers take it."""

    kind: str
    """`train`, `eval` or `device`."""
    step: int
    numbers: dict[str, float]
    """By name: `train/loss_nats`, `device/tokens_per_s`."""
    sample: str | None


NAMES = ("step", "rank", "pid")
"""Numbers of a line that name something instead of measuring it."""


def events(lines: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Lines of `metrics.jsonl` and of the heartbeat (which have no `kind`), in their order."""
    return [_event(line) for line in lines]


def _event(line: Mapping[str, Any]) -> Event:
    kind = line.get("kind", "device")
    numbers = {f"{kind}/{k}": v for k, v in line.items() if k not in NAMES and _is_number(v)}
    return Event(kind, line["step"], numbers, line.get("sample"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
