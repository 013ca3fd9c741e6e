"""How soon a run tells of NaN, wherever it comes up, and what looking for it costs.

    python tests/stress/measure_nan.py found --figures FIGURES.jsonl
    python tests/stress/measure_nan.py time --figures FIGURES.jsonl --device cuda

`found` spoils one value in a real run of a tiny student, in a step that is not logged, and counts
the logged steps until the run says so: in latent weights, moments, scales, codebooks, norms,
adapters, the table of words, the loss, and the bytes of the cache under honest hashes.
"""

import logging
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import safetensors.torch
import torch
from cyclopts import App
from fault_records import record
from kill_case import build, make_student
from speed_case import settled
from torch import Tensor

from qat.backend.device import select
from qat.bench.batches import open_source
from qat.bench.student import Ours, open_student
from qat.data.cache import MANIFEST, read_manifest
from qat.data.shard_file import promised_layout
from qat.errors import CacheError, TrainingError
from qat.files import sha256_file
from qat.logs import read_json_lines
from qat.train.config import TrainConfig
from qat.train.loop import Trainer
from qat.train.start import train_student
from qat.train.step import StepResult, TrainingStep

app = App(help=__doc__)
LOG_EVERY, SPOILT_AFTER, STEPS = 5, 6, 20
WAYS = {
    "latent": {"learn": "weights,scales,codebook,norms"},
    "bf16": {"learn": "weights,scales", "latent_dtype": "bf16"},
    "8-bit": {"learn": "weights,scales", "optimizer": "adamw8bit"},
    "frozen": {"learn": "scales,codebook"},
    "adapters": {"learn": "lora", "lora_rank": 4},
}
PLACES = (
    "weight",
    "scales",
    "codebook",
    "norm.weight",
    "lora_in",
    "exp_avg.",
    "exp_avg_sq",
    "embed",
)
"""What the names of tensors hold, of which the last one with such a name is spoilt."""


@app.command
def found(*, figures: Path) -> None:
    """Append `nan_found_within_steps`, in logged steps: the worst place of the worst way."""
    logging.disable(logging.WARNING)
    late = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_student(place / "student")
        build(place / "cache")
        for way, values in WAYS.items():
            for where in PLACES:
                for bad in (math.nan, math.inf):
                    spoil = spoiler(where, bad)
                    late[way, where, bad] = intervals(place, values, spoil)
        late["latent", "loss", math.nan] = intervals(place, WAYS["latent"], spoil_loss)
        late["latent", "cache", math.nan] = unreadable(place)
    seen = {case: steps for case, steps in late.items() if steps is not None}
    for case, steps in seen.items():
        print(*case, f"told after {steps} logged steps")
    worst = max(seen.values())
    record(figures, "nan_found_within_steps", worst, "logged steps", "<= 1", runs=len(seen))


Spoil = Callable[[Trainer], bool]
"""Puts a bad value into a run; whether there was a place for it."""


def spoiler(where: str, bad: float) -> Spoil:
    """For tensors with `where` in their names."""

    def spoil(trainer: Trainer) -> bool:
        numbers = trainer.take_step.numbers().items()
        fit = [t for name, t in numbers if where in name and t.is_floating_point() and t.dim()]
        for tensor in fit[-1:]:
            tensor.detach().view(-1)[-1:] = bad
        return bool(fit)

    return spoil


def spoil_loss(trainer: Trainer) -> bool:
    """The next step's loss is NaN, its gradients are not."""
    step = trainer.take_step
    real = step.run_micro_step

    def once(*arguments: object) -> Tensor:
        step.run_micro_step = real
        return real(*arguments) * math.nan

    step.run_micro_step = once
    return True


