"""Rotary frequencies in llama.cpp's files."""

import math
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qat.errors import CheckpointError
from qat.models.gguf_layout import ROPE_FACTORS, read_rope_scaling, rope_factors

gguf = pytest.importorskip("gguf")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**rope: object) -> object:
    return tiny_model("llama", head_dim=64, rope_parameters={**LLAMA3, **rope}).config


def file_of(path: Path, factors: torch.Tensor) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(ROPE_FACTORS, factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_factors_are_those_of_the_formula_and_of_transformers() -> None:
    found, expected = rope_factors(config()), []
    for number in range(32):
        wavelength = 2 * math.pi * 500_000.0 ** (number / 32)
        smooth = min(max((8192 / wavelength - 1) / 3, 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / 32 + smooth))
    assert {1.0, 32.0} < set(found.tolist())
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config(), "cpu")
    plain = 500_000.0 ** (-torch.arange(32) / 32)
    torch.testing.assert_close(plain / found, scaled, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "rope", [{}, {"factor": 8.0}, {"original_max_position_embeddings": 512, "rope_theta": 1e4}]
)
def test_the_settings_are_found_from_the_factors(tmp_path: Path, rope: dict) -> None:
    path = file_of(tmp_path / "it.gguf", rope_factors(config(**rope)))
    theta = {**LLAMA3, **rope}["rope_theta"]
    read = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": theta}).config
    read.head_dim = 64
    read_rope_scaling(path, read)
    assert read.rope_parameters == config(**rope).rope_parameters


def test_other_factors_are_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path / "it.gguf", torch.linspace(1, 8, 32))
    with pytest.raises(CheckpointError, match="factors up to 8 .*high_freq_factor=4"):
        read_rope_scaling(path, config())
