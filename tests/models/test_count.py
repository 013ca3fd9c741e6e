"""Parameters, bits and bytes against what a checkpoint really holds."""

import math
from pathlib import Path

import pytest
import torch
from quantized import SPECS, tiny_quantized
from safetensors.torch import load_file
from tiny import tiny_model

from qat.backend.base import VISITORS
from qat.convert.quantize import quantize_model
from qat.models.checkpoint import save_checkpoint
from qat.models.cost import (
    bytes_by_name,
    linear_bits,
    parameter_count,
    parts_of,
    quantized_parameter_count,
    stored_bits,
    tensor_bytes,
)
from qat.models.language_model import LanguageModel
from qat.models.sizes import Sizes, model_bytes
from qat.models.step_memory import step_bytes
from qat.nn.quant_linear import quant_linears
from qat.nn.step import form_weights, release_weights
from qat.nn.swap import with_tables
from qat.quant.spec import PRESETS, LutSpec
from qat.train.config import TrainConfig
from qat.train.learnable import weights_in_scope
from qat.train.start import make_trainable


@pytest.mark.parametrize("tied", [False, True])
def test_quantizing_does_not_change_the_number_of_parameters(tied: bool) -> None:
    overrides = {"tie_word_embeddings": tied, "mlp_bias": True}
    model = tiny_model("llama", **overrides)
    expected = sum(p.numel() for p in model.parameters())
    assert parameter_count(model) == expected
    assert parameter_count(tiny_quantized("llama", SPECS["lut2"], **overrides)) == expected


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bits_are_those_in_the_file(spec: LutSpec, tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", spec, num_hidden_layers=1)
    save_checkpoint(model, None, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    linears = quant_linears(model)
    total = 0
    for name, linear in linears.items():
        own = [t for key, t in tensors.items() if key.startswith(f"{name}.")]
        assert stored_bits(linear) == 8 * sum(t.numel() * t.element_size() for t in own)
        total += stored_bits(linear)
    assert linear_bits(model) == total / quantized_parameter_count(model)
    assert tensor_bytes(model) == sum(t.numel() * t.element_size() for t in tensors.values())
    assert tensor_bytes(model) == model_bytes(tmp_path / "out")


def test_a_float_model_has_no_bits_per_weight() -> None:
    assert math.isnan(linear_bits(tiny_model()))
    assert quantized_parameter_count(tiny_model()) == 0


@pytest.mark.parametrize(
    "values",
    [
        {"learn": "scales,codebook"},
        {"learn": "weights"},
        {"learn": "weights,scales,codebook", "latent_dtype": "bf16", "mlp_only": True},
        {"learn": "lora"},
        pytest.param({"optimizer": "adamw8bit"}, marks=pytest.mark.slow),
    ],
)
def test_a_step_holds_the_bytes_that_it_is_counted_to(values: dict[str, object]) -> None:
    # moments of 8 bits are for tensors of 4096 numbers and more
    model = tiny_quantized("qwen3", SPECS["lut2"], hidden_size=128, tie_word_embeddings=False)
    settings = TrainConfig(cache_dir=Path("cache"), device="cpu", dtype="fp32", **values)
    model.requires_grad_(False)
    learning = weights_in_scope(model, settings.scope, settings.kinds)
    counted = [step_bytes(model, learning, settings, torch.float32)]
    optimizer = make_trainable(model, settings)
    counted.append(step_bytes(model, learning, settings, torch.float32))
    # an adapter that is yet to come is not counted
    assert "lora" in settings.kinds or counted[0] == counted[1]
    found = counted[1]
    form_weights(model, torch.float32)
    formed = [linear.formed.nbytes for linear in quant_linears(model).values()]
    assert found.formed == sum(formed) == 2 * found.largest_layer
    release_weights(model)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    assert found.stored == sum(t.nbytes for t in tensors)
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    assert found.gradients == sum(p.grad.nbytes for p in optimizer.parameters.values())
    optimizer.step(0)
    moments = sum(t.nbytes for n, t in optimizer.moving().items() if n.startswith("exp_avg"))
    # torchao gives its 256 steps of 8 bits to each moment, 2 KiB of them
    maps = 2048 * len(learning) if settings.optimizer == "adamw8bit" else 0
    assert found.moments == moments - maps
    assert found.total(by_layer=False) - found.total(by_layer=True) == found.largest_layer
    halves = step_bytes(model, learning, settings, torch.float32, parts=2)
    assert halves.largest_layer == 2 * found.largest_layer  # the next one comes while one runs


@pytest.mark.parametrize("offload", ["none", "moments", "latents"])
def test_what_lies_on_the_host_is_counted_there(offload: str) -> None:
    model = tiny_quantized("qwen3", SPECS["lut3"], tie_word_embeddings=False)
    values = {"learn": "weights,scales", "latent_dtype": "bf16", "offload": offload}
    settings = TrainConfig(cache_dir=Path("cache"), device="cpu", dtype="fp32", **values)
    learning = weights_in_scope(model, settings.scope, settings.kinds)
    counted = step_bytes(model, learning, settings, torch.float32)
    optimizer = make_trainable(model, settings)
    assert counted == step_bytes(model, learning, settings, torch.float32)
    linears = quant_linears(model)
    lying = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    # the one number that stands for a latent weight on the host is not counted
    ones = [t for t in lying.values() if t.untyped_storage().nbytes() == 2]
    assert len(ones) == (len(linears) if offload == "latents" else 0)
    own = sum(t.untyped_storage().nbytes() for t in lying.values())
    assert counted.stored == own - 2 * len(ones)
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    assert counted.gradients == sum(p.grad.nbytes for p in optimizer.parameters.values())
    optimizer.step(0)
    moments = {n: t for n, t in optimizer.moving().items() if n.startswith("exp_avg")}
    wide = sum(t.nbytes for t in moments.values() if t.dtype == torch.float32)
    sizes = [2 * linear.in_features * linear.out_features for linear in linears.values()]
    number = {"none": 0, "moments": 2, "latents": 3}[offload]
    assert number * sum(sizes) <= counted.pinned <= 2 * number * sum(sizes)
    here = 2 * sum(sizes) if offload == "none" else VISITORS * number * max(sizes)
    assert counted.moments == wide + here


@pytest.mark.parametrize("tied", [True, False])
def test_parts_are_the_whole_file(tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied, mlp_bias=True).bfloat16()
    for kind in ("float", "quantized"):
        if kind == "quantized":
            quantize_model(LanguageModel(model), with_tables(PRESETS["q2a4"], model, 4))
        parts = {part.name: part for part in parts_of(model, bytes_by_name(model))}
        tables = ["embedding and head"] if tied else ["embedding", "head"]
        assert [*parts] == ["attention linears", "mlp linears", *tables, "norms and others"]
        assert sum(part.num_weights for part in parts.values()) == parameter_count(model)
        size = sum(part.megabytes for part in parts.values())
        assert size == pytest.approx(tensor_bytes(model) / 1e6)
        assert parts["norms and others"].bits == 16  # with the biases of linears
    assert parts[tables[0]].bits == pytest.approx(4.5, abs=0.1)
    assert parts["mlp linears"].bits < parts["attention linears"].bits < 6


def test_a_file_as_large_as_its_source_is_no_warning() -> None:
    sizes = Sizes(47.7, 47.701, 2.7, 2.2)
    assert (
        sizes.warning("why") is None and sizes._replace(source_megabytes=None).warning("") is None
    )
    assert "48.0 MB" in sizes._replace(megabytes=48.0).warning("why")
