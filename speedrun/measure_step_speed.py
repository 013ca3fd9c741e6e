"""Measure the speed of a training step against plain distillation and the reference's step.

All cases take turns, every second round backwards, each alone on the device and compiled anew; a
figure is the median over rounds. A ratio is taken within each round. The reference, plain eager and
torchao's step take one turn.

python speedrun/measure_step_speed.py --out runs/step_speed
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App
from speed_case import (
    CANDIDATES,
    EXACT,
    FROZEN,
    LATENT,
    Figure,
    Row,
    record_median,
    results_in,
    settled,
    show,
    timed_row,
    varied,
)

from qat.extensions.bench.measure import Timing
from qat.extensions.bench.results import Results
from qat.extensions.bench.run import Setting, prepare
from qat.extensions.lab.baselines.run import OWN_SETTINGS, Cases, merged
from qat.logs import configure
from qat.models.language_model import LanguageModel

app = App(help=__doc__)
DEFAULT_LENGTH = 64
SLOW_STEPS = {"steps": 2, "warmup": 1}
"""Measured and warm-up steps of the reference, each of which takes seconds."""


@dataclass(frozen=True)
class Case:
    """One way to take a step, with settings of its own."""

    name: str
    settings: Row
    way: str = "ours"  # a case of `qat bench baselines`
    goal: str | None = None
    """Goal of its tokens per second, which are then recorded as the figure `NAME_tok_s`."""
    is_once: bool = False  # True for a case that takes only one turn


EXACT_FROZEN = FROZEN | EXACT
INPUTS = ("a8", "a8s", "f8")
"""Endings of the presets that quantize inputs: int8, static int8 and FP8."""
REFERENCE_BATCH = {"batch_size": 504}
CASES = (
    Case("frozen_candidates", FROZEN | CANDIDATES, goal=">= 200000"),
    Case("frozen_candidates_504", FROZEN | CANDIDATES | REFERENCE_BATCH),
    Case("mlp_only", FROZEN | CANDIDATES | {"mlp_only": True}, goal=">= 230000"),
    Case("frozen_exact_ckpt", EXACT_FROZEN | {"gradient_checkpointing": True}, goal=">= 130000"),
    Case("frozen_exact", EXACT_FROZEN, goal=">= 160000"),
    *(Case(f"frozen_exact_{kind}", EXACT_FROZEN | {"to": f"q2a4_{kind}"}) for kind in INPUTS),
    Case("plain_compiled", EXACT_FROZEN, way="plain-compiled"),
    Case("latent_exact", LATENT | EXACT),
    Case("latent_tables", LATENT | EXACT | {"to": "speedrun/plans/q2a4_tables4.toml"}),
    Case("latent_levels", LATENT | EXACT | {"to": "q2a2"}),
    Case("latent_vectors", LATENT | EXACT | {"to": "v2a2"}),
    Case(
        "reference_504",
        FROZEN | OWN_SETTINGS["reference"] | REFERENCE_BATCH | SLOW_STEPS,
        way="reference",
        is_once=True,
    ),
    Case("plain_eager", EXACT_FROZEN, way="plain-eager", is_once=True),
    Case("torchao_int2", EXACT_FROZEN, way="torchao-int2", is_once=True),
)
RATIOS = {
    Figure("frozen_exact_over_plain", "x", ">= 1.15"): ("frozen_exact", "plain_compiled"),
    Figure("latent_exact_over_plain", "x", ">= 0.95"): ("latent_exact", "plain_compiled"),
    Figure("over_reference", "x", ">= 50"): ("frozen_candidates_504", "reference_504"),
    Figure("latent_step_over_torchao", "x", ""): ("latent_levels", "torchao_int2"),
    # of times, so the case without comes first
    Figure("table_step_ratio", "x", "<= 1.15"): ("latent_exact", "latent_tables"),
    Figure("vector_step_over_scalar", "x", "<= 1.08"): ("latent_levels", "latent_vectors"),
    **{
        Figure(f"{kind}_step_over_w", "x", "<= 1.06"): ("frozen_exact", f"frozen_exact_{kind}")
        for kind in INPUTS
    },
}
GOALS = {"frozen_exact_over_plain_512": ">= 1.25"}
"""Goals of figures at other lengths than 64 tokens, whose names end in that length."""


@app.default
def measure(
    *,
    out: Path,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    only: str = "",
    rounds: int = 2,
    steps: int = 20,
    batch_size: int = 512,
    seq_len: int = DEFAULT_LENGTH,
) -> None:
    """Write rows, a table and figures to OUT.

    Parameters
    ----------
    only
        Cases to run, joined by commas; all for none.
    batch_size
        Of all cases; those at the reference's batch are capped by it.
    """
    configure()
    common = dict(device=device, steps=steps, batch_size=batch_size, seq_len=seq_len)
    cases = chosen(only)
    with results_in(out, settled(**common)) as results:
        setting, frozen = prepare(settled(**common), shape)
        turns = Turns(setting, frozen, shape)
        try:
            for number in range(rounds):
                for case in cases[:: -1 if number % 2 else 1]:
                    if number == 0 or not case.is_once:
                        results.add(**turns.take(case), round=number)
        finally:
            report(turns, cases, results)


def chosen(only: str) -> tuple[Case, ...]:
    """The cases called `only`, in their order."""
    names = only.split(",") if only else [case.name for case in CASES]
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(f"no case is called {', '.join(unknown)}: {[c.name for c in CASES]}")
    return tuple(case for case in CASES if case.name in names)


class Turns:
    """Runs one case after the other over two students: frozen codes, and latent weights."""

    def __init__(self, setting: Setting, frozen: LanguageModel, shape: str) -> None:
        self._setting = setting
        self._frozen = frozen
        self._shape = shape
        self.seq_len = setting.config.seq_len
        frozen.model.to("cpu")
        self.runners: dict[str, Cases] = {}
        self.timings: dict[str, list[Timing]] = defaultdict(list)

    def take(self, case: Case) -> Row:
        """One turn, as a row."""
        runner = self.cases(case)
        timing = runner.time(case.way)
        if timing is not None:
            self.timings[case.name].append(timing)
        status = runner.unavailable.get(case.way, "OK")
        row = timed_row(runner.setting, case.name, timing, status=status)
        return {**row, "kind": "round"}

    def cases(self, case: Case) -> Cases:
        """The runner of a case, always the same, so that what cannot run is not tried again."""
        if case.name not in self.runners:
            student = self._frozen
            if "weights" in case.settings["learn"] or "to" in case.settings:
                named = {name: case.settings[name] for name in ("to",) if name in case.settings}
                _, student = prepare(self._setting.config.model_copy(update=named), self._shape)
                student.model.to("cpu")
            settings = dict(case.settings)
            for name in ("batch_size", "steps"):
                if name in settings:
                    settings[name] = min(settings[name], getattr(self._setting.config, name))
            self.runners[case.name] = Cases(varied(self._setting, student, **settings), student)
        return self.runners[case.name]

    def row(self, case: Case) -> Row:
        """All turns of a case as one row."""
        timings, runner = self.timings[case.name], self.cases(case)
        found = merged(timings) if timings else None
        status = runner.unavailable.get(case.way, "OK")
        rounds = [timing.tokens_per_s for timing in timings]
        row = timed_row(runner.setting, case.name, found, status=status)
        if rounds:
            row |= {"tokens_per_s": statistics.median(rounds), "tokens_per_s_of_rounds": rounds}
        return row

    def ratios(self, case: str, other: str) -> list[float]:
        """Return the speed of `case` over that of `other` in each round.

        The last turn of `other` stands in for turns that it did not take.
        """
        mine = [timing.tokens_per_s for timing in self.timings[case]]
        theirs = [timing.tokens_per_s for timing in self.timings[other]]
        if not mine or not theirs:
            return []
        theirs += theirs[-1:] * (len(mine) - len(theirs))
        return [a / b for a, b in zip(mine, theirs, strict=False)]


def report(turns: Turns, cases: Sequence[Case], results: Results) -> None:
    """A row for each case that took a turn, the table, and every figure that was measured."""
    rows = [turns.row(case) for case in cases if case.name in turns.runners]
    for row in rows:
        results.add(**row)
    results.finish()
    show(rows, ("Case", "case", "{}"))
    path, length = results.path / "figures.jsonl", turns.seq_len

    def named(figure: Figure) -> Figure:
        if length == DEFAULT_LENGTH:
            return figure
        name = f"{figure.name}_{length}"
        return Figure(name, figure.unit, GOALS.get(name, ""))

    for case in cases:
        if case.goal and turns.timings.get(case.name):
            speeds = [timing.tokens_per_s for timing in turns.timings[case.name]]
            figure = Figure(f"{case.name}_tok_s", "tokens/s", case.goal)
            record_median(path, named(figure), speeds)
    for figure, (case, other) in RATIOS.items():
        if found := turns.ratios(case, other):
            record_median(path, named(figure), found, digits=3)


if __name__ == "__main__":
    app()
