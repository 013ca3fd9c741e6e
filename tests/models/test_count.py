"""Parameters, bits and bytes against what a checkpoint really holds."""

import math
from pathlib import Path

import pytest
from quantized import SPECS, frozen_linear, tiny_quantized
from safetensors.torch import load_file
from tiny import tiny_model

from qat.models.checkpoint import save_checkpoint
from qat.models.cost import (
    bits_per_weight,
    model_bits_per_weight,
    model_bytes,
    parameter_count,
    quantized_parameter_count,
    stored_bits,
    tensor_bytes,
)
from qat.nn.step import quant_linears
from qat.quant.spec import LutSpec


@pytest.mark.parametrize("tied", [False, True])
def test_quantizing_does_not_change_the_number_of_parameters(tied: bool) -> None:
    overrides = {"tie_word_embeddings": tied, "mlp_bias": True}
    model = tiny_model("llama", **overrides)
    expected = sum(p.numel() for p in model.parameters())
    assert parameter_count(model) == expected
    assert parameter_count(tiny_quantized("llama", SPECS["lut2"], **overrides)) == expected


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bits_are_those_in_the_file(spec: LutSpec, tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", spec)
    save_checkpoint(model, None, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    linears = quant_linears(model)
    total = 0
    for name, linear in linears.items():
        own = [t for key, t in tensors.items() if key.startswith(f"{name}.")]
        assert stored_bits(linear) == 8 * sum(t.numel() * t.element_size() for t in own)
        total += stored_bits(linear)
    assert model_bits_per_weight(model) == total / quantized_parameter_count(model)
    assert tensor_bytes(model) == sum(t.numel() * t.element_size() for t in tensors.values())
    assert tensor_bytes(model) < model_bytes(tmp_path / "out") < tensor_bytes(model) + 10_000


def test_bits_per_weight_of_a_known_case() -> None:
    # 2 bits an index, 16 bits of scale for each 16 weights, four levels of 32 bits
    expected = 2 + 16 / 16 + 4 * 32 / (64 * 128)
    assert bits_per_weight(frozen_linear(64, 128, SPECS["lut2"])) == expected


def test_a_scale_may_cost_8_bits() -> None:
    expected = 2 + 8 / 8 + 4 * 32 / (64 * 128)
    assert bits_per_weight(frozen_linear(64, 128, SPECS["lut2_s8"])) == expected


def test_a_float_model_has_no_bits_per_weight() -> None:
    assert math.isnan(model_bits_per_weight(tiny_model()))
    assert quantized_parameter_count(tiny_model()) == 0
