"""The figures of docs/quality.md, from the rows that `qat bench quality` left.

    python speedrun/quality_figures.py runs --figures figures.jsonl
    python speedrun/quality_figures.py tables runs/stories15m
    python speedrun/quality_figures.py equal-time runs/minimind2 --figures figures.jsonl
    python speedrun/quality_figures.py over-baselines runs/smollm2 --figure NAME --figures FILE
    python speedrun/quality_figures.py whole runs/smollm2 --most 2.5 --figure NAME --figures FILE
    python speedrun/quality_figures.py suite runs/coder suite.json --name N --bits B --figures FILE
    python speedrun/quality_figures.py own-words runs/onpolicy_smollm2 --figures FILE
    python speedrun/quality_figures.py activations runs/stories15m runs/smollm2 --figures FILE

`runs` holds one directory of results a teacher: stories15m, minimind2, tiny_qwen3, teacher88m.
"""

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App
from figures import record

app = App(help=__doc__)
TEACHERS = ("stories15m", "minimind2", "tiny_qwen3", "teacher88m")
OURS, UNIFORM, TWO_BITS = "mixed bits", "q2a4", "q2a2"
SAMPLED, FULL = "q2a4, sampled", "q2a4, full teacher"
TIMED, FORMED = "reference, our seconds", "reference formed, our seconds"
CACHED, OWN, TIMED_SO = "cached", r"own words|half and half", ", equal seconds"
EVERY, REAL = ".*", "smollm2"
MIXED_A8, EDGERAZOR_A8 = "v2a2 mixed, 2.79, a8kv8", "EdgeRazor, 2.79 bits, a8kv8"
GAPS = (
    ("a8_kl_gap", "q2a4_a8", UNIFORM, EVERY, "<= 1.10"),
    ("a8_static_kl_gap", "q2a4_a8s", UNIFORM, EVERY, "<= 1.25"),
    ("a8kv8_kl_gap", "q2a4_a8kv8", UNIFORM, EVERY, "<= 1.15"),
    ("edgerazor_kl_ratio", MIXED_A8, EDGERAZOR_A8, REAL, "<= 0.5"),
)
"""Figures of quantized inputs: a recipe, what it is compared with, and on which teachers."""
NUMBERS = ("linear_bits", "top1_frac", "ppl", "steps", "seconds")


@dataclass(frozen=True)
class Results:
    """The rows of one teacher."""

    name: str
    rows: list[dict]

    @property
    def text(self) -> str:
        """The first text that was judged on."""
        return self.rows[0]["text"]

    @property
    def steps(self) -> int:
        """The budget that recipes share."""
        ours = (row["steps"] for row in self.rows if row["method"] == "qat")
        return statistics.mode(steps for steps in ours if steps)

    def of(self, recipe: str, text: str | None = None) -> list[dict]:
        """A recipe's rows on one text, a seed each."""
        text = self.text if text is None else text
        return [row for row in self.rows if row["recipe"] == recipe and row["text"] == text]

    def kl(self, recipe: str) -> float:
        """Its mean KL on the first text, in nats."""
        return statistics.fmean(row["kl_nats"] for row in self.of(recipe))

    def size(self, recipe: str) -> float:
        """Its bits per weight of the linears, which alone differ between the methods."""
        return self.of(recipe)[0]["linear_bits"]

    def spread(self, recipe: str) -> float:
        """The standard deviation of that KL over seeds; 0 of one seed."""
        found = [row["kl_nats"] for row in self.of(recipe)]
        return statistics.stdev(found) if len(found) > 1 else 0.0

    def best(self, reference: str) -> str:
        """Our best recipe at equal steps that is no larger than that reference."""
        most = self.size(reference)
        ours = dict.fromkeys(r["recipe"] for r in self.rows if r["method"] == "qat")
        equal = [name for name in ours if self.of(name)[0]["steps"] == self.steps]
        return min((n for n in equal if self.size(n) <= most), key=self.kl)

    def over(self, reference: str) -> float:
        """Our KL over that reference's."""
        return self.kl(self.best(reference)) / self.kl(reference)

    def gains(self, key: str) -> list[float]:
        """Return the best mean of `key` on own words over that on cached rows, at each size.

        The best is the least over all schemes of own words at equal steps.
        """
        names = dict.fromkeys(row["recipe"] for row in self.rows)
        mean = {name: statistics.fmean(row[key] for row in self.of(name)) for name in names}
        schemes = [n for n in names if re.search(OWN, n) and not n.endswith(TIMED_SO)]
        return [
            min(mean[n] for n in schemes if n.startswith(cached.removesuffix(CACHED)))
            / mean[cached]
            for cached in names
            if cached.endswith(CACHED)
        ]

    def baselines(self) -> list[str]:
        """Return the recipes of other methods: those at equal steps, and those without training."""
        names = dict.fromkeys(
            r["recipe"] for r in self.rows if r["method"] not in {"qat", "teacher"}
        )
        return [name for name in names if name not in {TIMED, FORMED}]

    def tuned_reference(self) -> str:
        """The reference's best recipe at equal steps, whatever its start and learning rate."""
        names = [n for n in self.baselines() if self.of(n)[0]["method"] == "reference"]
        return min(names, key=self.kl)

    def beats(self, recipe: str) -> bool:
        """Return whether `OURS`, no larger, beats the KL of `recipe` by more than the spread."""
        bits = [self.size(name) for name in (OURS, recipe)]
        gap = self.kl(recipe) - self.kl(OURS)
        return bits[0] <= bits[1] and gap > max(self.spread(recipe), self.spread(OURS))