def intervals(place: Path, values: dict[str, object], spoil: Spoil) -> float | None:
    """Logged steps from a spoilt value to the event; infinite without one, None without a place."""
    real, is_spoilt = Trainer._follow, []

    def spoiling(trainer: Trainer, *arguments: object) -> None:
        real(trainer, *arguments)
        if trainer.step == SPOILT_AFTER:
            is_spoilt.append(spoil(trainer))

    with tempfile.TemporaryDirectory() as folder, patch.object(Trainer, "_follow", spoiling):
        out = Path(folder, "run")
        try:
            train_student(settings(place, values), str(place / "student"), out, resume=False)
        except TrainingError:
            events = read_json_lines(out / "events.jsonl")
            (step,) = (event["step"] for event in events if event["kind"] == "not_finite")
            return math.ceil((step - SPOILT_AFTER) / LOG_EVERY)
    return math.inf if is_spoilt[0] else None


def unreadable(place: Path) -> float:
    """1 if a run ends at the first batch with NaN in a tail, else infinite."""
    cache = place / "cache"
    manifest = read_manifest(cache)
    layout = promised_layout(manifest)
    begin = layout.offsets["tail_logprob"]
    for number, shard in enumerate(manifest.shards):
        tensors = safetensors.torch.load_file(cache / shard.file)
        tensors["rows"][begin : begin + 4] = torch.tensor([math.nan]).view(torch.uint8)
        safetensors.torch.save_file(tensors, cache / shard.file)
        honest = {"sha256": sha256_file(cache / shard.file)}
        manifest.shards[number] = shard.model_copy(update=honest)
    (cache / MANIFEST).write_bytes(manifest.to_bytes())
    with tempfile.TemporaryDirectory() as folder:
        try:
            train_student(
                settings(place, WAYS["latent"]),
                str(place / "student"),
                Path(folder, "run"),
                resume=False,
            )
        except CacheError:
            return 1
    return math.inf


def settings(place: Path, values: dict[str, object]) -> TrainConfig:
    """Twenty steps on a CPU, every fifth of them logged."""
    return TrainConfig(
        cache_dir=place / "cache",
        max_steps=STEPS,
        batch_size=4,
        log_every=LOG_EVERY,
        eval_every=STEPS,
        eval_sequences=4,
        save_every=STEPS,
        device="cpu",
        **values,
    )


@app.command
def time(
    *,
    figures: Path,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    batch_size: int = 512,
    rounds: int = 15,
    log_every: int = 10,
    learn: str = "weights,scales,codebook",
) -> None:
    """Append `nan_check_step_time_ratio`: a logged stretch of steps with the look over without.

    Latent weights and their moments in float32 are the most that there is to look at. Stretches
    with and without take turns in one process, in an order that changes.
    """
    backend = select(device)
    config = settled(device=device, learn=learn, batch_size=batch_size)
    student = open_student(shape, config)
    source = open_source(config, student)
    step = Ours(student, config).subject()
    batch = source.batch(batch_size, 0, backend)
    ratios = []
    for number in range(rounds + 2):
        ways = {way: 0.0 for way in ((True, False) if number % 2 else (False, True))}
        for is_looked in ways:
            backend.synchronize()
            first = backend.mark()
            for taken in range(log_every):
                result = step([batch], taken)
            read(step, result, is_looked=is_looked)
            ways[is_looked] = backend.seconds_between(first, backend.mark()) / log_every
        if number >= 2:  # the first compile and record
            ratios.append(ways[True] / ways[False])
            print(f"{1e3 * ways[False]:.2f} ms a step, with the look {1e3 * ways[True]:.2f} ms")
    step.close()
    ratio, spread = statistics.median(ratios), statistics.stdev(ratios)
    print(f"median ratio {ratio:.4f}, standard deviation {spread:.4f}")
    record(
        figures, "nan_check_step_time_ratio", round(ratio, 5), "ratio", "<= 1.01",
        runs=rounds, spread=round(spread, 5),
    )  # fmt: skip


def read(step: TrainingStep, result: StepResult, *, is_looked: bool) -> None:
    """What the loop reads of a logged step, with or without the look at all numbers."""
    if is_looked:
        result, trouble = step.told(result)
    else:
        trouble = step.trouble
    step.backend.read([*result.sums.values(), result.valid_tokens, result.grad_norm, trouble])


if __name__ == "__main__":
    app()
