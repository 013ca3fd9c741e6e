"""The tracker interface, its implementations, and the follower that sends them a run's numbers."""

import json
import logging
import secrets
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from accelerate import tracking
from accelerate.tracking import GeneralTracker

from qat.files import parse_json, write_atomically
from qat.logs import FACTS, HEARTBEAT, METRICS, RECIPE, Tail
from qat.secrets import scrubbed_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackerStart:
    """The arguments that open a tracker."""

    name: str  # name of the run
    project: str
    directory: Path  # a directory for the tracker's own files
    config: dict[str, Any]  # settings and facts of the run: `train.lr`, `run.device`, ...
    id: str | None  # the tracker's ID of the run if it was followed before; None for a new run


class Sample(NamedTuple):
    """A text that the student generated at an evaluation."""

    step: int
    prompt: str
    text: str


class Tracker(Protocol):
    """One run in one tracking library."""

    id: str  # the library's ID of the run
    url: str  # its page, "" if it has none

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one step; their names contain the units."""

    def samples(self, rows: list[Sample]) -> None:
        """Log the latest samples, the newest one last."""

    def flush(self) -> None:
        """Write out what was logged, so that a kill does not lose it."""

    def close(self, *, failed: bool) -> None:
        """End the tracked run; `failed` if the run ended with an error."""


class Event(NamedTuple):
    """One line of a run's files as an event for trackers."""

    kind: str  # `train`, `eval` or `device`
    step: int
    numbers: dict[str, float]  # values by name: `train/loss_nats`, `device/tokens_per_s`
    sample: str | None


NAMES = ("step", "rank", "pid")  # numeric keys of a line that are identifiers, not measurements


