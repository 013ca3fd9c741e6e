"""Students of vectors and of trellises: what is trained is what is stored and written."""

from pathlib import Path

import pytest
import torch
from crash import stopped_at
from quantized import SPECS
from train_case import assert_same_end, config, make_place, make_trainer

from qat.backend.base import Backend
from qat.errors import ConfigError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.models.load import load_model
from qat.nn.step import form_weights, quant_linears
from qat.quant.spec import LutSpec
from qat.train.optim import Optimizer
from qat.train.start import TrainReport, train_student

SLOW = pytest.mark.slow
LATENT, FROZEN = "weights,scales,codebook", "scales,codebook"
FORMATS = [
    pytest.param(2, 2, 0, FROZEN, marks=SLOW), (2, 6, 0, LATENT),
    pytest.param(2, 8, 0, LATENT, marks=SLOW), pytest.param(4, 5, 0, LATENT, marks=SLOW),
    (4, 8, 0, FROZEN), pytest.param(8, 1, 0, FROZEN, marks=SLOW), (8, 7, 0, LATENT),
    pytest.param(1, 4, 1, LATENT, marks=SLOW), (1, 8, 2, FROZEN),
    pytest.param(1, 8, 3, FROZEN, marks=SLOW),
]  # fmt: skip
"""Vector size, bits of an index, and of a weight in a trellis; what learns."""


def run(place: Path, out: Path, *, resume: bool = False, learn: str) -> TrainReport:
    settings = config(place, learn=learn)
    return train_student(settings, str(place / "student"), out, resume=resume, begins_anew=resume)


@pytest.mark.parametrize(("size", "bits", "trellis_bits", "learn"), FORMATS)
def test_trained_is_stored_is_written(
    size: int, bits: int, trellis_bits: int, learn: str, tmp_path: Path
) -> None:
    kind = {"vector_size": size, "trellis_bits": trellis_bits}
    spec = LutSpec(bits=bits, **kind, group_size=16, scale_bits=8)
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


def test_a_device_that_compiles_finds_no_paths(tmp_path: Path, monkeypatch) -> None:
    place = make_place(tmp_path, SPECS["trellis2_s8"])
    monkeypatch.setattr(Backend, "fixed_shapes", lambda _: True)
    with pytest.raises(ConfigError, match="a trellis"):
        run(place, tmp_path / "run", learn="weights,scales,codebook")


@pytest.mark.parametrize(("name", "learn"), [("fours8_s8", LATENT), ("trellis2_s8", FROZEN)])
def test_a_stopped_run_goes_on_bit_for_bit(name: str, learn: str, tmp_path: Path) -> None:
    place = make_place(tmp_path, SPECS[name])
    whole = tmp_path / "whole", run(place, tmp_path / "whole", learn=learn)
    with stopped_at(Optimizer, "step", 4):
        run(place, tmp_path / "stopped", learn=learn)
    report = run(place, tmp_path / "stopped", resume=True, learn=learn)
    assert_same_end(whole, tmp_path / "stopped", report)
