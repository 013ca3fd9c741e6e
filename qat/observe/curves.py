"""Tells a tracker what a run writes, each line once, over all resumptions of the run."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qat.files import write_atomically
from qat.logs import FACTS, HEARTBEAT, METRICS, RECIPE
from qat.observe.trackers import Event, Sample, Start, Tracker, events
from qat.secrets import scrubbed_in

# Reads a file of JSON lines while it grows.


class Tail:
    """Gives each whole line once. The file may not be there yet, and may only grow."""

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
        return [json.loads(line) for line in whole.splitlines()]


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
        open_tracker: Callable[[Start], Tracker],
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
        state = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._told: dict[str, int] = state.get("told", {})
        config = run_config(self.run)
        self._prompt = str(config.get("train.sample_prompt", ""))
        self._state.parent.mkdir(exist_ok=True)
        start = Start(label, self._project, self._state.parent, config, state.get("id"))
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
    facts = json.loads((run / FACTS).read_text(encoding="utf-8"))
    facts.pop("judged", None)
    tables = {**recipe, "run": facts}
    named = {f"{n}.{key}": value for n, table in tables.items() for key, value in table.items()}
    return scrubbed_in(named)
