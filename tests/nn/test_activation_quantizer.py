"""Quantized inputs give the same bits wherever a linear runs."""

import pytest
import torch
from covering import covering
from families import build
from quantized import (
    ROUNDINGS,
    SPECS,
    frozen_linear,
    latent_linear,
    rounding,
    tiny_quantized,
    to_frozen,
)
from tiny import tiny_model
from torch import nn
from torch.nn import functional as F

from qat.nn.activation import ActivationQuantizer, read, read_alike
from qat.nn.latent import to_latent
from qat.nn.quant_linear import quant_linears
from qat.nn.sites import INNER, open_sites, unseen_input
from qat.nn.step import form_weights, join_linears, release_weights
from qat.nn.swap import reads_input
from qat.quant.activation import quantize_static, quantize_tokens
from qat.quant.spec import ACTIVATION_KINDS, ActivationSpec

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("kind", "dtype"), covering(ACTIVATION_KINDS, DTYPES))
def test_formed_or_not_latent_or_frozen_the_bits_are_one(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": latent_linear(16, 32, SPECS["lut2"], bias=True)})
    model["a"].activation = rounding(kind)
    x = torch.randn(5, 32).to(dtype)
    alone = model["a"](x)
    rounded = read(model["a"], x)
    expected = F.linear(rounded, model["a"].quantized_weight(dtype), model["a"].bias.to(dtype))
    assert torch.equal(alone, expected) and not torch.equal(rounded, x)
    form_weights(model, dtype)
    assert torch.equal(model["a"](x), alone)
    release_weights(model)
    to_frozen(model)
    assert torch.equal(model["a"](x), alone)
    to_latent(model, ["a"])
    assert torch.equal(model["a"](x), alone)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_training_under_autocast_rounds_what_evaluation_rounds(kind: str) -> None:
    module, x = rounding(kind), torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = module(x)
    assert inside.dtype == torch.bfloat16 and torch.equal(inside, module(x.bfloat16()))


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_joined_linears_round_their_common_input_once(kind: str) -> None:
    block = nn.Module()
    block.q, block.k = (frozen_linear(O, 32, SPECS["lut2"]) for O in (16, 8))
    block.q.activation = rounding(kind)
    block.k.activation = block.q.activation
    x = torch.randn(3, 32)
    apart = torch.cat([block.q(x), block.k(x)], -1)
    join_linears(block, "qk", ("q", "k"))
    calls = []
    block.q.activation.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(block.qk(x), apart) and len(calls) == 2  # not formed: each by itself
    form_weights(block, torch.float32)
    torch.testing.assert_close(block.qk(x), apart)
    assert len(calls) == 3


def test_what_learns_apart_is_not_joined() -> None:
    block = nn.Module()
    block.q, block.k = (frozen_linear(8, 32, SPECS["lut2"]) for _ in range(2))
    for kind, is_alike in (("int8", True), ("int8-static", False)):
        block.q.activation, block.k.activation = rounding(kind), rounding(kind)
        assert read_alike([block.q, block.k]) is is_alike
    join_linears(block, "qk", ("q", "k"))
    assert not hasattr(block, "qk")
    block.k.activation = None
    assert not read_alike([block.q, block.k])


def test_a_learned_scale_gets_its_gradient_and_keeps_its_dtype() -> None:
    linear = frozen_linear(8, 32, SPECS["lut2"])
    linear.activation = rounding("int8-static", 0.0123)
    linear(torch.randn(4, 32)).square().sum().backward()
    assert linear.activation.scale.grad.abs() > 0 and linear.scales.grad.abs().sum() > 0
    assert linear.to(torch.bfloat16).activation.scale.dtype == torch.float32
    with pytest.raises(ValueError, match="does not go with"):
        ActivationQuantizer(ActivationSpec(kind="int8"), torch.tensor(1.0))


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_the_module_is_the_formula(kind: str) -> None:
    module, x = rounding(kind), torch.randn(2, 3, 16)
    is_static = module.spec.is_static
    expected = quantize_static(x, module.scale) if is_static else quantize_tokens(x, kind)
    assert torch.equal(module(x), expected) and kind in repr(module)


def test_a_scale_of_16_bits_is_computed_with_and_learns() -> None:
    module, x = rounding("int8-static", 0.0123, 16), torch.randn(2, 16)
    assert torch.equal(module.stored_scale(), torch.tensor(0.0123).half().float())
    assert torch.equal(module(x), quantize_static(x, module.stored_scale()))
    module(x).sum().backward()
    assert module.scale.item() == torch.tensor(0.0123).item() and module.scale.grad.abs() > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.parametrize(("kind", "bits"), ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_bits_are_those_of_eager(kind: str, bits: int, dtype: torch.dtype) -> None:
    module, norm = rounding(kind, 0.0123, bits), nn.RMSNorm(64)
    torch.manual_seed(0)
    x = (torch.randn(256, 64) * torch.logspace(-3, 3, 256)[:, None]).to(dtype)
    normed = norm(x.float()).to(dtype).detach()
    torch.compiler.reset()  # modules of other cases, not collected yet, would count as recompiled
    assert torch.equal(torch.compile(module, fullgraph=True)(normed), module(normed))


def test_experts_read_their_tokens_rounded_once() -> None:
    model = build("Qwen3MoeForCausalLM")
    open_sites(model)
    mlp = model.model.layers[0].mlp
    experts = mlp.experts
    for name in ("gate_up_proj", INNER):
        O, I = getattr(experts, name).weight.shape
        setattr(experts, name, frozen_linear(O, I, SPECS["lut2"]))
    assert unseen_input(experts, "gate_up_proj") is None and unseen_input(mlp, "gate") is None
    assert "inside" in unseen_input(experts, INNER)
    x, chosen = torch.randn(6, 64), torch.tensor([[0, 3], [1, 2]] * 3)
    shares = torch.rand(6, 2)
    quantizer = rounding("int8")
    expected = experts(quantizer(x), chosen, shares)
    experts.gate_up_proj.activation = quantizer
    assert torch.equal(experts(x, chosen, shares), expected)
    assert torch.equal(experts(hidden_states=x, top_k_index=chosen, top_k_weights=shares), expected)


def test_only_a_head_reads_an_input_of_a_table() -> None:
    tied, own = (tiny_model(tie_word_embeddings=is_tied) for is_tied in (True, False))
    assert reads_input(tied, "model.embed_tokens") and reads_input(own, "lm_head")
    assert not reads_input(own, "model.embed_tokens")
    assert reads_input(tiny_quantized("qwen3", SPECS["lut2"]), "model.layers.0.mlp.up_proj")
    assert quant_linears(own) == {}
