"""Executes every notebook on tiny inputs, as `Run all` would, and counts those that went through.

A cell tagged `parameters` holds lines `%env NAME=VALUE`; their values are replaced by tiny ones.
Cells whose tags name what this machine does not have are left out. A command that fails ends its
notebook.

python speedrun/run_notebooks.py --figures FILE.jsonl
"""

import tempfile
import time
from pathlib import Path
from typing import Literal

import nbformat
from cyclopts import App
from figures import record
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
NEEDS = {"needs-gpu", "needs-tpu", "needs-drive", "needs-network", "needs-vllm"}
"""Tags of cells that only some machines can run."""
CHECK = "assert not get_ipython().user_ns.get('_exit_code'), 'the command above failed'"
TEACHER = "checkpoints/tiny-qwen3"
STEPS = {"STEPS": "2", "BATCH": "2"}
TRAINED = {"TEACHER": TEACHER, "SEQUENCES": "64", **STEPS}
TIMED = {"STUDENT": "tiny", "LENGTH": "8", "BATCHES": "1", "WARMUP": "1"}
CACHED = {"CACHE_DIR": "WORK/00_quickstart/cache"}
TINY: dict[str, dict[str, str]] = {
    "00_quickstart": TRAINED | {"CALIBRATION": "8"},
    "sr001_convert": {
        **CACHED,
        "CHECKPOINT": "WORK/00_quickstart/q4",
        "BASE": TEACHER,
        "CALIBRATION": "8",
    },
    "sr002_train_mlp_only": {
        **CACHED,
        "CHECKPOINT": "WORK/00_quickstart/q2_init",
        "LOSS": "tail",
        **STEPS,
    },
    "sr003_benchmark": TIMED | {"STEPS": "1"},
    "sr007_tpu": TIMED | TRAINED | {"ON": "--device cpu", "TIMED": "1", "CALIBRATION": "8"},
    "nsa": TRAINED
    | {
        "ATTENTION": "speedrun/plans/nsa_tile64.toml",
        "LENGTH": "128",
        "CALIBRATION": "4",
        "FIT": "2",
        "LENGTHS": "256",
    },
    "export_coreml": {"MODEL": TEACHER},
    "serve": TRAINED
    | {
        "VLLM": ".venv-vllm/bin",
        "PORT": "8765",
        "FLAGS": "--enforce-eager --dtype float32 --max-model-len 64",
    },
}
"""Values of the parameters that tests take; in this order, as later ones read what earlier made."""


app = App(help=__doc__)


@app.default
def main(*, figures: Path | None = None, only: Literal[*TINY] | None = None, has: str = "") -> None:
    """Execute all, say how long each took, and record how many went through.

    Args:
        only: the notebook to execute, by its name; all by default.
        has: tags that this machine can run: needs-gpu,needs-tpu,...
    """
    there = frozenset(has.split(",")) & NEEDS
    names = [only] if only else list(TINY)
    with tempfile.TemporaryDirectory() as work:
        executed = sum(went_through(name, Path(work), there) for name in names)
    print(f"{executed} of {len(names)} went through")
    goal = f">= {len(list(NOTEBOOKS.glob('*.ipynb')))}"
    record(figures, "notebooks_executed", executed, "notebooks", goal)
    raise SystemExit(executed < len(names))


def went_through(name: str, work: Path, has: frozenset[str]) -> bool:
    """Execute one notebook and print what came of it."""
    began = time.perf_counter()
    try:
        execute(name, work, has)
    except CellExecutionError as error:
        print(f"{name}: {error}")
        return False
    print(f"{name}: {time.perf_counter() - began:.1f} s")
    return True


def execute(
    name: str, work: Path, has: frozenset[str] = frozenset(), **values: str
) -> NotebookNode:
    """The notebook `name` with outputs, executed on tiny inputs in directories below `work`.

    Args:
        has: tags of what this machine has.
        values: more variables to set beside the parameters.

    Raises:
        CellExecutionError: a cell failed, or a command in it.
    """
    notebook = prepared(name, work, has, values)
    sockets = str(work / "k")  # short: the names of sockets are
    config = Config(KernelManager={"transport": "ipc", "ip": sockets})
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    return NotebookClient(notebook, config=config, timeout=600, resources=resources).execute()


def prepared(name: str, work: Path, has: frozenset[str], more: dict[str, str]) -> NotebookNode:
    """The notebook with tiny parameters, without cells that need what is not there."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    values = {key: value.replace("WORK", str(work)) for key, value in TINY[name].items()}
    values |= {"OUT": str(work / name), **more}
    missing = NEEDS - has
    notebook.cells = [cell for cell in notebook.cells if not missing & tags(cell)]
    for cell in notebook.cells:
        if "parameters" in tags(cell):
            cell.source = "\n".join(f"%env {key}={value}" for key, value in values.items())
        if cell.cell_type == "code":
            cell.source += f"\n{CHECK}"
    return notebook


def tags(cell: NotebookNode) -> set[str]:
    """Return the tags of a cell."""
    return set(cell.metadata.get("tags", ()))


if __name__ == "__main__":
    app()
