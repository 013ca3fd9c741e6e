"""Measure how much sooner a teacher speaks when a student drafts for it, one sequence at a time.

Both are timed in turns in one process, by the loops of `qat generate`: from the first piece on the
host to the last but one, so that prompts, captures of graphs and steps behind the end do not count.
Each number of drafted tokens has a row; the figure is that of the best. On a GPU without tuned
tiles run `qat bench kernels --tune` first.

    python speedrun/research/measure_draft.py TEACHER --draft STUDENT --figures FILE.jsonl
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

from speed_case import Column, Figure, Row, record_median, show, tell

from qat.backend.device import seeded, select
from qat.evaluate.config import GenerateConfig
from qat.extensions.decode.draft import Drafted, open_drafted
from qat.generate.sampling import Sampling
from qat.generate.text import (
    closing_tokens,
    continue_rows,
    encode_prompt,
    generation_config,
    open_generator,
)
from qat.models.decoding import Decoder
from qat.models.language_model import LanguageModel

GOAL = ">= 1.5"
ALONE = "teacher alone"
PROMPTS = (
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a Python class for a queue with a fixed capacity, with docstrings and an example.",
    "Explain what a hash table is, and write one in Python without dict.",
    "Write a SQL query that returns the three best paid employees of each department.",
    "What does this do? def f(n): return n if n < 2 else f(n - 1) + f(n - 2)",
    "Write a bash script that renames all .jpeg files below a folder to .jpg.",
)
COLUMNS: tuple[Column, ...] = (
    ("Loop", "case", "{}"),
    ("ms a token", "token_ms", "{:.3f}"),
    ("tokens/s", "tokens_per_s", "{:,.1f}"),
    ("tokens a pass", "accepted", "{:.2f}"),
    ("times alone", "over_alone", "{:.3f}"),
    ("same texts", "same", "{}"),
)


@dataclass(frozen=True)
class Asked:
    """Settings of the texts that are timed."""

    draft_tokens: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 2, 3, 4, 5, 6)
    """Numbers of drafted tokens, each of which is timed."""
    prompts: Path | None = None
    """JSON lines with the field `prompt`; by default six questions about code."""
    name: str = "coder"
    """End of the names of the figures."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    runs: int = 5
    """Runs over all prompts that count; one more warms up."""
    device: str = "auto"
    dtype: str = "auto"
    figures: Path | None = None


@dataclass(frozen=True)
class Text:
    """What one loop said to one prompt, and when."""

    ids: list[int]
    num_timed: int
    """Number of tokens between the first piece and the last."""
    seconds: float
    """Seconds that these took."""
    accepted: float | None


