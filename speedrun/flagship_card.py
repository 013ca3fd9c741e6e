"""What a flagship has cost and reached: its card and its figures, from what its stages wrote.

    python speedrun/flagship_card.py write runs/flagship-coder --name coder
    python speedrun/flagship_card.py best runs/flagship-coder 3.25
    python speedrun/flagship_card.py costs runs/flagship-coder texts=24000 train=4000 --gpus 4

`speedrun/flagship.sh` calls it. `write` makes README.md, a model card with every number and
command, and figures.jsonl beside it; `best` prints the seed of the least KL; `costs`
says what each stage will take, from the seconds of an earlier flagship.
"""

import re
import shlex
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cyclopts import App
from figures import commit, device, record
from jinja2 import Environment, StrictUndefined

from qat.files import parse_json, write_atomically
from qat.logs import duration, read_json_lines

app = App(help=__doc__)
LOG, RESULTS, SETTINGS = "log.jsonl", "results", "settings.sh"
CARD, FIGURES = "README.md", "figures.jsonl"
GOALS = {
    "coder_humaneval_retention_2.5": ">= 0.80",
    "coder_humaneval_retention_3.25": ">= 0.92",
    "coder_kl_2.5": "<= 0.030",
    "training_share": ">= 0.85",
    "suite_minutes": "<= 3",
    "sample_tok_s_coder_h100": ">= 120000",
}
"""Goals by figure; others are stated."""
COMMAND = "bash speedrun/flagship.sh"
RETAINED = "humaneval"
"""The task whose retention is a figure of its own."""
ABSOLUTE = re.compile(r"(?<![\w.:/-])/(?:[\w.+-]+/)+")
"""The directories of an absolute path: a card shows no paths of its author's disk. Those in OUT are
shown from there, where the card lies too."""
TEMPLATE = """\
<!-- The licence follows from those of the teacher and of the texts: state it here. -->
# {{ name }}: students of {{ teacher }}

Measured by `bash speedrun/flagship.sh` of qat at commit {{ commit }} on {{ device }}.

| model | MB | bits over all weights |{% for task in tasks %} {{ task }}, % | retention, % |\
{% endfor %} KL, nats a token | tokens of training | GPU seconds of training |
|---|---:|---:|{% for task in tasks %}---:|---:|{% endfor %}---:|---:|---:|
{% for row in rows %}| {{ row | join(" | ") }} |
{% endfor %}
A student's numbers are means over seeds. Behind +- stand the standard error of a score over its \
questions, and the standard deviation of the KL over seeds. Retention is the student's score over \
the teacher's. The KL is from the teacher, on answers of its own that were held out.

## Each seed

| student, seed |{% for task in tasks %} {{ task }}, % | retention, % | flips |{% endfor %} \
KL, nats a token | same first choice, % | best step | tokens/s | GPU seconds |
|---|{% for task in tasks %}---:|---:|---:|{% endfor %}---:|---:|---:|---:|---:|
{% for row in seeds %}| {{ row | join(" | ") }} |
{% endfor %}
Flips: questions from right to wrong (-) and from wrong to right (+).

## What it learned from

{{ "{:,}".format(texts.rows) }} answers of the teacher, {{ "{:,}".format(texts.tokens) }} tokens, \
at temperature {{ settings.TEMPERATURE }} and top-p {{ settings.TOP_P }}. \
{{ "{:,}".format(cache.counted_tokens) }} of them count, in {{ "{:,}".format(cache.sequences) }} \
sequences for training and {{ "{:,}".format(cache.held_out_sequences) }} held out, at \
{{ cache.bytes_per_token }} bytes a token. The teacher's perplexity on them is \
{{ cache.teacher_ppl }}. Some prompts have the wording of the tasks above; none of their questions \
is among them.

Prompts, in shares of {{ settings.SHARES }}:

{% for line in prompts %}- {{ line }}
{% endfor %}
## What it cost

| stage | seconds | GPU seconds |
|---|---:|---:|
{% for row in stages %}| {{ row | join(" | ") }} |
{% endfor %}
Training steps took {{ "%.2f" | format(share) }} of the time that the GPUs were held.

## How to use it

    qat generate {{ run }} --prompt "Write a Python function that counts the words of a text."
{% for path in exports %}    llama-cli -m {{ path }}/model.gguf
{% endfor %}
## How it was made

Settings of `speedrun/flagship.sh`:

{% for name, value in settings.items() %}    {{ name }}={{ value }}
{% endfor %}
Its commands:

{% for line in commands %}    {{ line }}
{% endfor %}"""


