"""Students of vectors: what is trained is what is stored and written."""

from pathlib import Path

import pytest
import torch
from crash import stopped_at
from quantized import SPECS
from train_case import assert_same_end, config, make_place, make_trainer

from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.models.load import load_model
from qat.nn.quant_linear import quant_linears
from qat.nn.step import form_weights
from qat.quant.spec import LutSpec
from qat.train.optim import Optimizer
from qat.train.start import TrainReport, train_student

SLOW = pytest.mark.slow
LATENT, FROZEN = "weights,scales,codebook", "scales,codebook"
FORMATS = [
    pytest.param(2, 2, FROZEN, marks=SLOW), (2, 6, LATENT),
    pytest.param(2, 8, LATENT, marks=SLOW), pytest.param(4, 5, LATENT, marks=SLOW),
    (4, 8, FROZEN), pytest.param(8, 1, FROZEN, marks=SLOW), (8, 7, LATENT),
]  # fmt: skip
"""Vector size, and bits of an index; what learns."""


def run(place: Path, out: Path, *, resume: bool = False, learn: str) -> TrainReport:
    settings = config(place, learn=learn)
    return train_student(settings, str(place / "student"), out, resume=resume, begins_anew=resume)


@pytest.mark.parametrize(("size", "bits", "learn"), FORMATS)
def test_trained_is_stored_is_written(size: int, bits: int, learn: str, tmp_path: Path) -> None:
    spec = LutSpec(bits=bits, vector_size=size, group_size=16, scale_bits=8)
    place = make_place(tmp_path, spec)
    # in three steps a number of a codeword shall move by 1/64 of the largest
    settings = config(place, learn=learn, max_steps=3, lr=0.1, lr_codebook=0.1)
    trainer = make_trainer(settings, place / "student", tmp_path / "run")
    before = load_model(str(place / "student"), device="cpu").model
    trainer.train()
    model = trainer.student.model
    form_weights(model, torch.float32)
    trained = {n: linear.weight_in(torch.float32) for n, linear in quant_linears(model).items()}
    stored = str(trainer.run.pointed("latest"))
    reloaded = quant_linears(load_model(stored, device="cpu", dtype="fp32").model)
    export_model(stored, ExportConfig(to="dense", dtype="fp32"), tmp_path / "dense")
    dense = load_model(str(tmp_path / "dense"), device="cpu", dtype="fp32").model
    for name, weight in trained.items():
        assert torch.equal(reloaded[name].quantized_weight(), weight)
        assert torch.equal(dense.get_submodule(name).weight, weight)
        assert reloaded[name].codebook.shape == spec.codebook_shape
        assert not torch.equal(before.get_submodule(name).quantized_weight(), weight)


@pytest.mark.parametrize("learn", [LATENT, FROZEN])
def test_a_stopped_run_goes_on_bit_for_bit(learn: str, tmp_path: Path) -> None:
    place = make_place(tmp_path, SPECS["fours8_s8"])
    whole = tmp_path / "whole", run(place, tmp_path / "whole", learn=learn)
    with stopped_at(Optimizer, "step", 4):
        run(place, tmp_path / "stopped", learn=learn)
    report = run(place, tmp_path / "stopped", resume=True, learn=learn)
    assert_same_end(whole, tmp_path / "stopped", report)
