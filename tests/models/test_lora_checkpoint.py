"""Packed checkpoints with adapters: equal after reload, counted, and as strict as any other."""

import json
from pathlib import Path

import pytest
import torch
from covering import covering
from quantized import SPECS, tiny_adapted, tiny_quantized
from safetensors.torch import load_file
from tiny import ARCHITECTURES, edited, logits
from torch import Tensor
from transformers import AutoModelForCausalLM

from qat.errors import CheckpointError
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.cost import (
    bits_per_weight,
    linear_bits,
    parameter_count,
    stored_bits,
    tensor_bytes,
)
from qat.models.directory import CHECKSUMS
from qat.nn.quant_linear import quant_linears

NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tiny_adapted("qwen3", SPECS["lut2"]), None, tmp_path / "saved")
    (tmp_path / "saved" / CHECKSUMS).unlink()  # what else is wrong is told without it, too
    return tmp_path / "saved"


def edit(path: Path, modules: dict[str, dict], **tensors: Tensor) -> None:
    """Change what the checkpoint says of modules (None removes) and stores for `NAME`."""
    with edited(path) as values:
        for name, module in modules.items():
            found = values["quantization_config"]["modules"].get(name, {}) | module
            kept = {key: value for key, value in found.items() if value is not None}
            values["quantization_config"]["modules"][name] = kept
    with edited(path, "model.safetensors") as state:
        state |= {f"{NAME}.{key}": tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("spec", "architecture"), covering(["lut2", "lut3", "ternary", "lut2_r4"], ARCHITECTURES)
)
def test_reloaded_logits_are_equal(architecture: str, spec: str, tmp_path: Path) -> None:
    model = tiny_adapted(architecture, SPECS[spec])
    save_checkpoint(model, None, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert {m.lora_rank for m in quant_linears(loaded).values()} == {3}
    plain = tiny_quantized(architecture, SPECS[spec])
    assert not torch.equal(logits(plain), logits(model))


def test_only_adapters_add_to_the_format(saved: Path, tmp_path: Path) -> None:
    modules = json.loads((saved / "config.json").read_text())["quantization_config"]["modules"]
    assert all(values["lora_rank"] == 3 for values in modules.values())
    tensors = load_file(saved / "model.safetensors")
    assert {tensors[f"{NAME}.{key}"].dtype for key in ("lora_out", "lora_in")} == {torch.float16}
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), None, tmp_path / "plain")
    assert "lora" not in (tmp_path / "plain/config.json").read_text()


def test_adapters_count_as_bits_and_bytes_but_not_as_parameters(saved: Path) -> None:
    model, plain = load_checkpoint(saved), tiny_quantized("qwen3", SPECS["lut2"])
    assert parameter_count(model) == parameter_count(plain)
    tensors = load_file(saved / "model.safetensors")
    for name, linear in quant_linears(model).items():
        own = [t for key, t in tensors.items() if key.startswith(f"{name}.")]
        assert stored_bits(linear) == 8 * sum(t.numel() * t.element_size() for t in own)
        O, I = linear.out_features, linear.in_features
        extra = 16 * 3 * (O + I) / (O * I)
        bare = bits_per_weight(plain.get_submodule(name))
        assert bits_per_weight(linear) == pytest.approx(bare + extra)
    assert linear_bits(model) > linear_bits(plain)
    assert tensor_bytes(model) == sum(t.numel() * t.element_size() for t in tensors.values())


DAMAGES = {
    "dtype": (
        {},
        {"lora_out": torch.ones(32, 3)},
        rf"wrong dtypes: {NAME}.lora_out F32 instead of F16",
    ),
    "another_rank": (
        {NAME: {"lora_rank": 4}},
        {},
        rf"wrong shapes: {NAME}.lora_in \(3, 64\) instead of",
    ),
    "no_rank": ({NAME: {"lora_rank": 0}}, {}, "lora_rank=0, expected a positive integer"),
    "words": ({NAME: {"lora_rank": "3"}}, {}, "lora_rank='3', expected a positive integer"),
    "too_large": ({NAME: {"lora_rank": 33}}, {}, "lora_rank=33, expected at most 32 for a"),
    "no_place": ({NAME: {"lora_rank": None}}, {}, rf"no place for: {NAME}.lora_in, {NAME}.lora_o"),
    "a_table": (
        {"model.embed_tokens": {"bits": 8, "lora_rank": 2}},
        {},
        "embed_tokens has lora_rank=2, expected none for a ",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damages_are_named(damage: str, saved: Path) -> None:
    modules, tensors, message = DAMAGES[damage]
    edit(saved, modules, **tensors)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved)


def test_a_factor_beyond_float16_is_refused(tmp_path: Path) -> None:
    model = tiny_adapted("qwen3", SPECS["lut2"])
    with torch.no_grad():
        model.get_submodule(NAME).lora_out[0, 0] = 1e6
    with pytest.raises(CheckpointError, match=rf"{NAME}.lora_out holds values that are not finite"):
        save_checkpoint(model, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
