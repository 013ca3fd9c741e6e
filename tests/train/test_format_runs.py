"""Students of every format: what is trained is what is stored and written, and runs go on."""

from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER
from quantized import ROUNDINGS, SPECS, tiny_quantized, with_rounded_inputs
from train_case import assert_resumes, config, make_place, make_trainer

from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.models.checkpoint import save_checkpoint
from qat.models.load import load_model
from qat.models.stored_state import INPUT_SCALE
from qat.nn.activation import read_alike
from qat.nn.quant_linear import quant_linears
from qat.nn.step import form_weights
from qat.quant.spec import LutSpec
from qat.train.start import TrainReport, train_student

IDS = torch.arange(24).view(2, 12) * 7 % 320
SLOW = pytest.mark.slow
LATENT, FROZEN, FIXED = "weights,scales,codebook", "scales,codebook", "weights,scales"
FORMATS = [
    pytest.param(2, 2, FROZEN, marks=SLOW), (2, 6, LATENT),
    pytest.param(2, 8, LATENT, marks=SLOW), pytest.param(4, 5, LATENT, marks=SLOW), (4, 5, FIXED),
    (4, 8, FROZEN), pytest.param(8, 1, FROZEN, marks=SLOW), (8, 7, LATENT),
]  # fmt: skip
"""Vector size, and bits of an index; what learns. Without the codebook it is Sherry's."""


def rounding_place(place: Path, kind: str, scale_bits: int = 32) -> Path:
    """A place whose student rounds its inputs."""
    make_place(place)
    torch.manual_seed(7)
    model = with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2"]), kind, scale_bits)
    save_checkpoint(model, TOKENIZER, place / "student", replace=True)
    return place


@pytest.mark.parametrize(
    ("kind", "scale_bits", "learn"),
    [*((*each, LATENT) for each in ROUNDINGS), ("int8-static", 16, "scales")],
)
def test_trained_inputs_are_stored(kind: str, scale_bits: int, learn: str, tmp_path: Path) -> None:
    place = rounding_place(tmp_path, kind, scale_bits)
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


@pytest.mark.parametrize(("size", "bits", "learn"), FORMATS)
def test_trained_is_stored_is_written(size: int, bits: int, learn: str, tmp_path: Path) -> None:
    codebook = "ternary" if learn == FIXED else "lut"
    spec = LutSpec(bits=bits, vector_size=size, codebook=codebook, group_size=16, scale_bits=8)
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
        if learn == FIXED:  # three of four
            assert (weight.view(len(weight), -1, 4) == 0).sum(-1).eq(1).all()
        assert not torch.equal(before.get_submodule(name).quantized_weight(), weight)


@pytest.mark.parametrize(
    "name",
    [
        "codewords",
        "adapters",
        pytest.param("inputs", marks=SLOW),
        pytest.param("frozen codewords", marks=SLOW),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    values = {"learn": LATENT}
    if name == "inputs":
        rounding_place(tmp_path, "int8-static", 16)
    elif name == "adapters":
        make_place(tmp_path, layers=1)
        values = {"learn": "lora,scales,codebook", "lora_rank": 4, "lr_lora": 1e-2}
    else:
        make_place(tmp_path, SPECS["fours8_s8"])
        values = {"learn": FROZEN if "frozen" in name else LATENT}

    def run(out: Path, *, resume: bool) -> TrainReport:
        settings, student = config(tmp_path, **values), str(tmp_path / "student")
        return train_student(settings, student, out, resume=resume)

    _, report = assert_resumes(run, tmp_path, 4)
    assert name != "inputs" or report.final.name.startswith("q2a2_a8s_e2e_")
