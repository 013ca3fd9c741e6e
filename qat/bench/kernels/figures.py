"""Figures of a run as records keep them: one JSON object a line, with what measures it again."""

import json
from pathlib import Path
from typing import NamedTuple


class Figure(NamedTuple):
    """A number that a goal is set for."""

    figure: str
    value: float
    unit: str
    goal: str


def record_figures(path: Path, found: list[Figure], environment: dict[str, object]) -> None:
    """Append figures to `path`, made if missing, with command, commit and device."""
    common = {name: environment[name] for name in ("command", "commit", "device")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for figure in found:
            line = {**figure._asdict(), **common, "runs": 1, "spread": None}
            file.write(json.dumps(line) + "\n")
