"""Exports for the reference system: back again bit for bit, and by its formula the same weights."""

import json
from pathlib import Path

import pytest
import torch
from legacy_case import parts_of, second_weight
from quantized import SPECS, random_weight, tiny_quantized
from tiny import tiny_tokenizer
from transformers import PreTrainedModel

from qat.cli import run_verb
from qat.errors import ExportError
from qat.extensions.anemll import export as anemll
from qat.extensions.anemll.checkpoint import import_checkpoint
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.nn.quant_linear import FrozenLutLinear, quant_linears
from qat.nn.swap import replace_module
from qat.quant.lora import Lora
from qat.quant.spec import LutSpec


def save(model: PreTrainedModel, path: Path) -> Path:
    save_checkpoint(model, tiny_tokenizer(), path)
    return path


@pytest.mark.parametrize("name", ["lut2", "lut2_s8", "ternary", "lut4_r1", "lut2_r4"])
def test_back_again_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS[name], num_hidden_layers=1)
    linear = model.model.layers[0].mlp.up_proj
    linear.set_lora(Lora(torch.randn(64, 2).half(), torch.randn(2, 32).half()))
    packed = save(model, tmp_path / "packed")
    result = run_verb(["export", str(packed), "--to", "anemll", "--out", str(tmp_path / "theirs")])
    assert result["logits_max_diff"] == 0
    import_checkpoint(tmp_path / "theirs", str(tmp_path / "theirs/base"), tmp_path / "back")
    first, back = (load_checkpoint(tmp_path / place) for place in ("packed", "back"))
    for name, linear in quant_linears(first).items():
        found = quant_linears(back)[name].quantized_weight()
        assert torch.equal(found, linear.quantized_weight()), name
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_its_formula_gives_the_weight(tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2_r4"])
    anemll.write(model, None, tmp_path)
    state = torch.load(tmp_path / "best_state_dict.pt", weights_only=True)
    for name, linear in quant_linears(model).items():
        parts, weight = parts_of(state, name), linear.quantized_weight()
        assert (second_weight(parts) - weight).abs().max() <= 1e-6 * weight.abs().max()
        assert torch.equal(parts["_Q"], parts["lut"][parts["_indices"]])
        assert parts["scale_A"].shape[1] == parts["rank_magnitude"].numel() == 4
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["version"] == "v2" and config["mlp_lut_bits"] == 2 and config["scale_rank"] == 4


def test_ranks_differ_within_a_part_and_are_filled_up(tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])  # rows of 32 and 64 in groups of 16
    anemll.write(model, None, tmp_path)
    state = torch.load(tmp_path / "best_state_dict.pt", weights_only=True)
    ranks = {t.shape[1] for key, t in state.items() if ".mlp." in key and key.endswith("scale_A")}
    assert ranks == {4}


def test_what_it_cannot_hold(tmp_path: Path) -> None:
    narrow = LutSpec(bits=2, group_size=16)
    assert anemll.lost(narrow, (64, 1024)) is None
    message = anemll.lost(narrow, (64, 3072))
    assert message == (
        "its 192 group scales a row are a scale of rank 192, and the largest rank of the "
        "reference system is 64"
    )
    chosen = anemll.scheme(narrow, (64, 3072))
    assert chosen.scale == "low_rank" and chosen.rank == 32 and chosen.bits == 2
    assert anemll.scheme(narrow, (64, 1024)) == narrow
    assert anemll.scheme(chosen, (64, 3072)) == chosen

    def replaced(name: str, spec: LutSpec) -> PreTrainedModel:
        model = tiny_quantized("qwen3", SPECS["lut2"])
        linear = FrozenLutLinear(random_weight(64, 32, spec), None, spec)
        replace_module(model, name, linear)
        return model

    name = "model.layers.1.mlp.up_proj"
    packed = save(replaced(name, SPECS["lut4"]), tmp_path / "packed")
    with pytest.raises(ExportError, match="one LUT size for all linears of mlp, but they have 2 "):
        run_verb(["export", str(packed), "--to", "anemll", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    model = tiny_quantized("qwen3", SPECS["lut2"])
    replace_module(model, name, torch.nn.Linear(32, 64, bias=False))
    with pytest.raises(ExportError, match=f"all quantized, but {name} is in floating point"):
        anemll.check(model)
