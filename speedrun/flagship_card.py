"""The costs and results of a flagship: its card and its figures, from what its stages wrote.

    python speedrun/flagship_card.py write runs/flagship-coder --name coder
    python speedrun/flagship_card.py costs runs/flagship-coder texts=24000 train=4000 --gpus 4

`speedrun/flagship.sh` calls it. `write` makes README.md, a model card with every number and
command, and figures.jsonl beside it; `costs` says what each stage will take, from the seconds of an
earlier flagship.
"""

import re
import shlex
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from cyclopts import App
from figures import commit, device, record

from qat.files import parse_json, write_atomically
from qat.logs import HEARTBEAT, duration, read_json_lines

app = App(help=__doc__)
TEMPLATE = Path(__file__).with_suffix(".jinja")
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
CALL = "call"
"""What the log names a call of the script from its start to its end; other lines are verbs."""
RETAINED = "humaneval"
"""The task whose retention is a figure of its own."""
UNITS = {"texts": "ROWS", "cache": "ROWS", "train": "STEPS"}
"""The setting that says the units of a stage's verb; of other stages a verb is one unit."""
ABSOLUTE = re.compile(r"(?<![\w.:/-])/(?:[\w.+-]+/)+")
"""The directories of an absolute path: a card shows no paths of its author's disk. Those in OUT are
shown from there, where the card lies too."""


class Job(NamedTuple):
    """A student that was trained with one seed."""

    size: str
    """The most bits over all weights."""
    seed: str
    trained: dict[str, Any]
    """Numbers of its training: steps, tokens, ranks."""
    train_s: float
    """Seconds of its steps (`training_seconds`)."""
    kl: dict[str, Any]
    suite: dict[str, Any]

    @property
    def gpu_seconds(self) -> float:
        """Seconds of steps, times GPUs."""
        return self.train_s * self.trained["world_size"]


