"""Result files of a benchmark: results.jsonl row by row, results.csv and results.json at the end.

Every row has all that is needed to read it alone: commit, device, versions, model and settings.
"""

import csv
import io
import json
import platform
import shlex
import subprocess
import sys
import uuid
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

import torch

import qat
from qat.backend import nvidia
from qat.backend.base import Backend
from qat.backend.base import environment as variables
from qat.config import Settings, fingerprint
from qat.files import check_free, write_atomically
from qat.logs import JsonLines
from qat.secrets import scrubbed, scrubbed_in
from qat.train.run import git_commit

HOME = Path("runs/bench")
ROWS, TABLE, WHOLE = "results.jsonl", "results.csv", "results.json"
PACKAGES = ("torch", "triton", "transformers", "torchao")
IN_EVERY_ROW = (
    *("commit", "branch", "dirty", "device", "gpus", "cpu", "threads", "host", "run"),
    *("python", "torch", "triton", "cuda"),
)
NOT_IN_TABLE = ("samples", "slowest_steps")


class Results:
    """The result directory of one benchmark, created with its first row.

    A context manager: the rows measured before an error stay in the file.
    """

    def __init__(self, out: Path | None, environment: dict[str, object]) -> None:
        self.path = out or HOME / datetime.now().strftime("%Y%m%d-%H%M%S")
        check_free(self.path, in_place=True)
        self.environment = environment
        self.rows: list[dict[str, object]] = []
        self._lines: JsonLines | None = None

    def add(self, **row: object) -> None:
        """Append one row to the file of rows, with the key facts of the environment."""
        if self._lines is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lines = JsonLines(self.path / ROWS)
        common = {name: self.environment[name] for name in IN_EVERY_ROW}
        self.rows.append({**row, **common})
        self._lines.write(**self.rows[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close()

    def finish(self, **summary: object) -> None:
        """Write the CSV table and the JSON file, after the last row."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / TABLE, as_csv(self.rows))
        whole = {"environment": self.environment, **summary, "rows": self.rows}
        write_atomically(self.path / WHOLE, json.dumps(whole, indent=1, default=str) + "\n")


def environment(backend: Backend, config: Settings) -> dict[str, object]:
    """Return the environment of the numbers: versions, device, command, settings."""
    return {
        **origin(),
        "device": backend.name(),
        "device_memory_gib": backend.memory_gib(),
        "config": config.model_dump(mode="json", exclude_none=True),
        "config_fingerprint": config.fingerprint(),
    }


def origin() -> dict[str, object]:
    """Return the code, versions, machine and command, without opening a device."""
    gpu = nvidia.present()
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": scrubbed(shlex.join(["qat", *sys.argv[1:]])),
        "commit": git_commit(),
        "branch": _git("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": has_changes(),
        "run": uuid.uuid4().hex[:12],
        **{name: installed_version(name) for name in PACKAGES},
        "qat": qat.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "driver": gpu.driver if gpu else None,
        "gpus": len(gpu.capabilities) if gpu else 0,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "host": fingerprint(platform.node()),
        "variables": scrubbed_in(variables()),
    }


def as_csv(rows: list[dict[str, object]]) -> str:
    """Return rows as CSV, with a column for every key of any row except the raw samples."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [key for key in keys if key not in NOT_IN_TABLE]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def has_changes() -> bool | None:
    """Return whether tracked files differ from the commit; None outside a checkout."""
    found = _git("status", "--porcelain", "--untracked-files=no")
    return None if found is None else bool(found)


def _git(*words: str) -> str | None:
    """Return what git prints about the running code; None outside a checkout."""
    command = ["git", "-C", str(Path(qat.__file__).parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name() -> str:
    """Return the processor's name as the operating system reports it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    """Return the version of a package in this Python; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