class Stamps:
    """The times at which new tokens come to the host; a streamer of transformers too."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._times: list[float] = []

    def seen(self, rows: list[list[int]]) -> None:
        """Note the new tokens of one row."""
        self._counts.append(len(rows[0]))
        self._times.append(time.perf_counter())

    def put(self, ids: Tensor) -> None:
        """Note a token; the prompt, which comes first, has two dimensions."""
        if ids.dim() == 1:
            self.seen([ids.tolist()])

    def end(self) -> None:
        """Do nothing: the last token has come."""

    def text(self, ids: list[int], accepted: float | None) -> Text:
        """Return the text with its times."""
        return Text(ids, sum(self._counts[1:-1]), self._times[-2] - self._times[0], accepted)


Loops = dict[str, LanguageModel | Decoder | Drafted]
app = App(help=__doc__)
DEFAULTS = Asked()


@app.default
def main(
    teacher: str, *, draft: str, asked: Annotated[Asked, Parameter(name="*")] = DEFAULTS
) -> None:
    """Print a row for each number of drafted tokens, and record how much sooner the best one is."""
    tell(f"{select(asked.device).name()}: {draft} drafts for {teacher}")
    loops, prompts, ends = opened(teacher, draft, asked)
    runs = []
    for number in range(asked.runs + 1):
        runs.append({name: [*texts(loops[name], prompts, ends, asked)] for name in loops})
        tell(f"run {number} of {asked.runs}" if number else "warm")
    rows = [row_of(name, runs[1:]) for name in loops]
    show(rows, columns=COLUMNS)
    best = max(rows[1:], key=lambda row: row["over_alone"])
    tell(f"best: {best['case']}")
    figure = Figure(f"draft_speedup_{asked.name}", "times", GOAL)
    record_median(asked.figures, figure, best["ratios"], digits=3)
    figure = Figure(f"draft_accepted_length_{asked.name}", "tokens a pass", "")
    record_median(asked.figures, figure, [best["accepted"]], digits=3)
    for row, name in ((rows[0], "alone"), (best, "drafted")):
        figure = Figure(f"draft_{name}_tok_s_{asked.name}", "tokens/s", "")
        record_median(asked.figures, figure, [1 / s for s in row["token_s"]], digits=1)


def opened(teacher: str, draft: str, asked: Asked) -> tuple[Loops, list[Tensor], list[int]]:
    """Open both models; return the loops, the prompts `(1, S)`, and the tokens that end a text."""
    generator, tokenizer = open_generator(teacher, device=asked.device, dtype=asked.dtype)
    config = GenerateConfig(draft=draft, device=asked.device, dtype=asked.dtype)
    pair = open_drafted(generator, tokenizer, config)
    loops: Loops = {ALONE: generator}
    for number in asked.draft_tokens:
        loops[f"{number} drafted"] = Drafted(pair.teacher, pair.draft, number)
    lines = [] if asked.prompts is None else asked.prompts.read_text(encoding="utf-8").splitlines()
    asked_for = [json.loads(line)["prompt"] for line in lines] or PROMPTS
    prompts = [encode_prompt(tokenizer, prompt) for prompt in asked_for]
    model = generator if isinstance(generator, LanguageModel) else generator.model
    return loops, prompts, closing_tokens(model, tokenizer.eos_token_id)


def texts(
    loop: LanguageModel | Decoder | Drafted, prompts: list[Tensor], ends: list[int], asked: Asked
) -> Iterator[Text]:
    """Answer every prompt."""
    limit, temperature, top_p = asked.max_new_tokens, asked.temperature, asked.top_p
    for ids in prompts:
        stamps = Stamps()
        with seeded(0):
            if isinstance(loop, LanguageModel):
                config = generation_config(ends, limit, temperature, top_p)
                (row,) = continue_rows(loop, ids, config, streamer=stamps)
            else:
                sampling = Sampling(temperature, top_p)
                (row,) = loop.generate(
                    ids, sampling, max_new_tokens=limit, ends=ends, seen=stamps.seen
                )
        yield stamps.text(row, getattr(loop, "accepted_length", None))


def row_of(name: str, runs: list[dict[str, list[Text]]]) -> Row:
    """One loop's line of the table; `token_s` and `ratios` have a value for each run."""

    def token_s(texts: list[Text]) -> float:
        return sum(text.seconds for text in texts) / sum(text.num_timed for text in texts)

    found = [token_s(run[name]) for run in runs]
    ratios = [token_s(run[ALONE]) / seconds for run, seconds in zip(runs, found, strict=True)]
    last, alone = runs[-1][name], runs[-1][ALONE]
    same = sum(text.ids == other.ids for text, other in zip(last, alone, strict=True))
    # every text counts by its passes
    passes = sum(len(text.ids) / (text.accepted or 1) for text in last)
    return {
        "case": name,
        "token_s": found,
        "token_ms": 1e3 * statistics.median(found),
        "tokens_per_s": 1 / statistics.median(found),
        "accepted": sum(len(text.ids) for text in last) / passes,
        "over_alone": statistics.median(ratios),
        "ratios": ratios,
        "same": f"{same} of {len(last)}",
    }


if __name__ == "__main__":
    app()
