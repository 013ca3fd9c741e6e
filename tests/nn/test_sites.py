"""Weights that are no linears become some, and nothing else changes."""

import copy

import pytest
import torch
from families import build
from tiny import VOCAB
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qat.nn.quant_linear import FrozenLutLinear, LutLinear
from qat.nn.sites import (
    Owner,
    StackedLinear,
    close_sites,
    experts_of,
    open_sites,
    routers,
    watching,
)
from qat.nn.step import form_weights
from qat.nn.swap import linear_names, replace_module
from qat.quant.fit import fit_weight
from qat.quant.spec import by_group
from qat.quant.weight import dequantize

FAMILIES = {
    "GPT2LMHeadModel": 16,
    "Qwen3MoeForCausalLM": 24,
    "GptOssForCausalLM": 24,
    "Llama4ForCausalLM": 36,
    "JetMoeForCausalLM": 20,
    "DeepseekV3ForCausalLM": None,
    "MambaForCausalLM": 16,
}
ROUTED = {
    "MixtralForCausalLM": "model.layers.0.mlp.gate",
    "Qwen2MoeForCausalLM": "model.layers.0.mlp.shared_expert_gate",
    "GptOssForCausalLM": "model.layers.0.mlp.router",
    "HunYuanMoEV1ForCausalLM": "model.layers.0.mlp.gate",
}
IDS = torch.arange(24).view(2, 12) * 7 % VOCAB


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_with_its_sites_open_and_closed_again(family: str) -> None:
    model = build(family)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    opened = copy.deepcopy(model)
    for _ in range(2):  # again changes nothing
        open_sites(opened)
    with torch.no_grad():
        found = opened(IDS, use_cache=False).logits
    # GPT-OSS stores its experts transposed: a product of another layout may sum in another order
    noise = 1e-6 if family == "GptOssForCausalLM" else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=noise)
    if FAMILIES[family]:
        assert len(linear_names(opened)) == FAMILIES[family]
    close_sites(opened)
    found, wished = opened.state_dict(), model.state_dict()
    assert found.keys() == wished.keys()
    assert all(torch.equal(found[key], wished[key]) for key in wished)
    assert [type(m) for m in opened.modules()] == [type(m) for m in model.modules()]


def test_routers_and_narrow_linears_stay_in_floating_point() -> None:
    model = build("JambaForCausalLM")
    open_sites(model)
    names = linear_names(model)
    assert not any(name.endswith("router") for name in names)
    assert any("experts.gate_up_proj" in name for name in names)
    for family, router in ROUTED.items():
        assert router in routers(build(family))
    narrow = nn.Sequential(nn.Linear(8, 32), nn.Linear(16, 32))
    open_sites(narrow)
    assert narrow[0].stays_float and not hasattr(narrow[1], "stays_float")


