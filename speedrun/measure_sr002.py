"""Compare the training recipe SR-002 of another project with the default recipe of `qat`.

    python speedrun/measure_sr002.py losses MODEL CACHE --out DIR
    python speedrun/measure_sr002.py seconds MODEL CACHE --out DIR
    python speedrun/measure_sr002.py figure DIR --figures figures.jsonl

SR-002 is a recipe of Anemll/qwen3_apple_style_2bit_qat_lora. It reduces a table of 16 levels to 4
by k-means and then trains only the scales of the MLPs: 4,000 steps of 4 sequences, with a learning
rate that falls from 5e-5 to 1e-5. Ours is `qat convert --to q2a4` and `qat train` with their
defaults. It runs once with the same steps and batch and once with the default batch.

Both students are judged by the loss that SR-002 reports: the KL over the teacher's top K tokens, at
temperature 2, on the held-out split of the cache. The losses of SR-002 are computed with whole
weight matrices, which gives the same numbers faster. Its time per step is measured with the
original's computation, one rank at a time. Times include the conversion and exclude compilation.
"""

import json
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from cyclopts import App
from figures import command, commit, record
from figures import device as measured_on

from qat.cli import run_verb
from qat.data.opening import open_cache
from qat.data.reader import TeacherCache
from qat.evaluate.divergence import divergence_by_source
from qat.evaluate.judge import split_batches
from qat.extensions.lab.baselines.config import BaselineSettings
from qat.extensions.lab.baselines.methods import time_step
from qat.extensions.lab.baselines.reference import reference_training
from qat.extensions.lab.baselines.training import BaselineJob, warm_up
from qat.logs import HEARTBEAT, read_json_lines
from qat.models.load import load_teacher

app = App(help=__doc__)
PUBLISHED = {"lr": 5e-5, "min_lr_ratio": 0.2, "batch_size": 4, "mlp_only": True}
LOSSES, SECONDS = "losses.json", "seconds.json"
JUDGED_ON = 256
"""Held-out sequences."""
TIMED = 20
"""Timed steps of SR-002."""
Curve = list[tuple[int, float]]
"""Steps taken, and the loss in nats a token."""


@app.command
def losses(
    model: str,
    cache: Path,
    *,
    out: Path,
    device: str = "auto",
    steps: int = 4000,
    looks: int = 20,
) -> None:
    """Train both with the same steps, and write their losses to OUT/losses.json; nothing is timed.

    Parameters
    ----------
    looks
        Evaluations of each training after the one of the untrained student.
    """
    settings = BaselineSettings(**PUBLISHED, max_steps=steps, device=device)
    for theirs in published_curve(model, open_cache(str(cache)), settings, looks):
        keep(out, LOSSES, theirs=theirs)
    converted(model, cache, out, device)
    ours = trained(out / "equal_steps", cache, out, PUBLISHED["batch_size"], steps, looks, device)
    keep(out, LOSSES, ours=ours[0])


@app.command
def seconds(
    model: str,
    cache: Path,
    *,
    out: Path,
    device: str = "auto",
    steps: int = 500,
    looks: int = 20,
    batch_size: int = 64,
) -> None:
    """Time both on a quiet machine; OUT/seconds.json keeps each time as soon as it is known.

    Parameters
    ----------
    steps
        Steps of `qat train`, of BATCH_SIZE sequences each.
    """
    keep(out, SECONDS, command=command(), commit=commit(), device=measured_on())
    settings = BaselineSettings(**PUBLISHED, device=device)
    opened = open_cache(str(cache))
    teacher = load_teacher(model, device=device, dtype="fp32")
    step_s = time_step("reference", teacher, opened, settings=settings, steps=TIMED)
    keep(out, SECONDS, their_step_s=step_s)
    job = BaselineJob.of(teacher, opened, settings.filled("reference"))
    began = time.perf_counter()
    reference_training(job)
    job.backend.synchronize()
    keep(out, SECONDS, their_conversion_s=time.perf_counter() - began)
    del teacher, job
    place = out / "timed"
    keep(out, SECONDS, our_conversion_s=converted(model, cache, place, device))
    curve, pace = trained(place / "run", cache, place, batch_size, steps, looks, device)
    keep(out, SECONDS, our_step_s=pace, our_curve=curve)


