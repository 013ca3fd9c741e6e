"""Saving beside a GPU's work: the step after a save changes nothing of what is saved."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from train_case import config, make_place, make_trainer

from qat.backend import device as backends
from qat.models.stored_state import packed_state_dict
from qat.train.resume import load_training_state
from qat.train.saver import problem
from qat.train.start import train_student

pytestmark = pytest.mark.gpu


def test_later_work_waits_for_the_copies_and_the_host_does_not() -> None:
    backend = backends.select("cuda")
    weight = torch.randn(2**26, device="cuda")
    expected = weight.cpu()
    for _ in range(3):
        copies, copying = backend.copied_to_host({"a": weight, "b": weight})
        copying.hold()
        weight.zero_()
        copying.wait()
        assert copies["a"] is copies["b"] and copies["a"].is_pinned()
        assert torch.equal(copies["a"], expected)
        weight.copy_(expected)


def test_small_tensors_travel_together_before_they_change() -> None:
    backend = backends.select("cuda")
    tensors = {str(n): torch.randn(n + 1, 7, device="cuda") for n in range(500)}
    tensors |= {"step": torch.tensor(3.0, device="cuda"), "host": torch.randn(5)}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    for _ in range(3):
        copies, copying = backend.copied_to_host(tensors)
        copying.hold()
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        copying.wait()
        assert all(torch.equal(copies[name], value) for name, value in expected.items())
        assert copies["3"].untyped_storage().data_ptr() == copies["9"].untyped_storage().data_ptr()
        for name, tensor in changed.items():
            tensors[name].copy_(tensor)


@pytest.mark.parametrize("learn", ["weights,scales,codebook", "scales,codebook"])
def test_a_save_between_steps_holds_the_step_s_own_state(tmp_path: Path, learn: str) -> None:
    place = make_place(tmp_path)
    settings = config(place, device="cuda", dtype="bf16", max_steps=9, save_every=1, learn=learn)
    trainer = make_trainer(settings, place / "student", tmp_path / "run")
    seen, packed = {}, {}
    real = trainer.saver.save

    def save(step: int, best: float, *, is_best: bool) -> None:
        seen[step] = {n: t.detach().cpu().clone() for n, t in trainer.optimizer.state().items()}
        state = packed_state_dict(trainer.student.model)
        packed[step] = {name: tensor.cpu().clone() for name, tensor in state.items()}
        real(step, best, is_best=is_best)

    trainer.saver.save = save
    trainer.train()
    for path in trainer.run.checkpoints():
        assert problem(path) is None
        found, facts = load_training_state(path)
        state = seen[facts["step"]]
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        stored = safetensors.torch.load_file(path / "model.safetensors")
        assert all(torch.equal(packed[facts["step"]][name], stored[name]) for name in stored)


def test_a_run_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    place, out = make_place(tmp_path), tmp_path / "run"
    settings = config(place, device="cuda", dtype="bf16", max_steps=6, save_every=2)
    train_student(settings, str(place / "student"), out, resume=False)
    assert train_student(settings, str(place / "student"), out, resume=True).steps == 6
