"""Joined projections: the same function and gradients as each linear alone."""

from copy import deepcopy

import pytest
import torch
from quantized import SPECS, gradients, tiny_adapted, tiny_quantized
from three_way import assert_no_worse_than_eager
from tiny import tiny_model

from qat.kernels import glu
from qat.kernels.dispatch import computing_by
from qat.kernels.joined_attention import joined_tile_attention
from qat.models import regions as projections
from qat.models.document_attention import set_kv
from qat.models.language_model import LanguageModel
from qat.models.regions import attention_kernel, join_projections, part_projections
from qat.nn.quant_linear import quant_linears
from qat.nn.step import JoinedLinears, form_weights, release_weights
from qat.nn.swap import decoder_layers
from qat.quant.spec import KvSpec

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
    exact = LanguageModel(deepcopy(model.model).double())
    form_weights(exact.model, torch.float64)
    truth, true_gradients = gradients(exact, IDS, POSITIONS)
    form_weights(model.model, torch.float32)
    hidden, expected = gradients(model, IDS, POSITIONS)
    join_projections(model.model)
    form_weights(model.model, torch.float32)
    for layer in decoder_layers(model.model):
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    found, by_name = gradients(model, IDS, POSITIONS)
    assert by_name.keys() == expected.keys() == true_gradients.keys()
    rows = [(by_name[name], expected[name], true_gradients[name]) for name in expected]
    # on some processors PyTorch's own attention errs by 6e-5 of the largest gradient
    for one, plain, true in [(found, hidden, truth), *rows]:
        assert_no_worse_than_eager(one, plain, true, slack=1e-5 * true.abs().max().item())


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


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_heads_of_a_float_model_are_joined_for_long_rows(architecture, monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(LanguageModel, "_tile_fits", lambda *_: True)
    monkeypatch.setattr(glu, "use_triton", lambda *_: False)
    model = LanguageModel(tiny_model(architecture, head_dim=32).half())
    ids = torch.arange(130)[None] % 99
    positions = torch.arange(130)[None] % 80
    with torch.no_grad():
        expected = model.hidden(ids, positions)
        join_projections(model.model)
        ran = []
        monkeypatch.setattr(
            projections,
            "joined_tile_attention",
            lambda *a: ran.append(a[0].shape) or joined_tile_attention(*a),
        )
        with computing_by(True):
            found = model.hidden(ids, positions)
    width = 32 * (model.config.num_attention_heads + 2 * model.config.num_key_value_heads)
    assert ran == 2 * [(1, 130, width)]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_kernel_of_attention_depends_on_the_row_and_on_joined_layers(monkeypatch) -> None:
    monkeypatch.setattr(projections, "has_room", lambda *_: True)

    def found(
        model: LanguageModel, length: int, dtype: torch.dtype = torch.float16, compiled: bool = True
    ) -> str:
        return attention_kernel(model, length, dtype, is_compiled=compiled)

    narrow, wide, other = (
        LanguageModel(tiny_model(architecture, head_dim=width))
        for architecture, width in (("llama", 32), ("llama", 128), ("gemma3", 32))
    )
    lengths = 128, 129, 1024, 1025
    with computing_by(True):
        for model in (narrow, wide):
            assert [found(model, S) for S in lengths] == ["tile", "blocks", "blocks", "sdpa"]
        assert {
            found(other, 512), found(narrow, 512, compiled=False), found(narrow, 512, torch.float32)
        } == {"sdpa"}  # fmt: skip
        set_kv(narrow.model, KvSpec(bits=8))
        assert found(narrow, 512) == "sdpa"
    assert found(wide, 128) == "sdpa"
