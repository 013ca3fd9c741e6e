"""Writes a measured figure where a record keeps them: one JSON object a line."""

import json
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from qat.backend.base import launched

ROOT = Path(__file__).resolve().parents[1]


def record(  # noqa: PLR0917
    path: Path | None,
    figure: str,
    value: float,
    unit: str,
    goal: str,
    *,
    runs: int = 1,
    spread: float | None = None,
    measured: dict[str, object] | None = None,
) -> None:
    """Append a figure with what is needed to measure it again: command, commit, device.

    Args:
        path: a record's figures.jsonl, made if missing; None keeps nothing.
        goal: what the issue asks for, e.g. `<= 40`.
        runs: how many measurements `value` is the mean or median of.
        spread: their standard deviation, in `unit`.
        measured: `command`, `commit` and `device` of earlier results that `value` is computed from,
            by default those of now; and what else belongs to the figure.
    """
    if path is None:
        return
    line = {
        "figure": figure,
        "value": value,
        "unit": unit,
        "goal": goal,
        "command": command(),
        "commit": commit(),
        "device": device(),
        "runs": runs,
        "spread": spread,
        **(measured or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def command() -> str:
    """The command that is running, as a user would type it in the repository's root."""
    script = Path(sys.argv[0]).resolve()
    inside = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    world = launched().world
    start = "python" if world == 1 else f"torchrun --standalone --nproc-per-node {world}"
    return " ".join([start, str(inside), *sys.argv[1:]])


@cache
def commit() -> str:
    """Short hash of the commit checked out, with `-dirty` behind it if tracked files differ.

    "unknown" where no git is, or the tree has no history. It is of the start of the script: this
    module asks once, when it is imported, before anything is measured.
    """
    words = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def device() -> str:
    """The GPU's name, else the number of CPU threads and the machine's architecture."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads, {platform.machine()}"


commit()
