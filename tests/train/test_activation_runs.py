"""Students that round their inputs: what is trained is what is stored, and runs go on."""

from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER
from crash import stopped_at
from quantized import ROUNDINGS, SPECS, tiny_quantized, with_rounded_inputs
from train_case import assert_same_end, config, make_place, make_trainer

from qat.errors import ConfigError
from qat.models.checkpoint import save_checkpoint
from qat.models.load import load_model
from qat.models.stored_state import INPUT_SCALE
from qat.nn.activation import read_alike
from qat.nn.quant_linear import quant_linears
from qat.nn.step import form_weights
from qat.train.learnable import learnable
from qat.train.optim import Optimizer
from qat.train.start import TrainReport, train_student

IDS = torch.arange(24).view(2, 12) * 7 % 320


def place_of(tmp_path: Path, kind: str, scale_bits: int = 32) -> Path:
    place = make_place(tmp_path)
    torch.manual_seed(7)
    model = with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2"]), kind, scale_bits)
    save_checkpoint(model, TOKENIZER, place / "student", replace=True)
    return place


def run(place: Path, out: Path, *, resume: bool = False) -> TrainReport:
    student = str(place / "student")
    return train_student(config(place), student, out, resume=resume, begins_anew=resume)


@pytest.mark.parametrize(
    ("kind", "scale_bits", "learn"),
    [*((*each, "weights,scales,codebook") for each in ROUNDINGS), ("int8-static", 16, "scales")],
)
def test_trained_is_stored(kind: str, scale_bits: int, learn: str, tmp_path: Path) -> None:
    place = place_of(tmp_path, kind, scale_bits)
    settings = config(place, learn=learn, max_steps=2, lr_scales=0.1, warmup_steps=0)
    trainer = make_trainer(settings, place / "student", tmp_path / "run")
    before = load_model(str(place / "student"), device="cpu").model.state_dict()
    trainer.train()
    model = trainer.student.model
    form_weights(model, torch.float32)
    again = load_model(str(trainer.run.pointed("latest")), device="cpu", dtype="fp32").model
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, again(IDS).logits)
    scales = {n: t for n, t in again.state_dict().items() if n.endswith(INPUT_SCALE)}
    assert bool(scales) is (kind == "int8-static")
    for name, scale in scales.items():
        assert 0.7 < scale / before[name] < 1.3 and scale != before[name]
    attention = again.model.layers[1].self_attn
    assert read_alike([attention.q_proj, attention.k_proj, attention.v_proj])


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    place = place_of(tmp_path, "int8-static", 16)
    whole = tmp_path / "whole", run(place, tmp_path / "whole")
    with stopped_at(Optimizer, "step", 4):
        run(place, tmp_path / "stopped")
    report = run(place, tmp_path / "stopped", resume=True)
    assert_same_end(whole, tmp_path / "stopped", report)
    assert report.final.name.startswith("q2a2_a8s_e2e_")


def test_a_shared_scale_learns_once_and_with_the_scales() -> None:
    model = with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2"]), "int8-static")
    names = list(quant_linears(model))
    found = learnable(model, names, ("scales", "codebook"))
    inputs = [name for name in found["scales"] if name.endswith(INPUT_SCALE)]
    assert len(inputs) == 8 and "model.layers.0.self_attn.q_proj.activation.scale" in inputs
    assert learnable(model, names, ("codebook",)).keys() == {"codebook"}
    with pytest.raises(ConfigError, match="no lora"):
        learnable(model, names, ("lora",))


@pytest.mark.slow
def test_compiled_steps_are_those_of_eager(tmp_path: Path) -> None:
    place, losses = place_of(tmp_path, "int8-static"), []
    for mode in ("off", "on"):
        settings = config(place, compile=mode, max_steps=2)
        trainer = make_trainer(settings, place / "student", tmp_path / mode)
        sums = trainer.take_step(trainer._micro_batches(0), 0).sums
        moved = trainer.optimizer.parameters.items()
        losses.append(({n: s.item() for n, s in sums.items()}, {n: p.clone() for n, p in moved}))
    (plain, parameters), (compiled, again) = losses
    assert plain == pytest.approx(compiled, rel=1e-3)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, again[name], rtol=0, atol=2e-3)
