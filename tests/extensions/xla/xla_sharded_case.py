"""Steps over four devices that share the latent weights, and a run that goes on; a script."""

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch_xla
from train_case import config, make_trainer
from xla_case import batches_of, course

from qat.backend.device import select
from qat.logs import read_json_lines
from qat.train.start import train_student

DEVICES = 4


class Held(NamedTuple):
    """The placement of latent weights and moments after a step, and the cost of copying them."""

    rows: dict[str, list[int]]
    """Rows of each latent weight: their number in all, then on each device."""
    compiles: list[int]
    """Compiles of the first copy to the host, and of a second one."""


def held(place: Path, out: Path) -> Held:
    """Return the placement after one step."""
    settings = config(place, device="xla", shard_latents=True)
    trainer = make_trainer(settings, place / "student", out)
    trainer.take_step(batches_of(trainer, 0), 0)
    trainer.backend.synchronize()
    state = trainer.optimizer.state()
    latents = {name for name in state if name.endswith("proj.weight") and state[name].dim()}
    rows = {name: [len(state[name]), *_rows(state[name])] for name in sorted(latents)}
    return Held(rows, [_compiles_of_a_copy(state) for _ in range(2)])


def _compiles_of_a_copy(state: dict[str, torch.Tensor]) -> int:
    xla = select("xla")
    before = xla.tracing.counts().compiles
    xla.copied_to_host(state)
    return xla.tracing.counts().compiles - before


def _rows(tensor: torch.Tensor) -> list[int]:
    shards, _ = zip(*torch_xla._XLAC._get_local_shards([tensor])[0], strict=True)
    return [len(shard) for shard in shards]


def run_and_go_on(place: Path, out: Path) -> list[list[dict]]:
    """The metrics of a run, and of one that goes on from its first checkpoint."""
    settings = config(
        place, device="xla", shard_latents=True, max_steps=4, eval_every=4, save_every=2
    )
    train_student(settings, str(place / "student"), out / "whole", resume=False)
    shutil.copytree(out / "whole", out / "cut")
    shutil.rmtree(max((out / "cut/checkpoints").iterdir()))
    train_student(settings, str(place / "student"), out / "cut", resume=True)
    return [read_json_lines(out / name / "metrics.jsonl") for name in ("whole", "cut")]


if __name__ == "__main__":
    select("xla")
    place, out = map(Path, sys.argv[1:])
    found = {
        "course": course(place, out / "course", "xla", shard_latents=True),
        "held": held(place, out / "held"),
        "runs": run_and_go_on(place, out),
    }
    print(json.dumps(found))  # noqa: T201
