"""Steps over four devices that share the latent weights, and a run that goes on; a script."""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch_xla
from train_case import config, make_trainer
from xla_case import batches_of, course

from qat.backend import select
from qat.logs import read_json_lines
from qat.train.start import train_student

DEVICES = 4


def rows_held(place: Path, out: Path) -> dict[str, list[int]]:
    """Of each latent weight and moment after a step: all rows, and those of each device."""
    settings = config(place, device="xla", shard_latents=True)
    trainer = make_trainer(settings, place / "student", out)
    trainer.take_step(batches_of(trainer, 0), 0)
    trainer.backend.synchronize()
    state = trainer.optimizer.state()
    latents = {name for name in state if name.endswith("proj.weight") and state[name].dim()}
    return {name: [len(state[name]), *_rows(state[name])] for name in sorted(latents)}


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
        "rows": rows_held(place, out / "rows"),
        "runs": run_and_go_on(place, out),
    }
    print(json.dumps(found))  # noqa: T201
