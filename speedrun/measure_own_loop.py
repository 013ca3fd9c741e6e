"""Measure a loop of one's own beside `qat train`: its bits, its speed, and what its tests say.

    python speedrun/measure_own_loop.py courses checkpoints/tiny-qwen3 --figures figures.jsonl
    python speedrun/measure_own_loop.py tests --figures figures.jsonl

Both take the same steps of the same student in turns, from reading the cache to the optimizer. A
speed is that of the fastest stretch of steps: other work on a machine only ever slows them.
"""

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import torch
from cyclopts import App
from figures import ROOT, record
from speed_case import Figure, record_median, tell
from transformers import AutoModelForCausalLM, AutoTokenizer

import qat
from qat.backend.device import select
from qat.cli import run_verb
from qat.data.opening import open_cache
from qat.logs import read_json_lines
from qat.train.config import TrainConfig
from qat.train.optim import lr_share

app = App(help=__doc__)
STRETCH = 5
"""Steps that are timed together, as many as a run logs at once; the first ones warm up."""
TESTS = "tests/extensions/integrations"
DIVIDED = f"{TESTS}/test_wrapped.py"
EXAMPLES = f"{TESTS}/test_examples.py"
RUNS = "test_an_example_runs and (trainer or trl or peft)"


@app.command
def courses(  # noqa: PLR0917
    model: str,
    *,
    figures: Path | None = None,
    device: str = "auto",
    rounds: int = 3,
    steps: int = 15,
    batch_size: int = 8,
    seq_len: int = 64,
    compiles: bool = False,
) -> None:
    """Append `own_loop_equal` and `own_loop_speed` to FIGURES.

    Parameters
    ----------
    model
        Student and teacher, a directory.
    compiles
        Compile the student of the loop, as `qat train` does on a GPU.
    """
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        words = ["--num-sequences", str(2 * steps * batch_size), "--sequence-length", str(seq_len)]
        words += ["--device", device, "--out", str(place / "cache")]
        run_verb(["cache", "--teacher", model, "--data", "stdlib", *words])
        tokenizer = AutoTokenizer.from_pretrained(model)
        whole = AutoModelForCausalLM.from_pretrained(model).to(select(device).device)
        student = qat.quantize(whole, "q2a4", group_size=64)
        qat.save(student, place / "student", tokenizer)
        given = {"max_steps": steps, "batch_size": batch_size, "device": device}
        equal, ratios = [], []
        for turn in range(rounds):
            file, speed = course_of_run(place, place / f"run-{turn}", given)
            own_file, own_speed = course_of_loop(place, place / f"loop-{turn}", given, compiles)
            equal.append(file.read_bytes() == own_file.read_bytes())
            ratios.append(own_speed / speed)
            tell(f"qat train: {speed:,.0f} tokens/s; the loop: {own_speed:,.0f}")
    runs = {"runs": rounds}
    record(figures, "own_loop_equal", sum(equal) / rounds, "of courses, to the bit", "1", **runs)
    record_median(figures, Figure("own_loop_speed", "x of qat train", ">= 0.85"), ratios, digits=3)


@app.command
def tests(*, figures: Path | None = None) -> None:
    """Append to FIGURES which tests of FSDP2 and which examples pass.

    They are `fully_shard_ok` and `trainer_examples`.
    """
    divided = passed(DIVIDED, "-k", "FSDP2")
    record(figures, "fully_shard_ok", sum(divided) / len(divided), "of tests", "1")
    record(figures, "trainer_examples", sum(passed(EXAMPLES, "-k", RUNS)), "programs", ">= 4")


def course_of_run(place: Path, out: Path, given: dict) -> tuple[Path, float]:
    """Return the student's file and the most tokens per second of a run of `qat train`."""
    steps = given["max_steps"]
    often = {"eval_every": steps, "save_every": steps, "log_every": STRETCH}
    qat.distill(place / "student", place / "cache", out=out, **given, **often)
    beats = read_json_lines(out / "heartbeat-rank0.jsonl")
    speeds = [beat["tokens_per_s"] for beat in beats if beat["step"] > STRETCH]
    (file,) = out.glob(f"checkpoints/step-*{steps}/model.safetensors")
    return file, max(speeds)


def course_of_loop(place: Path, out: Path, given: dict, compiles: bool) -> tuple[Path, float]:
    """Return the same of a loop as one writes it oneself, with the schedule of `qat train`."""
    config = TrainConfig(cache_dir=place / "cache", **given)
    backend = select(config.device)
    packed = qat.load(place / "student", device=str(backend.device), dtype="fp32")
    student = qat.prepare(packed, None, dtype=config.dtype)
    forward = torch.compile(student) if compiles else student
    optimizer = qat.AdamW(qat.param_groups(student))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: lr_share(
            step,
            config.max_steps,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            min_ratio=config.min_lr_ratio,
        ),
    )
    cache, times = open_cache(str(place / "cache")), []
    for step in range(config.max_steps):
        rows = cache.indices(seed=config.seed, step=step, count=config.batch_size)
        batch = cache.batch(rows).to(student.device)
        states = forward(batch.input_ids, position_ids=batch.position_ids, with_logits=False)
        qat.loss(states, batch).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), config.clip_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % STRETCH == 0:
            backend.synchronize()  # as a run does where it logs
            times.append(time.perf_counter())
    qat.save(qat.finish(student), out)
    seconds = [end - start for start, end in itertools.pairwise(times)]
    return out / "model.safetensors", STRETCH * batch.input_ids.numel() / min(seconds)


def passed(*words: str) -> list[bool]:
    """Return which of the tests that pytest finds by `words` pass, the slow ones too."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow"]
        command += ["--junitxml", report.name, *words]
        subprocess.run(command, cwd=ROOT, check=False)
        cases = ElementTree.parse(report.name).getroot().iter("testcase")
        return [not {"failure", "error", "skipped"} & {part.tag for part in c} for c in cases]


if __name__ == "__main__":
    app()