def events(lines: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return lines of `metrics.jsonl` and heartbeats (which have no `kind`) as events, in order."""
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


class Accelerated:
    """A tracker of accelerate, which calls the library as its own users do."""

    def __init__(self, tracker: GeneralTracker, run_id: str = "") -> None:
        # its logger and its main process want the state of accelerate's launcher, and making one
        # would set the process's device and threads; followers run in one process anyway
        vars(tracking)["logger"] = logger
        tracker.main_process_only = False
        tracker.start()
        self.id = run_id
        self.url = ""
        self._tracker = tracker

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Add one point to each curve."""
        self._tracker.log(dict(numbers), step=step)

    def samples(self, rows: list[Sample]) -> None:
        """Log the table of the latest samples."""
        data = [list(row) for row in rows]
        table = import_module(self._tracker.name).Table(columns=[*Sample._fields], data=data)
        self.log(rows[-1].step, {"eval/samples": table})

    def flush(self) -> None:
        """Do nothing: the tracker or a thread of the library writes."""

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Write out the rest."""
        self._tracker.finish()


class TensorBoard(Accelerated):
    """Writes scalars and texts to `tracking/tensorboard`."""

    def __init__(self, start: TrackerStart) -> None:
        tracker = tracking.TensorBoardTracker("tensorboard", start.directory)
        super().__init__(tracker, "tensorboard")
        if start.id is None:
            rows = "".join(f"| {key} | {value} |\n" for key, value in start.config.items())
            tracker.log({"config": f"| key | value |\n|---|---|\n{rows}"})

    def samples(self, rows: list[Sample]) -> None:
        """Add the newest sample as a text of its step."""
        step, prompt, text = rows[-1]
        self.log(step, {"eval/sample": f"**{prompt}**{text}"})


class Mlflow(Accelerated):
    """Logs to the server or database of MLFLOW_TRACKING_URI, or to MLflow's own default."""

    def __init__(self, start: TrackerStart) -> None:
        import mlflow

        # it would write the run's address to stdout, which belongs to the verb
        mlflow.environment_variables.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.set(True)
        tracker = tracking.MLflowTracker(start.project, run_id=start.id, run_name=start.name)
        super().__init__(tracker)
        self.id = tracker.tracker.info.run_id
        if start.id is None:
            tracker.store_init_configuration(start.config)

    def samples(self, rows: list[Sample]) -> None:
        """Keep the newest sample as a file of the run."""
        import mlflow

        step, prompt, text = rows[-1]
        mlflow.log_text(prompt + text, f"samples/{step:07d}.txt")

    def close(self, *, failed: bool) -> None:
        """End the run with its state."""
        import mlflow

        mlflow.end_run("FAILED" if failed else "FINISHED")


# Trackio's local database (`trackio show --project qat`).

TALKATIVE = ("trackio", "trackio.run", "trackio.utils")  # they print; there is no option


class Trackio(Accelerated):
    """Logs to the trackio run of this name; a run that was followed before is continued."""

    def __init__(self, start: TrackerStart) -> None:
        for module in TALKATIVE:  # stdout belongs to the verb, and other threads write to it
            vars(import_module(module))["print"] = _log
        resume = "never" if start.id is None else "allow"
        tracker = tracking.TrackioTracker(
            start.project, name=start.name, config=start.config, resume=resume, embed=False
        )
        super().__init__(tracker)
        self.id = tracker.tracker.name


def _log(*words: object, **_: object) -> None:
    logger.debug("trackio: %s", " ".join(map(str, words)))


# Weights & Biases, or files for `wandb sync` if the server cannot be reached.

INIT_TIMEOUT_S = 30
OFFLINE = "wandb: %s: the run is kept here; send it later with 'wandb sync %s'"


class Wandb(Accelerated):
    """Logs the optimizer step as its own metric, so that calls may come in any order.

    The run is online with a login and a reachable server, else offline with one warning.
    """

    def __init__(self, start: TrackerStart) -> None:
        import wandb

        run_id, reason = start.id or secrets.token_hex(4), "not logged in"
        # an explicit WANDB_MODE (offline, disabled, ...) is kept: wandb handles it
        mode = wandb.setup().settings.mode
        is_open = False
        if mode != "online" or wandb.login(prompt=False, verify=False):
            try:
                super().__init__(_tracker(start, run_id, None), run_id)
                is_open = True
            except wandb.errors.CommError as error:
                reason = f"no answer from the server ({str(error).splitlines()[0]})"
                wandb.teardown()  # else the run ID would stay in use
        if not is_open:
            super().__init__(_tracker(start, run_id, "offline"), run_id)
        run = self._tracker.tracker
        self.url = run.url or ""
        if is_open:
            logger.info("wandb: %s", run.url if mode == "online" else mode)
        else:
            logger.warning(OFFLINE, reason, run.settings.sync_dir)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Add one point to each curve."""
        self._tracker.log({"step": step, **numbers})

    def close(self, *, failed: bool) -> None:
        """Upload the rest."""
        self._tracker.tracker.finish(exit_code=int(failed))


def _tracker(start: TrackerStart, run_id: str, mode: str | None) -> GeneralTracker:
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=INIT_TIMEOUT_S,
        # metadata would upload the command line and the git remote's URL with their secrets; the
        # useful part is among the run's facts
        x_disable_meta=True,
        disable_git=True,
    )
    return tracking.WandBTracker(
        start.project, name=start.name, id=run_id, resume="allow", config=start.config,
        dir=start.directory, mode=mode, settings=settings,
    )  # fmt: skip


FOLDER = "tracking"  # the folder of trackers' files in a run directory
LONGEST_TABLE = 200  # most samples in a table, which is sent in full with every new sample


class Curves:
    """Follows the metrics and samples of a run for one tracker.

    The last step sent per kind is stored in `tracking/NAME.json`. A resumed run writes the lines
    after its checkpoint again; steps that the tracker already has are not sent twice.
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
        """Send the numbers written since the last poll."""
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
        """Return a message about what an early end leaves out."""
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
        state = {"id": self._tracker.id, "url": self._tracker.url, "told": self._told}
        write_atomically(self._state, json.dumps(state) + "\n")


def run_config(run: Path) -> dict[str, Any]:
    """Return all settings of the run (`train.lr`) and facts about it (`run.device`).

    The hashes of the held-out sequences are left out: they are many. Secrets are scrubbed.
    """
    recipe = tomllib.loads((run / RECIPE).read_text(encoding="utf-8"))
    facts = parse_json((run / FACTS).read_text(encoding="utf-8"))
    facts.pop("judged", None)
    tables = {**recipe, "run": facts}
    named = {f"{n}.{key}": value for n, table in tables.items() for key, value in table.items()}
    return scrubbed_in(named)
