"""Joined projections: the same function and gradients as each linear alone."""

import pytest
import torch
from quantized import SPECS, tiny_quantized
from torch import Tensor

from qat.kernels import glu
from qat.models import regions as projections
from qat.models.language_model import LanguageModel
from qat.models.regions import join_projections, part_projections
from qat.nn.quant_linear import quant_linears
from qat.nn.step import JoinedLinears, form_weights, release_weights
from qat.nn.swap import decoder_layers

IDS = torch.arange(2 * 7).view(2, 7)
POSITIONS = (torch.arange(7) % 4).expand(2, 7)


def gradients(model: LanguageModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.model.zero_grad()
    hidden = model.hidden(IDS, POSITIONS)
    # not its square: behind the last norm that is the same for all
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    named = model.model.named_parameters()
    return hidden.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize(
    ("architecture", "is_formed", "spec"),
    [
        ("qwen3", True, "lut2"),
        ("qwen3", False, "lowrank4"),
        ("llama", True, "lowrank4"),
        ("llama", False, "lut2"),
    ],
)
def test_joined_projections_compute_the_same(architecture, is_formed, spec) -> None:
    if spec not in SPECS:
        spec = next(name for name in SPECS if SPECS[name].scale == "low_rank")
    model = LanguageModel(tiny_quantized(architecture, SPECS[spec]))
    if is_formed:
        form_weights(model.model, torch.float32)
    expected, expected_gradients = gradients(model)
    names = set(model.model.state_dict())
    join_projections(model.model)
    joined = [m for m in model.model.modules() if isinstance(m, JoinedLinears)]
    assert [len(unit.linears) for unit in joined] == [3, 2] * 2
    if is_formed:
        form_weights(model.model, torch.float32)
    actual, actual_gradients = gradients(model)
    torch.testing.assert_close(actual, expected)
    assert actual_gradients.keys() == expected_gradients.keys()
    for name, value in expected_gradients.items():
        slack = 1e-5 * value.abs().max().item()
        torch.testing.assert_close(actual_gradients[name], value, rtol=1e-4, atol=slack)
    assert set(model.model.state_dict()) == names
    part_projections(model.model)
    release_weights(model.model)
    assert not any(isinstance(module, JoinedLinears) for module in model.model.modules())
    again, _ = gradients(model)
    torch.testing.assert_close(again, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_compiled_layers_compute_the_same(architecture, is_fused, monkeypatch) -> None:
    if is_fused:
        pytest.importorskip("triton")
        monkeypatch.setattr(projections, "joined_fits_tile", lambda *_: True)
        monkeypatch.setattr(LanguageModel, "_tile_fits", lambda *_: True)
        monkeypatch.setattr(glu, "use_triton", lambda *_: True)
    model = LanguageModel(tiny_quantized(architecture, SPECS["lut2"], num_attention_heads=4))
    form_weights(model.model, torch.float32)
    expected, expected_gradients = gradients(model)
    join_projections(model.model)
    form_weights(model.model, torch.float32)
    for layer in decoder_layers(model.model):
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    actual, actual_gradients = gradients(model)
    torch.testing.assert_close(actual, expected)
    assert actual_gradients.keys() == expected_gradients.keys()
    for name, value in expected_gradients.items():
        slack = 1e-5 * value.abs().max().item()
        torch.testing.assert_close(actual_gradients[name], value, rtol=1e-4, atol=slack)


def test_a_joined_linear_called_alone_uses_the_joined_weight() -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    join_projections(model)
    form_weights(model, torch.float32)
    name = "model.layers.0.self_attn.k_proj"
    linear = quant_linears(model)[name]
    assert linear.formed is None
    x = torch.randn(3, linear.in_features)
    y = linear(x)
    torch.testing.assert_close(y, x @ linear.quantized_weight().T)
    y.sum().backward()
    assert linear.scales.grad is not None


def test_a_second_forming_writes_in_place() -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    join_projections(model)
    form_weights(model, torch.float32)
    (unit, *_) = (m for m in model.modules() if isinstance(m, JoinedLinears))
    before = unit.formed.data_ptr(), unit.formed.clone()
    with torch.no_grad():
        unit.linears[0].scales.mul_(2)
    form_weights(model, torch.float32)
    assert unit.formed.data_ptr() == before[0]
    rows = unit.linears[0].out_features
    assert torch.equal(unit.formed[rows:], before[1][rows:])
    assert not torch.equal(unit.formed[:rows], before[1][:rows])
