"""What a tracker is, and what it is told of a run: numbers by step, and samples of text."""

import json
import logging
import secrets
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from qat.files import parse_json, write_atomically
from qat.logs import FACTS, HEARTBEAT, METRICS, RECIPE
from qat.secrets import scrubbed_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackerStart:
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
    found = []
    for line in lines:
        kind = line.get("kind", "device")
        numbers = {
            f"{kind}/{name}": value
            for name, value in line.items()
            if name not in NAMES and isinstance(value, int | float) and not isinstance(value, bool)
        }
        found.append(Event(kind, line["step"], numbers, line.get("sample")))
    return found


# A run as TensorBoard's event files.


class TensorBoard:
    """Writes scalars and texts into `tracking/tensorboard`."""

    id = "tensorboard"

    def __init__(self, start: TrackerStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(start.directory / "tensorboard")
        if start.id is None:
            rows = "".join(f"| {key} | {value} |\n" for key, value in start.config.items())
            self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point of each curve."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, rows: list[Sample]) -> None:
        """The newest sample, as a text of its step."""
        step, prompt, text = rows[-1]
        self._writer.add_text("eval/sample", f"**{prompt}**{text}", step)

    def flush(self) -> None:
        """Write the events out."""
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()


# A run in trackio's local database (`trackio show --project qat`).

TALKATIVE = ("trackio", "trackio.run", "trackio.utils")
"""Its modules that print; there is no switch for that."""


class Trackio:
    """Logs into the run of this name; a run that was followed before goes on."""

    def __init__(self, start: TrackerStart) -> None:
        import trackio

        for module in TALKATIVE:  # stdout is the verb's own, and other threads write to it
            vars(import_module(module))["print"] = _log
        self._table = trackio.Table
        self._run = trackio.init(
            project=start.project,
            name=start.name,
            config=start.config,
            resume="never" if start.id is None else "allow",
            embed=False,
        )
        self.id = self._run.name

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point of each curve."""
        self._run.log(dict(numbers), step=step)

    def samples(self, rows: list[Sample]) -> None:
        """The table of the latest samples."""
        table = self._table(columns=[*Sample._fields], data=[list(row) for row in rows])
        self._run.log({"eval/samples": table}, step=rows[-1].step)

    def flush(self) -> None:
        """Nothing: a thread of trackio's own writes every half second."""

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Write out what is left."""
        self._run.finish()


def _log(*words: object, **_: object) -> None:
    logger.debug("trackio: %s", " ".join(map(str, words)))


# A run in Weights & Biases, or on the disk for `wandb sync` where that cannot be reached.

INIT_TIMEOUT_S = 30
OFFLINE = "wandb: %s: the run is kept here; send it later with 'wandb sync %s'"


class Wandb:
    """Logs with the optimizer step as a metric of its own, so that order does not matter."""

    def __init__(self, start: TrackerStart) -> None:
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


def _open(start: TrackerStart, run_id: str) -> Any:
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


class Tail:
    """Gives each whole line of a file of JSON lines once.

    The file may not be there yet, and may only grow.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict]:
        """The objects of the lines that were finished since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [parse_json(line) for line in whole.splitlines()]


FOLDER = "tracking"
"""Of a run directory: what trackers keep there."""
LONGEST_TABLE = 200
"""Samples in a table; it is sent anew with every sample."""


class Curves:
    """Follows the numbers and samples of a run on behalf of one tracker.

    How far it came stands in `tracking/NAME.json`: a resumed run writes lines anew that were cut
    off behind its checkpoint, and those that the tracker has are not told again.
    """

    limit_s = 60.0

    def __init__(
        self,
        run: Path,
        name: str,
        open_tracker: Callable[[TrackerStart], Tracker],
        *,
        project: str = "qat",
    ) -> None:
        self.name = name
        self.run = run
        self._open = open_tracker
        self._project = project
        self._state = run / FOLDER / f"{name}.json"
        self._tails = [Tail(run / METRICS), Tail(run / HEARTBEAT)]
        self._samples: list[Sample] = []

    def begin(self, label: str) -> None:
        """Open the tracker for the run called `label`."""
        state = parse_json(self._state.read_text()) if self._state.exists() else {}
        self._told: dict[str, int] = state.get("told", {})
        config = run_config(self.run)
        self._prompt = str(config.get("train.sample_prompt", ""))
        self._state.parent.mkdir(exist_ok=True)
        start = TrackerStart(label, self._project, self._state.parent, config, state.get("id"))
        self._tracker = self._open(start)
        self._save()

    def poll(self) -> None:
        """Send the numbers that were written since the last poll."""
        new = [event for tail in self._tails for event in events(tail.read())]
        for event in new:
            self._tell(event)
        if new:
            self._tracker.flush()
            self._save()

    def end(self, *, failed: bool) -> None:
        """Close the tracker."""
        self._tracker.close(failed=failed)

    def missing(self) -> str:
        """What an end before its time leaves out."""
        return f"the last of {METRICS} may be missing there"

    def _tell(self, event: Event) -> None:
        if event.sample is not None:
            self._samples.append(Sample(event.step, self._prompt, event.sample))
        if event.step <= self._told.get(event.kind, -1):
            return
        self._tracker.log(event.step, event.numbers)
        if event.sample is not None:
            self._tracker.samples(self._samples[-LONGEST_TABLE:])
        self._told[event.kind] = event.step

    def _save(self) -> None:
        state = {"id": self._tracker.id, "told": self._told}
        write_atomically(self._state, json.dumps(state) + "\n")


def run_config(run: Path) -> dict[str, Any]:
    """Every setting of the run (`train.lr`) and every fact about it (`run.device`).

    Without the hashes of what judges it, which are many.
    """
    recipe = tomllib.loads((run / RECIPE).read_text(encoding="utf-8"))
    facts = parse_json((run / FACTS).read_text(encoding="utf-8"))
    facts.pop("judged", None)
    tables = {**recipe, "run": facts}
    named = {f"{n}.{key}": value for n, table in tables.items() for key, value in table.items()}
    return scrubbed_in(named)
