"""Float models whose weights lie on a grid become students with just that grid."""

from pathlib import Path

import pytest
import torch
from cli_case import call
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import Tensor

from qat.cli import run_verb
from qat.extensions.targets.snap import find_grid
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_model
from qat.models.stored_state import quantized_modules
from qat.nn.swap import linear_names
from qat.quant.codebook import fixed_grid
from qat.quant.spec import LutSpec
from qat.quant.weight import dequantize

ROWS, COLUMNS = 48, 256
FORMS = [
    ("seq", 1, 128, torch.bfloat16),
    ("ternary", 2, 256, torch.bfloat16),
    ("int", 2, 64, torch.float16),
    ("seq", 2, 64, torch.bfloat16),
    ("int", 3, 32, torch.bfloat16),
    ("int", 4, 32, torch.bfloat16),
    ("int", 4, 256, torch.float32),
    ("e2m1", 4, 16, torch.bfloat16),
    ("e2m1", 4, 32, torch.bfloat16),
    ("int", 5, 32, torch.float16),
    ("int", 8, 32, torch.float16),
]


def on_grid(codebook: str, bits: int, size: int, dtype: torch.dtype, rows: int = ROWS) -> Tensor:
    """Return a random weight on a grid, rounded to a dtype; its scales are no wider than that."""
    rng = torch.Generator().manual_seed(bits + size)
    levels = fixed_grid(LutSpec(bits=bits, codebook=codebook, group_size=size))
    codes = torch.randint(len(levels), (rows, COLUMNS // size, size), generator=rng)
    scales = torch.rand(rows, COLUMNS // size, 1, generator=rng) * 0.1 + 0.01
    scales = scales if dtype == torch.float32 else scales.half().float()
    return (levels[codes] * scales).view(rows, COLUMNS).to(dtype).float()


@pytest.mark.parametrize(("codebook", "bits", "size", "dtype"), FORMS)
def test_a_weight_on_a_grid_loses_nothing(codebook, bits, size, dtype) -> None:
    weight = on_grid(codebook, bits, size, dtype)
    spec, found = find_grid(weight)
    assert (spec.codebook, spec.bits, spec.group_size) == (codebook, bits, size)
    assert torch.equal(dequantize(found).to(dtype).float(), weight)
    assert spec.scale_bits == (32 if dtype == torch.float32 else 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_another_weight_has_no_grid(dtype: torch.dtype) -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert find_grid(weight.float()) is None
    assert find_grid(torch.zeros(4, 32)) is None
    nearly = on_grid("int", 4, 32, torch.bfloat16)
    nearly[40, :8] *= torch.linspace(1.03, 1.4, 8)  # some weights between two levels
    nearly = nearly.bfloat16().float()
    assert find_grid(nearly) is None


def test_groups_of_zeros_and_zero_points_are_held() -> None:
    weight = on_grid("int", 4, 32, torch.float16)
    weight[3:5] = 0
    spec, found = find_grid(weight)
    assert spec.bits == 4 and torch.equal(dequantize(found).half().float(), weight)
    # codes of 0 to 15 less a zero point of each group, as AWQ and GPTQ store them
    rng = torch.Generator().manual_seed(0)
    codes, zeros = torch.randint(16, (9, 8, 32), generator=rng), torch.arange(72).view(9, 8, 1) % 16
    scales = (torch.rand(9, 8, 1, generator=rng) * 0.1 + 0.01).half().float()
    weight = ((codes - zeros) * scales).half().float().view(9, 256)
    spec, found = find_grid(weight)
    assert (spec.codebook, spec.bits) == ("int", 5)
    assert torch.equal(dequantize(found).half().float(), weight)


def test_a_palette_is_held() -> None:
    rng = torch.Generator().manual_seed(0)
    palette = torch.randn(13, generator=rng).bfloat16().float()
    weight = palette[torch.randint(13, (ROWS, COLUMNS), generator=rng)]
    spec, found = find_grid(weight)
    assert (spec.codebook, spec.bits) == ("lut", 4) and torch.equal(dequantize(found), weight)


def save_snappable(out: Path, left: str = "") -> Path:
    """Write a bfloat16 model whose linears, but for `left`, lie on a grid of 4 bits."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=256, num_attention_heads=8)
    for number, name in enumerate(linear_names(model)):
        linear = model.get_submodule(name)
        if name != left:
            weight = on_grid("int", 4, 32, torch.bfloat16, linear.out_features + number)
            linear.weight.data = weight[: linear.out_features]
    model.bfloat16().save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)
    return out


def test_the_verb_makes_a_student_whose_weights_are_the_sources(tmp_path: Path, caplog) -> None:
    left = "model.layers.1.mlp.up_proj"
    source = save_snappable(tmp_path / "source", left)
    said = run_verb(["convert", str(source), "--snap", "--out", str(tmp_path / "out")])
    student, model = load_checkpoint(tmp_path / "out"), load_model(str(source), dtype="fp32").model
    found = quantized_modules(student)
    assert found.keys() == {*linear_names(model)} - {left} and said["kept"] == len(found)
    for name, module in found.items():
        expected = model.get_submodule(name).weight
        assert torch.equal(module.quantized_weight().bfloat16().float(), expected)
        assert (module.spec.bits, module.spec.group_size) == (4, 32)
    assert torch.equal(student.get_submodule(left).weight.float(), model.get_submodule(left).weight)
    assert any(left in line and "1 of 14" in line for line in caplog.messages)


def test_what_cannot_be_snapped_is_refused_in_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    save_tiny(tmp_path / "float", "llama")
    run_verb(
        ["convert", str(tmp_path / "float"), "--to", "q4a4", "--out", str(tmp_path / "packed")]
    )
    out = ("--out", tmp_path / "out")
    capsys.readouterr()
    for words in (
        (tmp_path / "float", "--snap"),
        (tmp_path / "float", "--snap", "--to", "q4a4"),
        (tmp_path / "float", "--snap", "--keep"),
        (tmp_path / "packed", "--snap"),
        (tmp_path / "nowhere", "--snap"),
    ):
        assert call(monkeypatch, "convert", *words, *out) == 1
        error = capsys.readouterr().err
        assert error.count("qat: ") == 1 and error.rpartition("qat: ")[2].count("\n") == 1
        assert not (tmp_path / "out").exists()
