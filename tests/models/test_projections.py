"""Joined projections: the same function and gradients as each linear alone."""

import pytest
import torch
from quantized import SPECS, gradients, tiny_adapted, tiny_quantized

from qat.kernels import glu
from qat.models import regions as projections
from qat.models.language_model import LanguageModel
from qat.models.regions import join_projections, part_projections
from qat.nn.quant_linear import quant_linears
from qat.nn.step import JoinedLinears, form_weights, release_weights
from qat.nn.swap import decoder_layers

IDS = torch.arange(2 * 7).view(2, 7)
POSITIONS = (torch.arange(7) % 4).expand(2, 7)
Computed = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Hidden states, and gradients by name."""


def assert_alike(found: Computed, expected: Computed) -> None:
    torch.testing.assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        slack = 1e-5 * value.abs().max().item()
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=slack)


@pytest.mark.parametrize(
    ("architecture", "is_formed", "spec", "make"),
    [
        ("qwen3", True, "lut2", tiny_quantized),
        ("qwen3", False, "lut2_r4", tiny_quantized),
        ("llama", True, "lut2_r4", tiny_quantized),
        ("llama", False, "lut2", tiny_quantized),
        ("qwen3", True, "lut2", tiny_adapted),
    ],
)
def test_joined_projections_compute_the_same(architecture, is_formed, spec, make) -> None:
    model = LanguageModel(make(architecture, SPECS[spec]))
    if is_formed:
        form_weights(model.model, torch.float32)
    expected = gradients(model, IDS, POSITIONS)
    assert any("lora" in name for name in expected[1]) == (make is tiny_adapted)
    names = set(model.model.state_dict())
    join_projections(model.model)
    joined = [m for m in model.model.modules() if isinstance(m, JoinedLinears)]
    assert [len(unit.linears) for unit in joined] == [3, 2] * 2
    if is_formed:
        form_weights(model.model, torch.float32)
    assert_alike(gradients(model, IDS, POSITIONS), expected)
    assert set(model.model.state_dict()) == names
    part_projections(model.model)
    release_weights(model.model)
    assert not any(isinstance(module, JoinedLinears) for module in model.model.modules())
    assert_alike(gradients(model, IDS, POSITIONS), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize(
    ("architecture", "is_fused", "make"),
    [
        ("qwen3", True, tiny_adapted),
        ("qwen3", False, tiny_quantized),
        ("llama", True, tiny_quantized),
        ("llama", False, tiny_adapted),
    ],
)
def test_compiled_layers_compute_the_same(architecture, is_fused, make, monkeypatch) -> None:
    if is_fused:
        pytest.importorskip("triton")
        monkeypatch.setattr(projections, "joined_fits_tile", lambda *_: True)
        monkeypatch.setattr(LanguageModel, "_tile_fits", lambda *_: True)
        monkeypatch.setattr(glu, "use_triton", lambda *_: True)
    model = LanguageModel(make(architecture, SPECS["lut2"], num_attention_heads=4))
    form_weights(model.model, torch.float32)
    expected = gradients(model, IDS, POSITIONS)
    join_projections(model.model)
    form_weights(model.model, torch.float32)
    for layer in decoder_layers(model.model):
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    assert_alike(gradients(model, IDS, POSITIONS), expected)


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
