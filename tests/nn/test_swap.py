"""Finding linears in any model, and changing their representation without changing the function."""

import pytest
import torch
from families import build
from quantized import KINDS, SPECS, random_weight, tiny_quantized, to_frozen
from tiny import ARCHITECTURES, tiny_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from qat.errors import CheckpointError
from qat.nn.latent import to_latent
from qat.nn.quant_linear import FrozenLutLinear, LutLinear, quant_linears
from qat.nn.swap import ascending, decoder_layers, linear_names
from qat.quant.weight import dequantize

PROJECTIONS = [
    *[f"self_attn.{p}_proj" for p in "qkvo"],
    *[f"mlp.{p}_proj" for p in ("gate", "up", "down")],
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_linear_names_are_those_of_the_blocks(architecture: str) -> None:
    model = tiny_model(architecture)
    expected = {f"model.layers.{layer}.{p}" for layer in (0, 1) for p in PROJECTIONS}
    names = linear_names(model)
    assert set(names) == expected and len(names) == len(expected)
    assert len(decoder_layers(model)) == 2
    assert linear_names(tiny_quantized(architecture, SPECS["lut2"])) == names


def test_blocks_without_linears_are_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2))
    with pytest.raises(CheckpointError, match="hold no linear of 16 inputs"):
        linear_names(model)


def test_a_model_without_blocks_is_refused() -> None:
    model = tiny_model()
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(CheckpointError, match="no list of 2 decoder blocks"):
        decoder_layers(model)


def test_ascending_keeps_every_bit_of_the_weight() -> None:
    for name, spec in SPECS.items():
        quantized = random_weight(9, 2 * spec.group_size, spec)
        shuffled = quantized._replace(codebook=quantized.codebook[torch.randperm(spec.num_levels)])
        sorted_ = ascending(shuffled)
        wished = shuffled if spec.vector_size > 1 else quantized  # codewords have no order
        assert torch.equal(sorted_.codebook, wished.codebook), name
        assert sorted_.indices.dtype == quantized.indices.dtype, name
        assert torch.equal(dequantize(sorted_), dequantize(shuffled)), name


@pytest.mark.parametrize("name", KINDS)
def test_to_latent_keeps_the_weight_to_the_bit(name: str) -> None:
    model = tiny_quantized("llama", SPECS[name], mlp_bias=True, num_hidden_layers=1)
    before = {name: m.quantized_weight() for name, m in quant_linears(model).items()}
    to_latent(model, list(before))
    for name, linear in quant_linears(model).items():
        assert isinstance(linear, LutLinear)
        assert torch.equal(linear.weight, before[name])
        assert torch.equal(linear.quantized_weight(), before[name])
    to_frozen(model)
    for name, linear in quant_linears(model).items():
        assert isinstance(linear, FrozenLutLinear)
        assert torch.equal(linear.quantized_weight(), before[name])


def test_only_the_named_linears_become_latent() -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    to_latent(model, linear_names(model)[:1])
    assert isinstance(model.get_submodule(linear_names(model)[0]), LutLinear)
    assert sum(isinstance(m, LutLinear) for m in model.modules()) == 1


def test_equal_levels_keep_the_weight() -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    name = linear_names(model)[0]
    with torch.no_grad():
        model.get_submodule(name).codebook.copy_(torch.tensor([-1.0, 0.5, 0.5, 2.0]))
    before = model.get_submodule(name).quantized_weight()
    to_latent(model, [name])
    assert torch.equal(model.get_submodule(name).quantized_weight(), before)


def test_blocks_are_the_texts_and_not_a_towers() -> None:
    model = build("GitForCausalLM")  # whose tower has as many layers
    assert decoder_layers(model) is model.git.encoder.layer


def test_a_block_may_count_as_several_layers() -> None:
    model = build("LongcatFlashForCausalLM")
    assert model.config.num_hidden_layers == 4
    assert decoder_layers(model) is model.model.layers and len(model.model.layers) == 2


def test_blocks_whose_parts_lie_apart_are_refused() -> None:
    with pytest.raises(CheckpointError, match="apart .attentions, layer_norm1, ffns, layer_norm2"):
        decoder_layers(build("XLMWithLMHeadModel"))