@app.default
def figures_of(runs: Path, *, figures: Path) -> None:
    """Append every figure to FIGURES, with the commit of its worst teacher; print all teachers."""
    found = [Results(name, read(runs / name / "results.jsonl")) for name in TEACHERS]
    by_name = {each.name: each for each in found}
    stories, large = by_name["stories15m"], by_name["teacher88m"]

    def put(  # noqa: PLR0917
        of: Results, figure: str, value: float, unit: str, goal: str, **more: object
    ) -> None:
        measured = {key: of.rows[0][key] for key in ("commit", "device")}
        record(figures, figure, round(value, 4), unit, goal, measured=measured, **more)

    def put_worst(figure: str, values: dict[str, float], unit: str, goal: str) -> None:
        print(figure, {name: round(value, 4) for name, value in values.items()})
        worst = (max if goal.startswith("<") else min)(values, key=values.__getitem__)
        put(by_name.get(worst, large), figure, values[worst], unit, goal)

    for figure, recipe, goal in (
        ("stories15m_kl_converted", f"{UNIFORM}, converted only", "<= 0.5"),
        ("stories15m_kl_mlp2_attn4", UNIFORM, "<= 0.10"),
        ("stories15m_kl_all2", TWO_BITS, "<= 0.20"),
    ):
        runs_of = len(stories.of(recipe))
        spread = stories.spread(recipe) if runs_of > 1 else None
        put(stories, figure, stories.kl(recipe), "nats/token", goal, runs=runs_of, spread=spread)
    ratios = {each.name: each.over(each.tuned_reference()) for each in found}
    put_worst("kl_over_reference_steps", ratios, "", "<= 0.333")
    put_worst("kl_over_reference_time", {e.name: e.over(TIMED) for e in found}, "", "<= 0.2")
    beaten = {each.name: all(map(each.beats, each.baselines())) for each in found}
    put_worst("beats_every_baseline", beaten, "", "1")
    put_worst("sampled_gap_in_spreads", {e.name: gap_in_spreads(e) for e in found}, "", "<= 1")
    gaps = {text: ppl_gap(large, text) for text in dict.fromkeys(r["text"] for r in large.rows)}
    put_worst("ppl_gap_100m_2bit", gaps, "perplexity", "<= 3")
    gains = {each.name: each.kl(UNIFORM) - each.kl(OURS) for each in found}
    put_worst("mixed_bits_gain", gains, "nats/token", "> 0")
    put(stories, "bits_per_mlp_weight", mlp_bits(runs / stories.name), "bits", "<= 2.6")


@app.command
def equal_time(*directories: Path, figures: Path) -> None:
    """Append the worst KL over that of the reference's formed twin in our seconds; print all."""
    found = [Results(each.name, read(each / "results.jsonl")) for each in directories]
    values = {each.name: round(each.over(FORMED), 4) for each in found}
    print("kl_over_formed_reference_time", values)
    worst = max(found, key=lambda each: values[each.name])
    measured = {key: worst.rows[0][key] for key in ("commit", "device")}
    name, value = "kl_over_formed_reference_time", values[worst.name]
    record(figures, name, value, "", "<= 0.2", measured=measured)