@app.command
def figure(out: Path, *, figures: Path) -> None:
    """Append `sr002_seconds_over_ours` to FIGURES, from what `losses` and `seconds` left in OUT."""
    read = {
        name: json.loads((out / name).read_text(encoding="utf-8")) for name in (LOSSES, SECONDS)
    }
    found, times = read[LOSSES], read[SECONDS]
    best_step, best = min(found["theirs"], key=lambda point: point[1])
    theirs_s = times["their_conversion_s"] + best_step * times["their_step_s"]
    reached = next((step for step, loss in times["our_curve"] if loss <= best), None)
    if reached is None:
        raise SystemExit(f"ours did not reach their {best:.4f} nats; take more steps of `seconds`")
    ours_s = times["our_conversion_s"] + reached * times["our_step_s"]
    more = {"their_best_nats": best, "their_best_step": best_step, "our_step": reached} | times
    ratio = round(theirs_s / ours_s, 1)
    record(figures, "sr002_seconds_over_ours", ratio, "x", ">= 50", measured=more)


def keep(out: Path, name: str, **found: object) -> None:
    """Add to a JSON file in OUT, so that an interrupted run loses no more than its last part."""
    path = out / name
    out.mkdir(parents=True, exist_ok=True)
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(whole | found, indent=1) + "\n", encoding="utf-8")


def converted(model: str, cache: Path, out: Path, device: str) -> float:
    """Convert the model to OUT/student as `qat convert` does by default; return the seconds."""
    words = ["--calibration", str(cache), "--device", device, "--out", str(out / "student")]
    began = time.perf_counter()
    run_verb(["convert", model, "--to", "q2a4", *words])
    return time.perf_counter() - began


def trained(  # noqa: PLR0917
    run: Path, cache: Path, out: Path, batch_size: int, steps: int, looks: int, device: str
) -> tuple[Curve, float]:
    """Train OUT/student as `qat train` does by default; return its losses and seconds a step."""
    words = ["--cache-dir", str(cache), "--device", device, "--out", str(run)]
    words += ["--batch-size", str(batch_size), "--max-steps", str(steps)]
    words += ["--eval-every", str(max(1, steps // looks)), "--eval-sequences", str(JUDGED_ON)]
    run_verb(["train", str(out / "student"), *words, "--save-every", str(10 * steps)])
    lines = read_json_lines(run / "metrics.jsonl")
    curve = [(line["step"], line["kd_nats"]) for line in lines if line["kind"] == "eval"]
    paces = [line["step_s"] for line in read_json_lines(run / HEARTBEAT)]
    return curve, statistics.median(paces)


def published_curve(
    model: str, cache: TeacherCache, settings: BaselineSettings, looks: int
) -> Iterator[Curve]:
    """Yield the losses of the published recipe so far, at each look."""
    teacher = load_teacher(model, device=settings.device, dtype="fp32")
    settings = settings.filled("reference").model_copy(update={"factored": False})
    job = BaselineJob.of(teacher, cache, settings)
    training, curve = reference_training(job), []
    split = split_batches(cache, "held_out", 32, JUDGED_ON)
    held_out = {source: [*batches] for source, batches in split.items()}
    warm_up(training.step, job)
    stops = sorted({settings.max_steps * look // looks for look in range(looks + 1)})
    for begin, end in pairwise([0, *stops]):
        for step in range(begin, end):
            training.step([job.batch(step)], step)
        for name, deployed in training.deploy().items():  # the teacher becomes the student
            teacher.model.get_submodule(name).weight.data.copy_(deployed.weight)
        curve.append((end, divergence_by_source(teacher, held_out)[0].kd_nats))
        print(f"theirs, step {end}: {curve[-1][1]:.4f} nats", flush=True)
        yield curve


if __name__ == "__main__":
    app()
