"""Measure the recipe SR-002 of Anemll/qwen3_apple_style_2bit_qat_lora beside the default of `qat`.

    python speedrun/measure_sr002.py MODEL CACHE --out DIR --figures figures.jsonl

Theirs: 4 bits reduced to 2 by k-means over the table, scales of the MLPs trained for 4,000 steps of
4 sequences from 5e-5 to 1e-5. Ours: `qat convert --to q2a4` and `qat train`, once with as many
steps of as many sequences, once with the default batch for at most as many seconds. The measure is
theirs: the KL over the teacher's top K alone at temperature 2, on the held-out split. Their curve
is drawn with weights formed, which are the same numbers sooner; a step of theirs is timed as they
compute it, rank by rank, in the same process. Compilation is in no time, and each conversion is.
"""

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

from cyclopts import App
from figures import record

from qat.backend.device import select
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
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher

app = App(help=__doc__)
PUBLISHED = {"lr": 5e-5, "min_lr_ratio": 0.2, "batch_size": 4, "mlp_only": True}
JUDGED_ON = 256
"""Held-out sequences."""
TIMED = 20
"""Steps of theirs that are timed."""
Curve = list[tuple[int, float]]
"""Steps taken, and the loss in nats a token."""


@app.default
def measure(
    model: str,
    cache: Path,
    *,
    out: Path,
    figures: Path | None = None,
    device: str = "auto",
    steps: int = 4000,
    looks: int = 20,
    batch_size: int = 64,
) -> None:
    """Append `sr002_seconds_over_ours` to FIGURES, and write all numbers to OUT/sr002.json.

    Parameters
    ----------
    looks
        Evaluations of each training after its first step.
    batch_size
        Sequences in a step of the run that has as many seconds.
    """
    opened = open_cache(str(cache))
    settings = BaselineSettings(**PUBLISHED, max_steps=steps, device=device)
    theirs, prepared_s = published_curve(model, opened, settings.filled("reference"), looks)
    teacher = load_teacher(model, device=device, dtype="fp32")
    step_s = time_step("reference", teacher, opened, settings=settings, steps=TIMED)
    del teacher
    best_step, best = min(theirs, key=lambda point: point[1])
    seconds = prepared_s + best_step * step_s
    print(f"theirs: {best:.4f} nats at step {best_step}, {step_s:.3f} s a step", flush=True)
    words = ["--calibration", str(cache), "--device", device, "--out", str(out / "student")]
    began = time.perf_counter()
    run_verb(["convert", model, "--to", "q2a4", *words])
    converted_s = time.perf_counter() - began
    found = {"their_curve": theirs, "their_step_s": step_s, "their_conversion_s": prepared_s}
    found |= {"their_best_s": seconds, "our_conversion_s": converted_s}
    common = ["--cache-dir", str(cache), "--device", device, "--eval-sequences", str(JUDGED_ON)]
    for name, rows in (("equal_steps", PUBLISHED["batch_size"]), ("default_batch", batch_size)):
        run, taken = out / name, steps if name == "equal_steps" else max(looks, steps // 8)
        words = ["--batch-size", str(rows), "--max-steps", str(taken), "--out", str(run)]
        words += ["--eval-every", str(max(1, taken // looks)), "--save-every", str(10 * taken)]
        run_verb(["train", str(out / "student"), *common, *words])
        lines = read_json_lines(run / "metrics.jsonl")
        ours = [(line["step"], line["kd_nats"]) for line in lines if line["kind"] == "eval"]
        pace = statistics.median(line["step_s"] for line in read_json_lines(run / HEARTBEAT))
        reached = next((step for step, loss in ours if loss <= best), None)
        found[name] = {"curve": ours, "step_s": pace, "batch_size": rows, "reached": reached}
        if reached is not None:
            found[name]["seconds"] = converted_s + reached * pace
            found[name]["ratio"] = seconds / found[name]["seconds"]
    out.mkdir(parents=True, exist_ok=True)
    (out / "sr002.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ratio = found["default_batch"].get("ratio", 0.0)
    more = {key: value for key, value in found.items() if key.endswith("_s")}
    measured = {"their_best_nats": best, **more}
    record(figures, "sr002_seconds_over_ours", round(ratio, 1), "x", ">= 50", measured=measured)


def published_curve(
    model: str, cache: TeacherCache, settings: BaselineSettings, looks: int
) -> tuple[Curve, float]:
    """Return the losses of the published recipe while it trains, and its conversion's seconds."""
    teacher = load_teacher(model, device=settings.device, dtype="fp32")
    job = BaselineJob.of(teacher, cache, settings.model_copy(update={"factored": False}))
    del teacher
    began = time.perf_counter()
    training = reference_training(job)
    select(settings.device).synchronize()
    prepared_s = time.perf_counter() - began
    student, curve = LanguageModel(job.model), []
    split = split_batches(cache, "held_out", 32, JUDGED_ON)
    held_out = {source: [*batches] for source, batches in split.items()}
    warm_up(training.step, job)
    stops = sorted({settings.max_steps * look // looks for look in range(looks + 1)})
    for begin, end in pairwise([0, *stops]):
        for step in range(begin, end):
            training.step([job.batch(step)], step)
        curve.append((end, divergence_by_source(student, held_out)[0].kd_nats))
        print(f"theirs, step {end}: {curve[-1][1]:.4f} nats", flush=True)
    return curve, prepared_s


if __name__ == "__main__":
    app()