@app.command
def over_baselines(
    directory: Path, *, figure: str, goal: str, figures: Path, recipe: str = "", kl: str = ""
) -> None:
    """Append our KL over the best baseline's, and with `kl` every recipe's own as `KL_recipe`.

    Ours is RECIPE, or else the best of those that are no larger than that baseline and trained as
    long.
    """
    results = Results(directory.name, read(directory / "results.jsonl"))
    measured = {key: results.rows[0][key] for key in ("commit", "device")}
    best = min(results.baselines(), key=results.kl)
    ours = recipe or results.best(best)
    sizes = {name: round(results.size(name), 3) for name in (ours, best)}
    print(f"{figure}: {ours} beside {best}, {sizes} bits")
    ratio = round(results.kl(ours) / results.kl(best), 4)
    record(figures, figure, ratio, "", goal, measured=measured, runs=len(results.of(ours)))
    names = dict.fromkeys(
        row["recipe"] for row in results.rows if kl and row["method"] != "teacher"
    )
    for name in names:
        slug = "_".join(re.findall(r"[a-z0-9.]+", name.lower()))
        runs = len(results.of(name))
        spread = round(results.spread(name), 4) if runs > 1 else None
        value = round(results.kl(name), 4)
        record(figures, f"{kl}_{slug}", value, "nats/token", "", measured=measured, runs=runs,
               spread=spread)  # fmt: skip


@app.command
def whole(directory: Path, *, most: float, figure: str, goal: str, figures: Path) -> None:
    """Append the least KL of our recipes whose whole file has no more than MOST bits per weight."""
    results = Results(directory.name, read(directory / "results.jsonl"))
    ours = {r["recipe"]: r for r in results.rows if r["method"] == "qat"}
    names = [name for name, row in ours.items() if row["bits_per_weight"] <= most]
    if not names:
        raise SystemExit(f"no recipe of ours in {directory} has {most:g} bits or fewer")
    best = min(names, key=results.kl)
    row, runs = ours[best], len(results.of(best))
    print(f"{figure}: {best}, {row['bits_per_weight']:.3f} bits, {row['megabytes']:.1f} MB")
    measured = {"commit": row["commit"][:12], "device": row["device"]}
    spread = round(results.spread(best), 4) if runs > 1 else None
    value = round(results.kl(best), 4)
    record(figures, figure, value, "nats/token", goal, measured=measured, runs=runs,
           spread=spread)  # fmt: skip


@app.command
def suite(directory: Path, file: Path, *, name: str, bits: str, figures: Path) -> None:
    """Append what a student in DIRECTORY keeps of each task of a suite, and how long that took."""
    judged = json.loads(file.read_text(encoding="utf-8"))
    row = read(directory / "results.jsonl")[-1]
    here = {"commit": row["commit"][:12], "device": row["device"]}
    goals = {"humaneval": {"2.5": ">= 0.80", "3.25": ">= 0.92"}.get(bits, "stated")}
    for task, found in judged["tasks"].items():
        scores = {model: round(found[model]["value"], 4) for model in ("teacher", "student")}
        kept = {key: round(value, 4) for key, value in found["retention"].items()}
        measured = {**here, **scores, "stderr": kept["stderr"]}
        record(figures, f"{name}_{task}_retention_{bits}", kept["value"], "fraction",
               goals.get(task, "stated"), measured=measured)  # fmt: skip
    seconds = judged["seconds"]
    minutes = round(sum(seconds.values()) / 60, 2)
    record(figures, "suite_minutes", minutes, "minutes", "<= 3", measured={**here, **seconds})


@app.command
def own_words(*directories: Path, figures: Path) -> None:
    """Append what learning on a student's own words is worth, of the worst teacher and size.

    At equal tokens the KL on own words of the best scheme over that of cached rows alone; and the
    same of the KL on the first text.
    """
    found = [Results(each.name, read(each / "results.jsonl")) for each in directories]
    for figure, key, goal in (
        ("onpolicy_gain_own_samples", "kl_own_nats", "<= 0.8"),
        ("onpolicy_gain_teacher_text", "kl_nats", ""),
    ):
        ratios = [(ratio, each) for each in found for ratio in each.gains(key)]
        value, worst = max(ratios, key=lambda pair: pair[0])
        print(figure, [(each.name, round(ratio, 4)) for ratio, each in ratios])
        # of most rows: a table is gone on with on whatever machine there is
        measured = {k: statistics.mode(row[k] for row in worst.rows) for k in ("commit", "device")}
        record(figures, figure, round(value, 4), "", goal, measured=measured)