@dataclass
class Flagship:
    """The directory that `speedrun/flagship.sh` filled."""

    out: Path

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """The entries that the script logged for verbs and calls; none before the first of them."""
        path = self.out / "log.jsonl"
        return read_json_lines(path) if path.is_file() else []

    def result(self, name: str) -> dict[str, Any]:
        """The last line of the verb that made `name`.

        Raises:
            SystemExit: that stage is not done.
        """
        path = self.out / "results" / f"{name}.json"
        if not path.is_file():
            raise SystemExit(
                f"{path} is not there, expected what a stage wrote; run speedrun/flagship.sh to "
                "its end first"
            )
        return parse_json(path.read_text(encoding="utf-8"))

    @cached_property
    def jobs(self) -> list[Job]:
        """All students that were judged, by size and seed."""
        found = []
        for path in self.out.glob("results/job-*-*.json"):
            _, size, seed = path.stem.split("-")
            run = Path(self.result(f"train-{size}-{seed}")["run"])
            trained = parse_json((run / "metrics.json").read_text(encoding="utf-8"))
            kl, suite = (self.result(f"{kind}-{size}-{seed}") for kind in ("kl", "suite"))
            found.append(Job(size, seed, trained, training_seconds(run), kl, suite))
        return sorted(found, key=lambda job: (float(job.size), job.size, int(job.seed)))

    @property
    def sizes(self) -> dict[str, list[Job]]:
        """The students of each size."""
        return {size: [*jobs] for size, jobs in groupby(self.jobs, lambda job: job.size)}

    @property
    def tasks(self) -> list[str]:
        """The tasks of the suite."""
        return [*self.jobs[0].suite["tasks"]]

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the script."""
        text = (self.out / "settings.sh").read_text(encoding="utf-8")
        return dict(word.split("=", 1) for word in shlex.split(text))

    def units(self, stage: str) -> int:
        """Return how many rows, steps or models were done in a stage; of calls steps."""
        stage = "train" if stage == CALL else stage
        done = len([*self.out.glob(f"results/{stage}*.json")])
        return done * int(self.settings[UNITS[stage]]) if done and stage in UNITS else done

    @property
    def gpus(self) -> int:
        """The most GPUs that a call had."""
        return max(line["gpus"] for line in self.log)

    @property
    def stages(self) -> dict[str, tuple[float, float]]:
        """Seconds of the verbs of each stage, which overlap, and of all calls; and times GPUs."""
        found: dict[str, tuple[float, float]] = {}
        for line in self.log:
            name, took = line["name"].partition("-")[0], line["seconds"]
            seconds, held = found.get(name, (0.0, 0.0))
            found[name] = seconds + took, held + took * line["gpus"]
        return found

    @property
    def training_share(self) -> float:
        """Seconds in which a GPU takes training steps over seconds of all calls, mean of all GPUs.

        A GPU trains one student at a time, so no second counts twice.
        """
        return sum(job.gpu_seconds for job in self.jobs) / self.stages[CALL][1]

    def suite_seconds(self) -> dict[str, float]:
        """Seconds of the teacher's suite, and most of a student's, without asking the teacher.

        Trainings may have shared the GPU meanwhile.
        """
        asked = [job.suite["seconds"]["student"] for job in self.jobs]
        own = self.result("suite-teacher")["seconds"]["teacher"]
        return {"teacher": own, "student": max(asked)}


@app.command
def write(out: Path, *, name: str) -> None:
    """Write the figures of the flagship in OUT, called after NAME, and its card."""
    flagship, card = Flagship(out), out / "README.md"
    write_figures(flagship, name, out / "figures.jsonl")
    write_atomically(card, card_of(flagship, name))
    print(card)


def training_seconds(run: Path) -> float:
    """Return the seconds of the run's steps, without waits for its cache.

    Steps that an interruption repeated count once.
    """
    done, seconds = 0, 0.0
    for beat in read_json_lines(run / HEARTBEAT):
        new = max(0, beat["step"] - done)
        seconds += new * (beat["step_s"] - beat["data_wait_s"])
        done += new
    return seconds


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
    flagship = Flagship(out)
    for stage, _, number in (each.partition("=") for each in units):
        done, told = flagship.units(stage), "not known yet"
        if done:
            seconds = flagship.stages[stage][1] / done * int(number) / gpus
            told = f"about {duration(seconds)}"
        print(f"{stage:>8}: {int(number):>9,} units, {told} on {gpus} GPUs")


def write_figures(flagship: Flagship, name: str, path: Path) -> None:
    """Write the figures of the flagship to `path`, in place of those of an earlier call.

    Raises:
        SystemExit: a student has more bits than its name says.
    """

    def add(figure: str, values: list[float], unit: str, **facts: Any) -> None:
        (value, spread), goal = mean(values), GOALS.get(figure, "stated")
        measured = {"command": COMMAND, "gpus": flagship.gpus, **facts}
        runs = len(values)
        record(path, figure, value, unit, goal, runs=runs, spread=spread, measured=measured)

    path.unlink(missing_ok=True)
    for size, jobs in flagship.sizes.items():
        facts = facts_of(flagship, size, jobs)
        kept = facts.get(f"{RETAINED}_retention", [None])
        if None not in kept:
            add(f"{name}_{RETAINED}_retention_{size}", kept, "fraction", **facts)
        add(f"{name}_kl_{size}", [job.kl["kl_nats"] for job in jobs], "nats", **facts)
    seconds = {stage: seconds for stage, (seconds, _) in flagship.stages.items()}
    add("training_share", [flagship.training_share], "fraction", stage_seconds=seconds)
    asked = flagship.suite_seconds()
    add("suite_minutes", [sum(asked.values()) / 60], "minutes", tasks=flagship.tasks, **asked)
    speed = flagship.result("texts")["tokens_per_s"]  # of one rank; None if nothing was left to do
    if speed is not None:
        model = re.search(r"\b[A-Z]+\d+\b", device())  # H100 of `NVIDIA H100 80GB HBM3`
        gpu = model[0].lower() if model else "cpu"
        add(f"sample_tok_s_{name}_{gpu}", [speed], "tokens/s", gpus=1)


def facts_of(flagship: Flagship, size: str, jobs: list[Job]) -> dict[str, Any]:
    """Return what belongs to each figure of a size: bits, tokens, seconds, scores of all seeds."""
    made = flagship.result(f"convert-{size}")
    bits = made["bits_per_weight"]
    if bits > float(size):
        raise SystemExit(
            f"{flagship.out}: the student of {size} has {bits:.4f} bits over all weights, expected "
            f"at most {size}; change its FORMATS, or its name in STUDENTS"
        )
    facts = {key: made[key] for key in ("megabytes", "bits_per_weight", "plan")} | {
        "tokens": jobs[0].trained["tokens"],
        "different_tokens": flagship.result("cache")["counted_tokens"],
        "train_gpu_seconds": round(statistics.fmean(job.gpu_seconds for job in jobs), 1),
    }
    for task in flagship.tasks:
        kept = [job.suite["tasks"][task]["retention"] for job in jobs]
        facts[f"{task}_retention"] = [each and each["value"] for each in kept]
        facts[f"{task}_retention_stderr"] = [each and each["stderr"] for each in kept]
    return facts


def card_of(flagship: Flagship, name: str) -> str:
    """Return the model card."""
    from qat.extensions.publish.card import metadata_of, render  # slow: costs need none

    chosen, results = best_of(flagship.jobs), flagship.out / "results"
    made = sorted(results.glob("*.command"), key=lambda path: path.stat().st_mtime_ns)
    best = map(best_of, flagship.sizes.values())
    files = [results / f"export-{job.size}-{job.seed}.json" for job in best]
    text = render(
        TEMPLATE,
        metadata=metadata_of(flagship.settings["MODEL"], "packed", data=None, bits=[]),
        title=f"{name}: students of {flagship.settings['MODEL']}",
        flagship=flagship,
        command=COMMAND,
        commit=commit(),
        device=device(),
        mean=mean,
        percent=percent,
        prompts=(results / "prompts.txt").read_text(encoding="utf-8").splitlines(),
        run=flagship.result(f"train-{chosen.size}-{chosen.seed}")["final"],
        exports=[flagship.result(path.stem)["out"] for path in files if path.is_file()],
        commands=[path.read_text(encoding="utf-8").strip().replace("\\,", ",") for path in made],
    )
    return ABSOLUTE.sub("", text.replace(f"{flagship.out}/", ""))


def percent(jobs: Iterable[Job], task: str, key: str) -> str:
    """Return `student`, `teacher` or `retention` in a task, in percent with the standard error.

    Both are means over seeds. The retention of what the teacher never does right is a dash.
    """
    scores = [job.suite["tasks"][task][key] for job in jobs]
    known = [each for each in scores if each is not None]
    if not known:
        return "-"
    errors = [each["stderr"] for each in known if each["stderr"] is not None]
    error = f" +- {100 * statistics.fmean(errors):.1f}" if errors else ""
    return f"{100 * statistics.fmean(each['value'] for each in known):.1f}{error}"


def mean(values: list[float]) -> tuple[float, float | None]:
    """Return mean and standard deviation; None for that of one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


if __name__ == "__main__":
    app()