class Job(NamedTuple):
    """A student that was trained with one seed."""

    size: str
    """The most bits over all weights."""
    seed: str
    trained: dict[str, Any]
    """Numbers of its training: steps, tokens, seconds, ranks."""
    kl: dict[str, Any]
    suite: dict[str, Any]

    @property
    def gpu_seconds(self) -> float:
        """Seconds of steps, times GPUs."""
        return self.trained["train_s"] * self.trained["world_size"]

    def score(self, task: str, key: str) -> dict[str, float] | None:
        """Mean and standard error of `student`, `teacher` or `retention` in a task.

        None is the retention of what the teacher cannot do either.
        """
        return self.suite["tasks"][task][key]


@dataclass
class Flagship:
    """The directory that `speedrun/flagship.sh` filled."""

    out: Path
    log: list[dict] = field(init=False)

    def __post_init__(self) -> None:
        path = self.out / LOG
        self.log = read_json_lines(path) if path.is_file() else []

    def result(self, name: str) -> dict[str, Any]:
        """The last line of the verb that made `name`.

        Raises:
            SystemExit: that stage is not done.
        """
        path = self.out / RESULTS / f"{name}.json"
        if not path.is_file():
            raise SystemExit(
                f"{path} is not there, expected what a stage wrote; run speedrun/flagship.sh to "
                "its end first"
            )
        return parse_json(path.read_text(encoding="utf-8"))

    @cached_property
    def jobs(self) -> list[Job]:
        """All students that were judged, by size and seed."""
        names = [path.stem.split("-") for path in self.out.glob(f"{RESULTS}/suite-*.json")]
        found = sorted((float(size), int(seed), size, seed) for _, size, seed in names)
        return [self._job(size, seed) for *_, size, seed in found]

    def _job(self, size: str, seed: str) -> Job:
        job = f"{size}-{seed}"
        run = Path(self.result(f"train-{job}")["run"])
        trained = parse_json((run / "metrics.json").read_text(encoding="utf-8"))
        return Job(size, seed, trained, self.result(f"kl-{job}"), self.result(f"suite-{job}"))

    @property
    def sizes(self) -> dict[str, list[Job]]:
        """The students of each size."""
        found: dict[str, list[Job]] = {}
        for job in self.jobs:
            found.setdefault(job.size, []).append(job)
        return found

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the script."""
        text = (self.out / SETTINGS).read_text(encoding="utf-8")
        return dict(word.split("=", 1) for word in shlex.split(text))

    @property
    def gpus(self) -> int:
        """The most GPUs that a stage had."""
        return max(line["gpus"] for line in self.log)

    def stages(self) -> dict[str, tuple[float, float]]:
        """Seconds of each stage over all calls, and these times GPUs."""
        found: dict[str, tuple[float, float]] = {}
        for line in self.log:
            if line["kind"] == "stage":
                seconds, held = found.get(line["name"], (0.0, 0.0))
                took = line["seconds"]
                found[line["name"]] = seconds + took, held + took * line["gpus"]
        return found

    def training_share(self) -> float:
        """Seconds of training steps over seconds that GPUs were held, in all stages."""
        held = sum(held for _, held in self.stages().values())
        return sum(job.gpu_seconds for job in self.jobs) / held

    def suite_minutes(self) -> tuple[float, int]:
        """Minutes of the suite that asked the teacher too, with loading, and its calls."""
        asked = max(self.jobs, key=lambda job: job.suite["seconds"].get("teacher", 0.0))
        name = f"suite-{asked.size}-{asked.seed}"
        calls = [x["seconds"] for x in self.log if x["kind"] == "job" and x["name"] == name]
        return sum(calls) / 60, len(calls)


@app.command
def write(out: Path, *, name: str) -> None:
    """Write the figures of the flagship in OUT, called after NAME, and its card."""
    flagship = Flagship(out)
    write_figures(flagship, name, out / FIGURES)
    write_atomically(out / CARD, card_of(flagship, name))
    print(out / CARD)


@app.command
def best(out: Path, size: str) -> None:
    """Print the seed of the student of that size with the least KL on held-out text."""
    print(best_of(Flagship(out).sizes[size]).seed)


def best_of(jobs: Iterable[Job]) -> Job:
    """Return the student of the least KL on held-out text."""
    return min(jobs, key=lambda job: job.kl["kl_nats"])


@app.command
def costs(out: Path, *units: str, gpus: int) -> None:
    """Print what each stage will take, as far as the log in OUT tells.

    Args:
        out: Directory of an earlier flagship.
        units: STAGE=N: rows, steps or students of each stage.
        gpus: GPUs that there are now.
    """
    lines = [line for line in Flagship(out).log if line["kind"] == "stage"]
    total, unknown = 0.0, []
    for stage, _, number in (each.partition("=") for each in units):
        whole = [line for line in lines if line["name"] == stage and line["exit"] == 0]
        if not whole:
            unknown.append(stage)
            print(f"{stage:>8}: {int(number):>9,} units, not known yet")
            continue
        # the calls that finished a stage say its units; earlier ones worked on the same
        held = sum(line["seconds"] * line["gpus"] for line in lines if line["name"] == stage)
        seconds = held / whole[-1]["units"] * int(number) / gpus
        total += seconds
        print(f"{stage:>8}: {int(number):>9,} units, about {duration(seconds)}")
    more = f", and {', '.join(unknown)}" if unknown else ""
    print(f"   total: about {duration(total)} on {gpus} GPUs, for all from the beginning{more}")


def write_figures(flagship: Flagship, name: str, path: Path) -> None:
    """Write the figures of the flagship to `path`, in place of those of an earlier call.

    Raises:
        SystemExit: a student has more bits than its name says.
    """

    def add(figure: str, value: float, unit: str, runs: int = 1, **rest: Any) -> None:
        measured = {"command": COMMAND, "gpus": flagship.gpus, **rest.pop("measured")}
        goal = GOALS.get(figure, "stated")
        record(path, figure, value, unit, goal, runs=runs, measured=measured, **rest)

    path.unlink(missing_ok=True)
    for size, jobs in flagship.sizes.items():
        facts = _facts(flagship, size, jobs)
        how = {"runs": len(jobs), "measured": facts}
        if None not in facts.get(f"{RETAINED}_retention", [None]):
            value, spread = _mean(facts[f"{RETAINED}_retention"])
            add(f"{name}_{RETAINED}_retention_{size}", value, "fraction", spread=spread, **how)
        value, spread = _mean([job.kl["kl_nats"] for job in jobs])
        add(f"{name}_kl_{size}", value, "nats", spread=spread, **how)
    held = {"stage_seconds": {name: seconds for name, (seconds, _) in flagship.stages().items()}}
    add("training_share", flagship.training_share(), "fraction", measured=held)
    minutes, calls = flagship.suite_minutes()
    asked = {"calls": calls, "tasks": [*flagship.jobs[0].suite["tasks"]]}
    add("suite_minutes", minutes, "minutes", measured=asked)
    speed = flagship.result("texts")["tokens_per_s"]  # of one rank; None if nothing was left to do
    if speed is not None:
        add(f"sample_tok_s_{name}_{_gpu_slug()}", speed, "tokens/s", measured={"gpus": 1})


def _facts(flagship: Flagship, size: str, jobs: list[Job]) -> dict[str, Any]:
    """Return what belongs to each figure of a size: bits, tokens, seconds, scores of all seeds."""
    made = flagship.result(f"convert-{size}")
    bits = made["bits_per_weight"]
    if bits > float(size):
        raise SystemExit(
            f"{flagship.out}: the student of {size} has {bits:.4f} bits over all weights, expected "
            f"at most {size}; change its FORMATS, or its name in STUDENTS"
        )
    facts = {
        "megabytes": made["megabytes"],
        "bits_per_weight": bits,
        "plan": made["plan"],
        "tokens": jobs[0].trained["tokens"],
        "different_tokens": flagship.result("cache")["counted_tokens"],
        "train_gpu_seconds": round(statistics.fmean(job.gpu_seconds for job in jobs), 1),
    }
    for task in jobs[0].suite["tasks"]:
        kept = [job.score(task, "retention") for job in jobs]
        facts[f"{task}_retention"] = [each and each["value"] for each in kept]
        facts[f"{task}_retention_stderr"] = [each and each["stderr"] for each in kept]
    return facts


def card_of(flagship: Flagship, name: str) -> str:
    """Return the model card."""
    tasks = [*flagship.jobs[0].suite["tasks"]]
    chosen = best_of(flagship.jobs)
    results = flagship.out / RESULTS
    made = sorted(results.glob("*.command"), key=lambda path: path.stat().st_mtime_ns)
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)  # noqa: S701 - no HTML
    text = environment.from_string(TEMPLATE).render(
        name=name,
        teacher=flagship.settings["MODEL"],
        commit=commit(),
        device=f"{flagship.gpus} x {device()}",
        tasks=tasks,
        rows=[
            _teacher_row(flagship, tasks),
            *(_size_row(flagship, size, jobs, tasks) for size, jobs in flagship.sizes.items()),
        ],
        seeds=[_seed_row(job, tasks) for job in flagship.jobs],
        settings=flagship.settings,
        texts=flagship.result("texts"),
        cache=flagship.result("cache"),
        prompts=(results / "prompts.txt").read_text(encoding="utf-8").splitlines(),
        stages=[
            (stage, f"{seconds:,.0f}", f"{held:,.0f}")
            for stage, (seconds, held) in flagship.stages().items()
        ],
        share=flagship.training_share(),
        run=flagship.result(f"train-{chosen.size}-{chosen.seed}")["final"],
        exports=[
            flagship.result(path.stem)["out"] for path in sorted(results.glob("export-*.json"))
        ],
        commands=[path.read_text(encoding="utf-8").strip().replace("\\,", ",") for path in made],
    )
    return ABSOLUTE.sub("", text.replace(f"{flagship.out}/", ""))


def _teacher_row(flagship: Flagship, tasks: list[str]) -> list[str]:
    made, job = flagship.result("teacher"), flagship.jobs[0]
    size = made["source_megabytes"]
    weights = 8 * made["megabytes"] / made["bits_per_weight"]  # millions
    cells = ["teacher"]
    cells += ["", ""] if size is None else [f"{size:,.1f}", f"{8 * size / weights:.2f}"]
    for task in tasks:
        cells += [_percent([job.score(task, "teacher")]), ""]
    return [*cells, "", "", ""]


def _size_row(flagship: Flagship, size: str, jobs: list[Job], tasks: list[str]) -> list[str]:
    made = flagship.result(f"convert-{size}")
    cells = [
        f"{size}, {made['plan']}",
        f"{made['megabytes']:,.1f}",
        f"{made['bits_per_weight']:.3f}",
    ]
    for task in tasks:
        cells += [_percent([j.score(task, key) for j in jobs]) for key in ("student", "retention")]
    kl, spread = _mean([job.kl["kl_nats"] for job in jobs])
    cells.append(f"{kl:.4f}" + ("" if spread is None else f" +- {spread:.4f}"))
    seconds = statistics.fmean(job.gpu_seconds for job in jobs)
    return [*cells, f"{jobs[0].trained['tokens']:,}", f"{seconds:,.0f}"]


def _seed_row(job: Job, tasks: list[str]) -> list[str]:
    cells = [f"{job.size}, {job.seed}"]
    for task in tasks:
        found = job.suite["tasks"][task]
        cells += [_percent([job.score(task, key)]) for key in ("student", "retention")]
        cells.append(f"-{found['right_to_wrong']} +{found['wrong_to_right']}")
    kl, trained = job.kl, job.trained
    cells += [f"{kl['kl_nats']:.4f}", f"{100 * kl['top1_frac']:.1f}", f"{trained['best_step']:,}"]
    return [*cells, f"{trained['tokens_per_s']:,.0f}", f"{job.gpu_seconds:,.0f}"]


def _percent(scores: list[dict[str, float] | None]) -> str:
    """Return the mean over seeds in percent, with the mean of the standard errors."""
    known = [each for each in scores if each is not None]
    if not known:
        return "-"  # the teacher is never right
    errors = [each["stderr"] for each in known if each["stderr"] is not None]
    error = f" +- {100 * statistics.fmean(errors):.1f}" if errors else ""
    return f"{100 * statistics.fmean(each['value'] for each in known):.1f}{error}"


def _mean(values: list[float]) -> tuple[float, float | None]:
    """Return mean and standard deviation; None for that of one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _gpu_slug() -> str:
    """Return the model of the device for a figure's name: `h100` of `NVIDIA H100 80GB HBM3`."""
    found = re.search(r"\b[A-Z]+\d+\b", device())
    return found[0].lower() if found else "cpu"


if __name__ == "__main__":
    app()
