"""Checkpoints with a trellis by qat 0.1: opened as levels of the same values, and never made."""

import json
from pathlib import Path

import pytest
import torch
from quantized import random_weight, tiny_quantized
from tiny import edited
from torch import Tensor
from train_case import config
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat.errors import CheckpointError, ConfigError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.extensions.vllm.packed import read_config
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.hf_quantizer import FORMAT
from qat.models.stored_state import quantized_modules
from qat.nn.lut_embedding import QuantTable
from qat.nn.quant_linear import FrozenLutLinear
from qat.nn.swap import put_quantized, table_names
from qat.quant.spec import LutSpec, preset_called
from qat.quant.weight import pack
from qat.train.start import make_trainable

IDS = torch.arange(40).view(2, 20) * 7 % 320
FORMATS = [(8, 2, 8), (6, 2, 16), (8, 3, 8), (4, 1, 16)]
"""Bits of an index, bits per weight, and bits of a level."""


def written(
    directory: Path, bits: int, k: int, level_bits: int, *, is_legacy: bool = False
) -> PreTrainedModel:
    """Write a tiny model with trellises in linears and the embedding; return it as levels."""
    spec = LutSpec(bits=bits, group_size=16, scale_bits=8)
    model = tiny_quantized("qwen3", spec, initializer_range=0.3)
    for name in table_names(model):
        put_quantized(model, name, random_weight(320, 32, spec), spec)
    modules = quantized_modules(model)
    stored = {n: tensors_of(module, bits, k, level_bits) for n, module in modules.items()}
    save_checkpoint(model, None, directory)
    with edited(directory, "model.safetensors") as tensors:
        tensors |= {f"{n}.{key}": t for n, parts in stored.items() for key, t in parts.items()}
    entries = {"trellis_bits": k, "level_bits": level_bits}
    settings = {"modules": {n: module.spec.model_dump() | entries for n, module in modules.items()}}
    settings |= {"format": 5} if is_legacy else {"format": FORMAT, "features": ["trellis"]}
    with edited(directory) as values:
        values["quantization_config"] = {"quant_method": "qat", **settings}
    return model


def tensors_of(
    module: FrozenLutLinear | QuantTable, bits: int, k: int, level_bits: int
) -> dict[str, Tensor]:
    """Give a module random paths and levels in any order; return its tensors in a trellis."""
    own = torch.randint(2**k, (module.out_features, module.in_features), dtype=torch.uint8)
    index, columns = torch.zeros(module.out_features, dtype=torch.uint8), []
    for column in own.T:
        index = index >> k | column << bits - k
        columns.append(index)
    steps = torch.randint(-127, 128, (2**bits, 1), dtype=torch.int8)  # some of them are equal
    module.packed.copy_(pack(torch.stack(columns, 1), bits))
    module.codebook.data = steps[:, 0] / 64
    return {"packed": pack(own, k), "codebook": steps if level_bits == 8 else (steps / 64).half()}


@pytest.mark.parametrize(("bits", "k", "level_bits"), FORMATS)
@pytest.mark.parametrize("is_legacy", [False, True])
def test_it_opens_as_the_same_function(bits, k, level_bits, is_legacy, tmp_path) -> None:
    model = written(tmp_path / "old", bits, k, level_bits, is_legacy=is_legacy)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "old", dtype=torch.float32)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    for module in quantized_modules(again).values():
        assert module.spec == LutSpec(bits=bits, group_size=16, scale_bits=8)
        assert module.codebook.shape == (2**bits,) and (module.codebook.diff() >= 0).all()
    save_checkpoint(again, None, tmp_path / "new")
    new = load_checkpoint(tmp_path / "new", torch.float32)
    assert new.config.quantization_config.features == []
    assert torch.equal(new(IDS).logits, model(IDS).logits)


def test_it_is_exported_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = written(tmp_path / "old", 8, 2, 8)
    export_model(str(tmp_path / "old"), ExportConfig(to="dense", dtype="fp32"), tmp_path / "dense")
    assert "16 weights have a trellis, opened as levels" in caplog.text
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert torch.equal(dense(IDS).logits, model(IDS).logits)


def test_it_is_neither_trained_nor_served(tmp_path: Path) -> None:
    written(tmp_path, 8, 2, 8)
    with pytest.raises(CheckpointError, match="trellis, which is read but not trained, .* v2a2"):
        make_trainable(load_checkpoint(tmp_path), config(tmp_path))
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    with pytest.raises(CheckpointError, match="trellis, which is read but not served, .* packed"):
        read_config(settings)


@pytest.mark.parametrize("numbers", [{"trellis_bits": 5}, {"bits": 3}, {"trellis_bits": "2"}])
def test_numbers_of_no_trellis_are_refused(numbers: dict, tmp_path: Path) -> None:
    written(tmp_path, 8, 2, 8)
    with edited(tmp_path) as values:
        for entry in values["quantization_config"]["modules"].values():
            entry |= numbers
    with pytest.raises(CheckpointError, match="embed_tokens has trellis_bits=.* with bits="):
        load_checkpoint(tmp_path)


def test_none_is_made() -> None:
    for name in ("t2a2", "t2a4_a8"):
        with pytest.raises(ConfigError, match=f"^to={name}, but trellises are .* v2a2"):
            preset_called(name)
    with pytest.raises(ConfigError, match="plan: trellis_bits=2, but trellises are .* v2a2"):
        LutSpec.parse({"bits": 8, "trellis_bits": 2}, "plan")
