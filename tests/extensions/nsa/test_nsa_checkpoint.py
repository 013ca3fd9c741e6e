"""Sparse models on disk: float or packed, reloaded to the bit, and never mistaken for dense."""

import json
from pathlib import Path

import pytest
import torch
from covering import covering
from nsa_model_case import SMALL, small, sparse_model
from quantized import SPECS, with_random_codes
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import qat  # noqa: F401 - registers the quantizer
from qat.errors import CheckpointError
from qat.extensions.nsa.swap import nsa_config, nsa_modules, unswap_attention
from qat.models.checkpoint import is_packed, load_checkpoint, save_checkpoint, write_model
from qat.models.cost import parameter_count, tensor_bytes
from qat.models.directory import CHECKSUMS
from qat.models.load import load_model
from qat.nn.quant_linear import quant_linears

IDS = torch.arange(100)[None] * 7 % 320
CONFIGS = [SMALL, small(mode="merged"), small(pooling="weighted", cmp_rope="pre", layers=(1,))]


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS, use_cache=False).logits


def trained(config: object = SMALL, *, is_quantized: bool = False) -> PreTrainedModel:
    """A sparse model whose new parameters have moved."""
    model = sparse_model(config=config)
    for name, parameter in model.named_parameters():
        if ".nsa." in name:
            nn.init.normal_(parameter)
    return with_random_codes(model, SPECS["lut2"]) if is_quantized else model


@pytest.mark.parametrize(("config", "is_quantized"), covering(CONFIGS, [True, False]))
def test_reloaded_it_is_the_same(tmp_path: Path, config, is_quantized) -> None:
    model = trained(config, is_quantized=is_quantized)
    save_checkpoint(model, None, tmp_path / "out")
    assert is_packed(tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert nsa_config(loaded) == config
    assert nsa_modules(loaded).keys() == nsa_modules(model).keys()
    assert bool(quant_linears(loaded)) == is_quantized
    assert torch.equal(logits(load_model(str(tmp_path / "out"), dtype="fp32").model), logits(model))
    by_hub_name = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(by_hub_name), logits(model))


def test_gates_count_and_stay_float() -> None:
    dense, model = tiny_model(), sparse_model()
    gates = 2 * (32 + 1) * 6
    assert parameter_count(model) - parameter_count(dense) == gates
    assert tensor_bytes(model) - tensor_bytes(dense) == 2 * gates  # zeros are bfloat16 on disk
    assert parameter_count(trained(is_quantized=True)) == parameter_count(model)


def test_swapped_out_it_is_an_ordinary_directory(tmp_path: Path) -> None:
    save_checkpoint(trained(), None, tmp_path / "sparse")
    model = load_checkpoint(tmp_path / "sparse")
    unswap_attention(model)
    (tmp_path / "dense").mkdir()
    write_model(model, None, tmp_path / "dense")
    assert not is_packed(tmp_path / "dense")
    config = json.loads((tmp_path / "dense/config.json").read_text())
    assert not config.keys() & {"nsa", "quantization_config"}
    loaded = load_model(str(tmp_path / "dense"), dtype="fp32").model
    assert torch.equal(logits(loaded), logits(tiny_model()))


def edit(path: Path, **changes: object) -> None:
    """Set keys of config.json, or remove those that are None; the file counts as unharmed."""
    config = json.loads((path / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    (path / CHECKSUMS).unlink(missing_ok=True)


@pytest.mark.parametrize("config", [SMALL, small(mode="merged")])
def test_a_sparse_checkpoint_is_not_dense(tmp_path: Path, config) -> None:
    save_checkpoint(trained(config), None, tmp_path / "out")
    edit(tmp_path / "out", nsa=None)
    with pytest.raises(
        CheckpointError, match="written with sparse attention .* makes it dense; put"
    ):
        load_model(str(tmp_path / "out"))


@pytest.mark.parametrize("config", [SMALL, small(mode="merged")])
def test_a_dense_checkpoint_is_not_sparse(tmp_path: Path, config) -> None:
    model = trained(is_quantized=True)
    unswap_attention(model)
    save_checkpoint(model, None, tmp_path / "packed")
    tiny_model().save_pretrained(tmp_path / "float")
    for name in ("packed", "float"):
        edit(tmp_path / name, nsa=config.model_dump(mode="json"))
    with pytest.raises(CheckpointError, match="written with dense attention .* makes it sparse"):
        load_model(str(tmp_path / "packed"))
    with pytest.raises(CheckpointError, match="holds a dense model, but its config.json defines"):
        load_model(str(tmp_path / "float"))


def test_other_gates_are_refused(tmp_path: Path) -> None:
    save_checkpoint(trained(), None, tmp_path / "out")
    definition = SMALL.model_dump(mode="json")
    edit(tmp_path / "out", nsa=definition | {"mode": "merged"})
    with pytest.raises(CheckpointError, match=r"has no place for: .*nsa.gates"):
        load_model(str(tmp_path / "out"))
    edit(tmp_path / "out", nsa=definition | {"pooling": "weighted"})
    with pytest.raises(CheckpointError, match=r"misses .*nsa.pool_key"):
        load_model(str(tmp_path / "out"))
    edit(tmp_path / "out", nsa=definition | {"window": 0})
    with pytest.raises(CheckpointError, match=r"'nsa' of config.json: window=0: .* convert the"):
        load_model(str(tmp_path / "out"))
    edit(tmp_path / "out", nsa=definition)
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.nsa.gates.bias"] = torch.zeros(5)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gates.bias \(5,\) instead of \(6,\)"):
        load_model(str(tmp_path / "out"))
