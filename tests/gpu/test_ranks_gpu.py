"""Two ranks on two GPUs of one host: one GPU's course, and a stop that both agree on."""

import json
from pathlib import Path

import pytest
import torch
from torchrun_case import launch
from train_case import config, make_place

from qat.logs import read_json_lines
from qat.models.load import load_model
from qat.nn.quant_linear import quant_linears
from qat.train.config import TrainConfig
from qat.train.start import train_student

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
STOP_ONE = """
    if trainer.step == 4 and rank == 1 and not (place / "stopped").exists():
        (place / "stopped").touch()
        os.kill(os.getpid(), SIGTERM)
"""


def settings(place: Path, **values: object) -> TrainConfig:
    chosen = {"device": "cuda", "dtype": "fp32", "compile": "on", "max_steps": 12, **values}
    return config(place, batch_size=4, global_batch_size=8, eval_every=6, save_every=6, **chosen)


def losses(run: Path) -> list[float]:
    lines = read_json_lines(run / "metrics.jsonl")
    return [line["loss_nats"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize(
    "values",
    [
        {"learn": "scales,codebook"},
        {"learn": "weights,scales,codebook"},
        {"learn": "weights,scales,codebook", "shard_latents": True, "form": "whole"},
        {"learn": "weights,scales,codebook", "shard_latents": True, "form": "layer"},
        {"learn": "weights,scales,codebook", "shard_latents": True, "ranks": "safe"},
        {"learn": "scales,codebook", "ranks": "safe"},
    ],
)
def test_two_gpus_train_as_one_does_and_stop_together(tmp_path: Path, values: dict) -> None:
    make_place(tmp_path)
    chosen = settings(tmp_path, **values)
    train_student(chosen, str(tmp_path / "student"), tmp_path / "alone", resume=False)
    stopped = launch(tmp_path, chosen, act=STOP_ONE)
    assert stopped.returncode != 0
    assert "stopped by SIGTERM after step 7" in stopped.stderr  # two later than it was heard
    assert "stopped by another rank after step 7" in stopped.stderr
    assert (tmp_path / "run" / "latest").read_text() == "checkpoints/step-000007\n"
    ended = launch(tmp_path, chosen)
    assert ended.returncode == 0, ended.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["world_size"] == 2 and [entry["step"] for entry in facts["resumed"]] == [7]
    if chosen.ranks == "safe":
        beats = read_json_lines(tmp_path / "run" / "heartbeat-rank0.jsonl")
        assert not any(beat["cuda_graph"] for beat in beats)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


LOOK = """
    held = sum(owner.weight.nbytes for owner in trainer.optimizer.sharded.values())
    assert trainer.step < 3 or held == LATENT_BYTES // 2
    assert not trainer.take_step.compile_facts()["cuda_graph"]
"""


@pytest.mark.parametrize("latent_dtype", ["fp32", "bf16"])
def test_each_of_two_gpus_holds_half_of_the_latent_weights(
    tmp_path: Path, latent_dtype: str
) -> None:
    make_place(tmp_path)
    chosen = settings(tmp_path, shard_latents=True, latent_dtype=latent_dtype, dtype="bf16")
    linears = quant_linears(load_model(str(tmp_path / "student"), device="cpu").model).values()
    weights = sum(linear.out_features * linear.in_features for linear in linears)
    size = {"fp32": 4, "bf16": 2}[latent_dtype]
    ended = launch(tmp_path, chosen, act=LOOK.replace("LATENT_BYTES", str(size * weights)))
    assert ended.returncode == 0, ended.stderr
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    judged = [line["kl_tail_nats"] for line in lines if line["kind"] == "eval"]
    assert judged[-1] < judged[0]
