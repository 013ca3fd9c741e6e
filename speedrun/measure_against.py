"""Measure a training step, the largest batch and generation against an older tree of the project.

A refactor should cost no speed. Every measurement is a process of its own that imports `qat` from
one of the two trees; the trees take turns, every second round in reverse order. A figure is the
median over the rounds of the ratio within a round, above 1 where this tree is faster.

python speedrun/measure_against.py OLD_TREE STUDENT --figures FILE.jsonl
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Literal

from cyclopts import App
from figures import ROOT, record

app = App(help=__doc__)
GOAL = ">= 0.98"
GENERATE = """
import json
import sys
from qat.cli.generate import generate
config = generate.__kwdefaults__["config"].model_copy(
    update=dict(prompt="Once upon a time", raw=True, temperature=0.0, max_new_tokens=512)
)
# the first call compiles kernels and captures the step as a graph
rates = [generate(sys.argv[1], config=config)["tokens_per_s"] for _ in range(4)]
print()
print(json.dumps({"tokens_per_s": max(rates[1:])}))
"""
BENCH = ["-m", "qat", "bench"]
LIMIT = "16GiB"  # of a card that most have; a search for less memory is shorter too


@app.default
def main(
    before: Path,
    student: str,
    *,
    figures: Path,
    only: Literal["step", "largest_batch", "generate"] | None = None,
    shape: str = "qwen3-0.6b",
    rounds: int = 3,
) -> None:
    """Measure this tree against the tree BEFORE, in turns.

    Args:
        before: Directory that holds the older `qat`.
        student: Packed checkpoint that both trees open, to generate from.
        figures: File to append the figures to.
        only: The one case to measure; all three by default.
        shape: Published shape whose training step is measured.
        rounds: Number of turns of each tree.
    """
    cases = {
        "step": ([*BENCH, shape, "--batch-sizes", "512", "--steps", "20"], "tokens_per_s"),
        "largest_batch": (
            [*BENCH, shape, "--find-max-batch", "--steps", "3", "--memory-limit", LIMIT],
            "max_batch",
        ),
        "generate": (["-c", GENERATE, student], "tokens_per_s"),
    }
    for case in [only] if only else cases:
        arguments, key = cases[case]
        ratios = []
        for turn in range(rounds):
            trees = [before.resolve(), ROOT]
            rates = {tree: _run(tree, arguments)[key] for tree in trees[:: 1 - 2 * (turn % 2)]}
            ratios.append(rates[ROOT] / rates[trees[0]])
            print(f"{case}: {key} {rates[trees[0]]:g} before, {rates[ROOT]:g} now", flush=True)
        value, spread = statistics.median(ratios), statistics.pstdev(ratios)
        name = f"{case}_over_before"
        record(figures, name, round(value, 4), "x", GOAL, runs=rounds, spread=round(spread, 4))


def _run(tree: Path, arguments: list[str]) -> dict[str, float]:
    """Return the object on the last line that a process with `qat` of `tree` prints.

    Raises:
        SystemExit: the process failed.
    """
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=tree,  # what `-m` and `-c` import from first
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"{' '.join(arguments[:4])} failed in {tree}: {ran.stderr[-2000:]}")
    return json.loads(ran.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    app()
