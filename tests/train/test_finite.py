"""NaN and infinity anywhere in a run are told at the next logged step, and never saved."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from train_case import config, trainer_of

from qat.errors import CheckpointError, TrainingError
from qat.files import sha256_file
from qat.logs import read_json_lines
from qat.train.finite import nan_if_not_finite, not_finite
from qat.train.resume import choose
from qat.train.run import MANIFEST
from qat.train.saver import STATE_TENSORS, problem, prove
from qat.train.start import train_student

CPU = torch.device("cpu")
BAD = (torch.nan, torch.inf, -torch.inf)
WAYS = {
    "latent": {"learn": "weights,scales,codebook,norms"},
    "bf16": {"learn": "weights,scales", "latent_dtype": "bf16"},
    "8bit": {"learn": "weights,scales", "optimizer": "adamw8bit"},
    "frozen": {"learn": "scales,codebook"},
    "lora": {"learn": "lora,norms", "lora_rank": 2},
    "one_linear": {"learn": "scales", "mlp_only": True},
}


def test_one_bad_value_among_many_tensors() -> None:
    for bad in BAD:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            tensors = {
                "steps": torch.ones((), dtype=torch.int32),
                "a": torch.full((3, 5), torch.finfo(dtype).max / 64, dtype=dtype),
                "b": torch.zeros(7, dtype=dtype),
                "none": torch.zeros(0),
            }
            elsewhere = {"meta": torch.empty(3, device="meta")}
            assert nan_if_not_finite(tensors | elsewhere, CPU) == 0
            assert nan_if_not_finite({}, CPU) == 0 and not_finite(tensors) is None
            tensors["b"][2:4] = bad
            assert nan_if_not_finite(tensors, CPU).isnan()
            assert not_finite(tensors) == "b: 2 of 7 values are NaN or infinite"


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_value_in_any_tensor_of_a_run_is_told(place: Path, tmp_path: Path, way: str) -> None:
    if way == "8bit":
        pytest.importorskip("torchao")
    trainer = trainer_of(place, tmp_path, **WAYS[way])
    step = trainer.take_step
    result = step(trainer.micro_batches(0), 0)
    assert step.sum_over_ranks(result)[1] == 0
    numbers = {name: t.detach() for name, t in step.numbers().items()}
    floats = {n: t for n, t in numbers.items() if t.is_floating_point() and n[:5] != "step."}
    assert any("exp_avg" in name for name in floats) and any("codebook" in name for name in floats)
    for number, (name, tensor) in enumerate(floats.items()):
        kept = tensor.clone()
        tensor.view(-1)[-1:] = BAD[number % 3]
        assert step.sum_over_ranks(result)[1].isnan(), name
        tensor.copy_(kept)
    assert step.sum_over_ranks(result)[1] == 0


def test_a_bad_latent_weight_on_the_host_is_told_by_the_step_that_moves_it(
    place: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(place, tmp_path, **WAYS["bf16"], offload="latents")
    (name, linear), *_ = trainer.optimizer.hosted.items()
    linear.latent[0, 1] = torch.inf
    step = trainer.take_step
    assert step.sum_over_ranks(step(trainer.micro_batches(0), 0))[1].isnan()
    assert name in str(not_finite(step.numbers()))


def test_a_loss_of_an_unlogged_step_is_told(place: Path, tmp_path: Path) -> None:
    trainer = trainer_of(place, tmp_path, learn="scales", log_every=3, eval_every=6, save_every=6)
    real, calls = trainer.take_step.run_micro_step, []

    def spoilt(*arguments: object) -> Tensor:
        calls.append(real(*arguments))  # the gradients stay finite
        return calls[-1] * torch.nan if len(calls) == 2 else calls[-1]

    trainer.take_step.run_micro_step = spoilt
    with pytest.raises(TrainingError, match="up to step 3 .*loss [0-9.]+"):
        trainer.train()
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"], event["which"]) == ("not_finite", 3, None)


def test_latent_weights_that_are_nan_are_told_and_never_saved(place: Path, tmp_path: Path) -> None:
    """A quantizer maps them to an index: loss and gradients are as finite as ever."""
    trainer = trainer_of(place, tmp_path, log_every=3, save_every=2, eval_every=6)
    real = trainer.optimizer.step

    def poison(number: int) -> Tensor:
        norm = real(number)
        if number == 2:
            trainer.optimizer.parameters[name].data[0, :3] = torch.nan
        return norm

    name = next(name for name in trainer.optimizer.parameters if name.endswith("q_proj.weight"))
    trainer.optimizer.step = poison
    message = rf"up to step 3 is finite .*; {name}: 3 of 2,048 .*checkpoint is \S+step-000002"
    with pytest.raises(TrainingError, match=message):
        trainer.train()
    names = [path.name for path in trainer.run.checkpoints()]
    assert names == ["step-000000", "step-000002"]  # the untrained one is the best so far


def test_a_held_out_loss_that_is_nan_ends_the_run(place: Path, tmp_path: Path) -> None:
    trainer = trainer_of(place, tmp_path)
    real = trainer.judge.verdict
    trainer.judge.verdict = lambda dtype: {**real(dtype), "kl_tail_nats": torch.nan}
    with pytest.raises(TrainingError, match="step 0 is NaN"):
        trainer.train()
    assert read_json_lines(tmp_path / "events.jsonl")[0]["kind"] == "not_finite"


def spoil(checkpoint: Path, name: str) -> None:
    """Write NaN latent weights into a run's checkpoint as an honest save would have: proven."""
    path = checkpoint / STATE_TENSORS
    tensors = safetensors.torch.load_file(path)
    tensors[name][:] = torch.nan
    safetensors.torch.save_file(tensors, path)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][STATE_TENSORS] = {
        "bytes": path.stat().st_size,
        "sha256": sha256_file(path),
    }
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def test_a_proven_checkpoint_of_nan_is_passed_over(place: Path, tmp_path: Path, caplog) -> None:
    trainer = trainer_of(place, tmp_path, max_steps=2, save_every=1, eval_every=2)
    trainer.train()
    newest, older = trainer.run.checkpoint_path(2), trainer.run.checkpoint_path(1)
    name = "exp_avg.model.layers.0.mlp.up_proj.weight"
    spoil(newest, name)
    assert problem(newest).startswith(f"{STATE_TENSORS}: {name}: 2,048 of 2,048 values")
    assert problem(newest, is_student=True) is None
    choice = choose(trainer.run)
    assert choice.checkpoint == older and choice.skipped == [newest.name]
    assert "step-000002 is damaged" in caplog.text
    spoil(older, f"parameter.{name.removeprefix('exp_avg.')}")
    with pytest.raises(CheckpointError, match="no checkpoint .*NaN"):
        choose(trainer.run)


def test_a_student_of_nan_is_not_begun_with(place: Path, tmp_path: Path) -> None:
    student = shutil.copytree(place / "student", tmp_path / "student")
    (student / "checksums.json").unlink(missing_ok=True)
    tensors = safetensors.torch.load_file(student / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, -1] = torch.nan  # of a word that nobody says
    safetensors.torch.save_file(tensors, student / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="embed_tokens.weight: 1 of .* NaN"):
        train_student(config(place), str(student), tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


def test_proof_is_refused_to_nan(tmp_path: Path) -> None:
    written = {"a": torch.tensor([1.0, torch.nan])}
    safetensors.torch.save_file(written, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="a: 1 of 2 values are NaN .* numbers to save"):
        prove(tmp_path, written)
