"""Count the rows of `rows.md` that are full, after checking that their evidence exists.

python speedrun/records/2026-11-29_seed_rows/count.py --figures FILE
"""

import re
import sys
from collections import Counter
from pathlib import Path

from cyclopts import App

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import results
from figures import ROOT, record

from qat.errors import ConfigError
from qat.extensions.lab.commands import current

ROWS = Path(__file__).with_name("rows.md")
ROW = re.compile(r"\| (00[0-4]-\d+) \| .* \| \**(full|partly|missing)\** \| (.*) \|")
NAME = re.compile(r"`([^`]+)`")
FILE = re.compile(r"[\w./-]+\.\w+(::\w+)?")
STATES = ("full", "partly", "missing")
app = App(help=__doc__)


@app.default
def main(*, figures: Path | None = None) -> None:
    """Print the states of all rows and append both figures to FIGURES.

    Raises:
        SystemExit: naming rows without evidence that exists.
    """
    rows = ROW.findall(ROWS.read_text(encoding="utf-8"))
    wrong = [f"{name}: {problem}" for name, *row in rows if (problem := problem_of(*row))]
    if wrong:
        raise SystemExit("\n".join(wrong))
    for seed in sorted({name[:3] for name, *_ in rows}):
        counts = Counter(state for name, state, _ in rows if name.startswith(seed))
        print(seed, *(f"{counts[state]} {state}" for state in STATES))
    full = sum(state == "full" for _, state, _ in rows)
    print(f"{full} of {len(rows)} full")
    record(figures, "seed_rows_full", full, f"of {len(rows)} rows", ">= 214")
    newest = results.newest_of(results.read_records(results.RECORDS)).values()
    commands = [e.figure.command for found in newest for e in found if e.figure.command]
    there = sum(exists(command) for command in commands)
    print(f"{there} of {len(commands)} commands exist")
    goal = f">= {len(commands)}"
    record(figures, "commands_in_results_that_exist", there, "commands", goal)


def problem_of(state: str, evidence: str) -> str:
    """Return what is wrong with the evidence of a row, "" if it exists."""
    found = 0
    for name in NAME.findall(evidence):
        if name.startswith("qat "):
            if not exists(name):
                return f"`{name}` is no command"
        elif FILE.fullmatch(name):
            path, _, test = name.partition("::")
            if not (ROOT / path).is_file():
                return f"{path} does not exist"
            if test and f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8"):
                return f"{path} has no {test}"
        else:
            continue  # a name inside a file
        found += 1
    return "" if found or state != "full" else "no evidence"


def exists(command: str) -> bool:
    """Return whether a command is in the work tree, or its script and flags in a commit."""
    try:
        current(command, ROOT)
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    app()
