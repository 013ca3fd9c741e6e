"""Linears with adapters against autograd through the dense weight, in every way they can run."""

import copy

import pytest
import torch
from covering import covering
from quantized import (
    SPECS,
    frozen_linear,
    latent_linear,
    tiny_adapted,
    tiny_quantized,
    to_frozen,
    with_adapter,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qat.nn.latent import add_adapters, to_latent
from qat.nn.quant_linear import QuantLinear, quant_linears
from qat.nn.step import form_moved_weights, form_weights
from qat.nn.swap import linear_names
from qat.quant.lora import LORA_NAMES, round_lora
from qat.quant.weight import dequantize

MODES = ["formed", "alone", "formed_checkpointed", "alone_checkpointed"]
LINEARS = {"frozen": frozen_linear, "latent": latent_linear}


def dense(linear: QuantLinear) -> dict[str, Tensor]:
    """Leaves in float64 of what a dense reference computes with."""
    named = {"lut": dequantize(linear.quantized()), **linear.lora()._asdict()}
    if linear.bias is not None:
        named["bias"] = linear.bias.detach()
    return {name: t.double().clone().requires_grad_() for name, t in named.items()}


def reference(x: Tensor, named: dict[str, Tensor]) -> Tensor:
    """Two matmuls beside the dense one: the adapter as everybody writes it."""
    low = F.linear(F.linear(x, named["lora_in"]), named["lora_out"])
    return F.linear(x, named["lut"], named.get("bias")) + low


@pytest.mark.parametrize(
    ("kind", "spec", "mode", "bias"),
    [
        (kind, *case)
        for kind, modes in (("frozen", MODES), ("latent", MODES[::-1]))
        for case in covering(["lut2", "lut3", "ternary", "lut2_r4"], modes, [False, True])
    ],
)
def test_gradients_equal_the_dense_reference(kind: str, spec: str, mode: str, bias: bool) -> None:
    linear = with_adapter(LINEARS[kind](19, 64, SPECS[spec], bias))
    named = dense(linear)
    if "formed" in mode:
        form_weights(linear, torch.float32)
    x = torch.randn(5, 64, requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    for _ in range(2):  # micro-batches add up
        y = checkpoint(linear, x, use_reentrant=False) if "checkpointed" in mode else linear(x)
        y.square().sum().backward()
        exact = reference(exact_x, named)
        exact.square().sum().backward()
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)
    pairs = {"x": (x.grad, exact_x.grad)}
    pairs |= {name: (linear.get_parameter(name).grad, named[name].grad) for name in LORA_NAMES}
    for name, (found, expected) in pairs.items():
        assert F.cosine_similarity(found.double().flatten(), expected.flatten(), 0) >= 0.999999
        slack = 2e-5 * expected.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=slack, msg=name)


@pytest.mark.parametrize("kind", LINEARS)
def test_an_adapter_leaves_the_gradients_of_the_lut_alone(kind: str) -> None:
    plain = LINEARS[kind](8, 32, SPECS["lut2"])
    adapted = with_adapter(copy.deepcopy(plain))
    dW = torch.randn(8, 32)
    found = adapted.pulled_back(dW, adapted.weight_parameters().keys())
    expected = plain.pulled_back(dW, plain.weight_parameters().keys())
    assert set(found) == set(expected) | set(LORA_NAMES)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", LINEARS)
def test_a_new_adapter_does_not_change_the_function(kind: str) -> None:
    linear = LINEARS[kind](8, 32, SPECS["lut2"])
    before = linear.quantized_weight()
    assert linear.lora_rank == 0 and linear.lora() is None and not linear.lora_parameters()
    linear.add_lora(4, torch.Generator())
    assert linear.lora_rank == 4 and set(linear.lora_parameters()) == set(LORA_NAMES)
    assert torch.equal(linear.quantized_weight(), before)
    assert "lora_rank=4" in repr(linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_whole_weight_is_rounded_once(dtype: torch.dtype) -> None:
    linear = with_adapter(frozen_linear(11, 32, SPECS["lut2"]))
    weight = linear.quantized_weight()
    assert torch.equal(linear.quantized_weight(dtype), weight.to(dtype))
    x = torch.randn(3, 32, dtype=dtype)
    alone = linear(x)
    form_weights(linear, dtype)
    assert torch.equal(linear.formed, weight.to(dtype))
    assert torch.equal(alone, linear(x))


def test_the_factors_count_as_a_checkpoint_stores_them() -> None:
    linear = with_adapter(frozen_linear(11, 32, SPECS["lut2"]))
    before = linear.quantized_weight()
    assert not torch.equal(linear.lora_in, linear.lora().lora_in)
    linear.set_lora(linear.lora())
    assert torch.equal(linear.quantized_weight(), before)


def test_setting_an_adapter_drops_what_was_formed_without_it() -> None:
    linear = frozen_linear(8, 32, SPECS["lut2"]).requires_grad_(False)
    form_moved_weights(linear, torch.float32)
    with_adapter(linear).requires_grad_(False)
    form_moved_weights(linear, torch.float32)
    assert torch.equal(linear.formed, linear.quantized_weight())
    linear.set_lora(None)
    assert linear.lora_rank == 0 and not linear.lora_parameters()


def test_autocast_does_not_reach_the_adapter() -> None:
    linear = with_adapter(frozen_linear(8, 32, SPECS["lut2"]))
    weight, x = linear.quantized_weight(), torch.randn(3, 32)
    dW = torch.randn(8, 32)
    expected = linear.pulled_back(dW, LORA_NAMES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear.quantized_weight(), weight)
        found = linear.pulled_back(dW, LORA_NAMES)
        assert torch.equal(linear(x), F.linear(x, weight))
    assert all(torch.equal(found[name], expected[name]) for name in LORA_NAMES)


def test_an_adapter_survives_a_change_of_representation() -> None:
    model = tiny_adapted("qwen3", SPECS["lut2"])
    before = {name: m.quantized_weight() for name, m in quant_linears(model).items()}
    for change in (lambda m: to_latent(m, linear_names(m)), to_frozen):
        change(model)
        for name, linear in quant_linears(model).items():
            assert linear.lora_rank == 3
            assert torch.equal(linear.quantized_weight(), before[name])


def test_adapters_are_added_where_there_are_none() -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    names = linear_names(model)
    add_adapters(model, names[:3], 4, seed=0)
    kept = model.get_submodule(names[0]).lora_in
    assert [m.lora_rank for m in quant_linears(model).values()] == [4] * 3 + [0] * 11
    add_adapters(model, names, 4, seed=1)
    assert all(m.lora_rank == 4 for m in quant_linears(model).values())
    assert model.get_submodule(names[0]).lora_in is kept


def test_each_linear_draws_values_of_its_own() -> None:
    model = nn.Sequential(*(frozen_linear(8, 32, SPECS["lut2"]) for _ in range(2)))
    add_adapters(model, ["0", "1"], 4, seed=0)
    first, second = (round_lora(m.lora()).lora_in for m in model)
    cosine = F.cosine_similarity(first.flatten(), second.flatten(), 0)
    assert cosine.abs() < 0.5
