"""How many questions of GSM8K are answered right, in rows that `qat sample` wrote.

The last number of an answer counts, beside the number behind `####` of the solution. Small whole
numbers are often right by chance: so answers that lie with other questions are counted too.

    qat sample STUDENT --prompts QUESTIONS.jsonl --temperature 0 --out answers.jsonl
    python speedrun/research/measure_answers.py gsm8k/train.jsonl answers.jsonl
"""

import json
import math
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from cyclopts import App

app = App(help=__doc__)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SHUFFLES = 20


@app.default
def measure(solutions: Path, *answers: Path) -> None:
    """Print a line for each file of ANSWERS.

    Parameters
    ----------
    solutions
        Rows of `question` and `answer`.
    """
    right = {
        row["question"]: last_number(row["answer"].rpartition("####")[2])
        for row in rows_of(solutions)
    }
    for path in answers:
        wanted, said = [], []
        for row in rows_of(path):
            question, answer = (each["content"] for each in row["messages"][-2:])
            if question in right:
                wanted.append(right[question])
                said.append(last_number(answer))
        if not wanted:
            raise SystemExit(f"{path} answers no question of {solutions}; name rows that do")
        share, chance = shared(wanted, said), by_chance(wanted, said)
        error = math.sqrt(share * (1 - share) / len(wanted))
        print(
            f"{path.stem}: {share:.4f} +- {error:.4f} of {len(wanted):,} right, "
            f"{chance:.4f} with answers to other questions"
        )


def rows_of(path: Path) -> Iterator[dict]:
    """The rows of a file of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def last_number(text: str) -> float | None:
    """The last number of a text; None if it has none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def shared(wanted: list[float | None], said: list[float | None]) -> float:
    """The share of places at which both say the same number."""
    return statistics.fmean(
        ours is not None and a == ours for a, ours in zip(wanted, said, strict=True)
    )


def by_chance(wanted: list[float | None], said: list[float | None]) -> float:
    """The mean of `shared` over answers that were dealt out anew."""
    shares, draw = [], random.Random(0)  # noqa: S311
    for _ in range(SHUFFLES):
        shares.append(shared(wanted, draw.sample(said, len(said))))
    return statistics.fmean(shares)


if __name__ == "__main__":
    app()