def quantized_experts(kind: type, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A module of 4 experts with quantized stacks, and the dense weight of each."""
    torch.manual_seed(seed)
    model = build("Qwen3MoeForCausalLM")
    open_sites(model)
    experts = model.model.layers[0].mlp.experts
    dense, spec = {}, by_group(3, 16)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).weight.detach()
        quantized = fit_weight(weight, spec)
        dense[name] = dequantize(quantized)
        made = kind(quantized, None, spec) if kind is FrozenLutLinear else None
        replace_module(experts, name, made or kind(dense[name], quantized, None, spec))
    return experts, dense


def by_hand(
    x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, dense: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The textbook sum over experts."""
    up, down = dense["gate_up_proj"].view(4, -1, 64), dense["down_proj"].view(4, 64, -1)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for slot in range(chosen.shape[1]):
            e = chosen[token, slot]
            gate, value = (up[e] @ x[token]).chunk(2)
            out[token] = out[token] + share[token, slot] * (down[e] @ (F.silu(gate) * value))
    return out


@pytest.mark.parametrize(
    ("implementation", "is_formed", "kind"),
    [
        ("eager", False, LutLinear),
        ("eager", True, FrozenLutLinear),
        ("grouped_mm", False, FrozenLutLinear),
        ("grouped_mm", True, LutLinear),
        ("batched_mm", False, LutLinear),
        ("batched_mm", True, FrozenLutLinear),
    ],
)
def test_experts_and_their_gradients_are_the_textbook_ones(
    implementation: str, is_formed: bool, kind: type
) -> None:
    experts, dense = quantized_experts(kind)
    experts.config._experts_implementation = implementation
    x = torch.randn(10, 64, requires_grad=True)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    share = torch.rand(10, 2)
    if is_formed:
        form_weights(experts, torch.float32)
    found = experts(x, chosen, share)
    leaves = {name: weight.clone().requires_grad_() for name, weight in dense.items()}
    y = x.detach().double().requires_grad_()
    expected = by_hand(y, chosen, share, {n: w.double() for n, w in leaves.items()})
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    target = torch.randn(10, 64)
    found.backward(target)
    expected.backward(target.double())
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
    for name, leaf in leaves.items():
        linear = experts._modules[name]
        wanted = linear.pulled_back(leaf.grad, ["scales", "codebook"])
        for part, gradient in wanted.items():
            got = linear.get_parameter(part).grad
            torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_experts_are_compiled_whole_where_they_run_again_backwards() -> None:
    """A compiler refuses what changes a module while it runs, above all where it may run twice."""
    experts, _ = quantized_experts(LutLinear)

    def run(x: torch.Tensor) -> torch.Tensor:
        chosen, weights = torch.tensor([[0, 2], [1, 3], [3, 0]]), torch.full((3, 2), 0.5)
        return checkpoint(experts, x, chosen, weights, use_reentrant=False)

    x = torch.randn(3, 64, requires_grad=True)
    form_weights(experts, torch.float32)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, run(x))
    found.sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_nothing_is_left_behind_a_forward_that_fails() -> None:
    experts, _ = quantized_experts(FrozenLutLinear)
    with pytest.raises((RuntimeError, IndexError)):
        experts(torch.randn(3, 65), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))
    assert isinstance(experts.gate_up_proj, FrozenLutLinear)


def test_a_weight_that_its_owner_reads_is_the_quantized_one() -> None:
    torch.manual_seed(0)
    model = build("MambaForCausalLM")
    open_sites(model)
    mixer, spec = model.backbone.layers[0].mixer, by_group(2, 16)
    assert isinstance(mixer, Owner) and "dt_proj" in mixer._read
    x = torch.randn(2, 6, 64)
    dense = copy.deepcopy(mixer)
    quantized = fit_weight(mixer.dt_proj.weight.detach(), spec)
    far = torch.randn_like(mixer.dt_proj.weight)  # a latent weight is not what is computed with
    latent = LutLinear(far, quantized, mixer.dt_proj.bias, spec)
    dense.dt_proj.weight.data = latent.quantized_weight()
    mixer.dt_proj = latent
    with torch.no_grad():
        torch.testing.assert_close(mixer(x), dense(x), rtol=0, atol=1e-7)
    assert "weight" not in latent.__dict__


@pytest.mark.parametrize(
    "family", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"]
)
def test_what_each_expert_reads_is_told(family: str) -> None:
    model = build(family)
    open_sites(model)
    owner = next(m for m in model.modules() if isinstance(m, Owner) and experts_of(m, "down_proj"))
    implementation = getattr(owner, "config", model.config)._experts_implementation
    seen: dict[str, int] = {}

    def watch(name: str, expert: int, x: torch.Tensor) -> None:
        assert 0 <= expert < 4
        assert x.shape[1] == owner.get_submodule(name).in_features
        seen[name] = seen.get(name, 0) + len(x)

    with torch.no_grad(), watching(owner, watch):
        model(IDS, use_cache=False)
    sent = 4 if family == "Llama4ForCausalLM" else 2  # Llama 4 sends each token to all, most as 0
    assert seen == {"gate_up_proj": IDS.numel() * sent, "down_proj": IDS.numel() * sent}
    assert getattr(owner, "config", model.config)._experts_implementation == implementation


def test_a_stack_is_one_linear_of_all_its_rows() -> None:
    model = build("GptOssForCausalLM")  # stores (E, I, O)
    before = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    open_sites(model)
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(stack, StackedLinear)
    E, I, O = before.shape
    assert stack.weight.shape == (E * O, I)
    assert torch.equal(stack.weight.view(E, O, I), before.mT)