@app.command
def activations(*directories: Path, figures: Path) -> None:
    """Append what quantized inputs cost, of the worst teacher: the KL over that of weights alone.

    And the KL over EdgeRazor's, whose inputs and cache are of 8 bits too. At equal steps; rows that
    were not run give no figure.
    """
    found = [Results(each.name, read(each / "results.jsonl")) for each in directories]
    for figure, recipe, other, teachers, goal in GAPS:
        both = [e for e in found if re.fullmatch(teachers, e.name) and e.of(recipe) and e.of(other)]
        ratios = {each.name: each.kl(recipe) / each.kl(other) for each in both}
        if not ratios:
            continue
        print(figure, {name: round(ratio, 4) for name, ratio in ratios.items()})
        worst = max(ratios, key=ratios.__getitem__)
        rows = next(each for each in found if each.name == worst).of(recipe)
        measured = {key: rows[0][key] for key in ("commit", "device")}
        record(
            figures, figure, round(ratios[worst], 4), "", goal, runs=len(rows), measured=measured
        )


@app.command
def tables(*directories: Path) -> None:
    """Print a narrow table for each directory of results, the least KL first."""
    for directory in directories:
        results = Results(directory.name, read(directory / "results.jsonl"))
        texts = list(dict.fromkeys(row["text"] for row in results.rows))
        judged = [*(f"KL {text}" for text in texts), "top-1", "ppl"]
        print(f"\n{results.name}, {results.steps:,} steps\n")
        print_row(["recipe", "bits of linears", "seeds", *judged, "steps", "seconds"])
        print_row(["---", *["---:"] * (len(judged) + 4)])
        names = dict.fromkeys(row["recipe"] for row in results.rows)
        for name in sorted(names, key=results.kl):
            print_row(cells(results, name, texts))


def cells(results: Results, recipe: str, texts: list[str]) -> list[str]:
    """A recipe's line."""
    rows = results.of(recipe)
    spread = f" +- {results.spread(recipe):.4f}" if len(rows) > 1 else ""
    others = [
        f"{statistics.fmean(row['kl_nats'] for row in results.of(recipe, text)):.4f}"
        for text in texts[1:]
    ]
    mean = {key: statistics.fmean(row[key] for row in rows) for key in NUMBERS}
    return [
        recipe,
        f"{mean['linear_bits']:.2f}",
        str(len(rows)),
        f"{results.kl(recipe):.4f}{spread}",
        *others,
        f"{mean['top1_frac']:.3f}",
        f"{mean['ppl']:.2f}",
        f"{mean['steps']:,.0f}",
        f"{mean['seconds']:.0f}",
    ]


def print_row(words: list[str]) -> None:
    """Print one line of a Markdown table."""
    print(f"| {' | '.join(words)} |")


def read(path: Path) -> list[dict]:
    """The rows of a file of JSON lines; in older ones `bits_per_weight` is of the linears."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [{"linear_bits": row["bits_per_weight"], **row} for row in rows]


def gap_in_spreads(results: Results) -> float:
    """Return the KL beyond that of the full teacher, in units of the larger of the two spreads."""
    spread = max(results.spread(SAMPLED), results.spread(FULL))
    return (results.kl(SAMPLED) - results.kl(FULL)) / spread


def ppl_gap(results: Results, text: str) -> float:
    """Perplexity of the student with 2 bits in all linears above its teacher's."""
    rows = results.of(TWO_BITS, text)
    return statistics.fmean(row["ppl"] - row["teacher_ppl"] for row in rows)


def mlp_bits(directory: Path) -> float:
    """Bits a weight of the MLPs in the preset's student, scales and codebooks counted."""
    for path in sorted(directory.glob("students/*/convert_report.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        modules = [m for m in report["modules"] if ".mlp." in m["name"]]
        if report["plan"] == UNIFORM and {m["group_size"] for m in modules} == {16}:
            return max(module["bits_per_weight"] for module in modules)
    raise SystemExit(f"{directory} holds no student converted to {UNIFORM}")


if __name__ == "__main__":
    app()
