"""A course of steps on the CPU or on XLA; run as a script, over four devices of the CPU client."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from cache_case import TOKENIZER, build, texts
from nsa_train_case import SPARSE
from quantized import SPECS, frozen_linear, random_weight, tiny_adapted, tiny_quantized
from train_case import config, make_trainer, with_teacher
from transformers import PreTrainedModel

from qat.backend.device import select
from qat.data.packing import Batch
from qat.extensions.nsa.swap import swap_attention
from qat.models.checkpoint import save_checkpoint
from qat.nn.swap import put_table, replace_module, table_names, table_spec, weight_shape
from qat.train.loop import Trainer

STEPS = 20


def make_short_place(place: Path) -> Path:
    """A cache, and a student of one layer: graphs take seconds to compile."""
    build(place / "cache")
    torch.manual_seed(7)
    return put_student(place, tiny_quantized("qwen3", SPECS["lut2"], num_hidden_layers=1))


def put_student(place: Path, student: PreTrainedModel) -> Path:
    """The place with this student in it."""
    save_checkpoint(student, TOKENIZER, place / "student")
    return place


def make_mixed_place(place: Path) -> Path:
    """Three bits and low-rank scales, scales of 8 bits, an embedding of 4 bits, a head of 8."""
    build(place / "cache")
    torch.manual_seed(7)
    student = tiny_quantized("qwen3", SPECS["lut2_s8"], num_hidden_layers=1)
    changed = {"self_attn.q_proj": "lut3", "mlp.up_proj": "lut4_r1"}
    for name, spec in ((f"model.layers.0.{name}", SPECS[spec]) for name, spec in changed.items()):
        linear = student.get_submodule(name)
        frozen = frozen_linear(linear.out_features, linear.in_features, spec)
        replace_module(student, name, frozen.eval())
    for name, bits in zip(table_names(student), (4, 8), strict=True):
        shape = weight_shape(student.get_submodule(name))
        spec = table_spec(bits, shape[1])
        put_table(student, name, random_weight(*shape, spec), spec)
    return put_student(place, student)


def make_adapted_place(place: Path) -> Path:
    """Frozen codes with scales of 8 bits, and adapters."""
    build(place / "cache")
    torch.manual_seed(7)
    return put_student(place, tiny_adapted("qwen3", SPECS["lut2_s8"], num_hidden_layers=1))


def make_sparse_place(place: Path) -> Path:
    """Rows that sparse attention does not read whole."""
    documents = [" ".join(texts(4, seed)) for seed in range(12)]
    build(place / "cache", sequence_length=64, documents=documents)
    torch.manual_seed(7)
    student = tiny_quantized("qwen3", SPECS["lut2"], num_hidden_layers=1)
    swap_attention(student, SPARSE)
    return put_student(place, student)


def make_taught_place(place: Path) -> Path:
    """Return a place with a loadable teacher and a cache that was built with that teacher."""
    return with_teacher(make_short_place(place))


class Course(NamedTuple):
    """The results of a course of steps, and XLA's counts during it."""

    losses: list[float]
    """Nats per token, step by step."""
    compiles: int
    executions: int
    fallbacks: dict[str, int]
    """Operators that the host computed."""


def course(place: Path, out: Path, device: str, steps: int = STEPS, **values: object) -> Course:
    """Steps over as many micro-batches as the settings say."""
    if (place / "teacher").exists():
        values = {"teacher": str(place / "teacher"), "cache_dir": place / "known", **values}
    settings = config(place, device=device, max_steps=steps, **values)
    trainer = make_trainer(settings, place / "student", out / device)
    xla = select("xla")
    xla.synchronize()
    before = xla.tracing.counts()
    losses = []
    for step in range(steps):
        result = trainer.take_step(batches_of(trainer, step), step)
        loss, valid = trainer.backend.read([result.sums["loss"], result.valid_tokens])
        losses.append(loss / valid)
    xla.synchronize()
    now = xla.tracing.counts()
    known, found = before.host_fallbacks, now.host_fallbacks
    new = {name: count for name, count in found.items() if count != known.get(name)}
    return Course(losses, now.compiles - before.compiles, now.executions - before.executions, new)


def batches_of(trainer: Trainer, step: int) -> list[Batch]:
    """The micro-batches of a step."""
    rows = range(trainer.config.grad_accum_steps)
    return [trainer.cache.batch(np.arange(4) + 4 * row + step % 5) for row in rows]


def over_devices(count: int, place: Path, out: Path) -> Course:
    """The default course over virtual devices, in a process of its own."""
    return Course(**told_by(Path(__file__), place, out, devices=count))


def told_by(script: Path, place: Path, out: Path, *, devices: int) -> dict:
    """Run a script over virtual devices and return the JSON on its last line."""
    told = subprocess.run(
        [sys.executable, script, place, out],
        env={**os.environ, "CPU_NUM_DEVICES": str(devices)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return json.loads(told.stdout.splitlines()[-1])


def largest_difference(ours: Course, theirs: Course) -> float:
    """Return the largest difference between the losses of a step."""
    return max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))


if __name__ == "__main__":
    select("xla")
    found = course(Path(sys.argv[1]), Path(sys.argv[2]), "xla")
    print(json.dumps(found._asdict()))  # noqa: T201
