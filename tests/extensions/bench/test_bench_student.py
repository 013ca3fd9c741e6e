"""Students of published shapes: their sizes, and codes that are there at once."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qat.errors import ConfigError
from qat.extensions.bench.config import SHAPES, BenchConfig, shape_called
from qat.extensions.bench.student import (
    INPUT_RANGE,
    WEIGHT_RMS,
    open_student,
    quantize_at_random_,
    random_model,
)
from qat.models.hf_quantizer import QatConfig
from qat.nn.activation import read_alike
from qat.nn.quant_linear import FrozenLutLinear, quant_linears
from qat.nn.swap import linear_names
from qat.quant.activation import LEVELS
from qat.quant.spec import PRESETS, preset_called
from qat.quant.weight import round_as_stored

PUBLISHED = {  # parameters, a tied head once
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
}


def test_shapes_have_the_published_number_of_parameters() -> None:
    assert set(PUBLISHED) == set(SHAPES) - {"tiny", "tiny-moe", "nsa-125m"}
    for name, published in PUBLISHED.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape_called(name)))
        assert sum(p.numel() for p in model.parameters()) == published, name
    runbook = SHAPES["nsa-125m"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**runbook))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 125
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [runbook[name] for name in sizes] == [12, 12, 2]


@pytest.mark.parametrize("preset", ["q2a4", "q2a4_r32", "v2a2"])
def test_random_codes_have_the_formats_of_the_preset(preset: str) -> None:
    model = open_student("tiny", BenchConfig(device="cpu", to=preset)).model
    linears = quant_linears(model)
    assert len(linears) == 14
    for name, linear in linears.items():
        assert linear.spec == PRESETS[preset].spec_for(name)
        assert not linear.packed.is_meta and linear.indices().unique().numel() > 1
        rms = linear.quantized_weight().pow(2).mean().sqrt().item()
        assert rms == pytest.approx(WEIGHT_RMS, rel=0.25)
        assert linear.codebook.shape == linear.spec.codebook_shape
        bits = linear.spec.stored_bits("codebook")
        assert torch.equal(round_as_stored("codebook", linear.codebook, bits), linear.codebook)
    assert set(QatConfig.of(model).modules) == set(linears)


@pytest.mark.parametrize("preset", ["q2a4_a8", "q2a4_f8", "q2a4_a8s"])
def test_inputs_are_those_of_the_preset(preset: str) -> None:
    model = open_student("tiny", BenchConfig(device="cpu", to=preset)).model
    scales = {n: t for n, t in model.state_dict().items() if n.endswith("activation.scale")}
    assert bool(scales) is preset.endswith("a8s")
    assert all(scale == torch.tensor(INPUT_RANGE / LEVELS) for scale in scales.values())
    found = {linear.activation.spec for linear in quant_linears(model).values()}
    assert found == preset_called(preset).activations
    layer = model.model.layers[0]
    assert read_alike([layer.mlp.gate_proj, layer.mlp.up_proj])


def test_a_shape_of_experts_has_as_many_layers_as_are_asked_for() -> None:
    student = open_student("tiny-moe", BenchConfig(device="cpu", layers=1))
    linears = quant_linears(student.model)
    stack = linears["model.layers.0.mlp.experts.gate_up_proj"]
    assert len(linears) == 6 and stack.out_features == 8 * 2 * 32
    assert {t.dtype for t in student.model.state_dict().values()} == {torch.float32, torch.uint8}
    ids = torch.arange(8)[None]
    assert student.hidden(ids, ids).isfinite().all()
    with pytest.raises(ConfigError, match="layers=1, but some/model is no shape's name"):
        open_student("some/model", BenchConfig(device="cpu", layers=1))


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe", "gemma-3-270m"])
def test_a_student_gets_memory_once_its_linears_are_packed(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, shape, {**SHAPES[shape], "vocab_size": 1024})
    config = BenchConfig(device="cpu", layers=2)
    plain = random_model(shape, config).float()
    quantize_at_random_(plain, PRESETS["q2a4"])
    given = []
    to_empty = PreTrainedModel.to_empty

    def seen(model: PreTrainedModel, *, device: torch.device) -> PreTrainedModel:
        given.append({type(model.get_submodule(name)) for name in linear_names(model)})
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
        return to_empty(model, device=device)

    monkeypatch.setattr(PreTrainedModel, "to_empty", seen)
    student = open_student(shape, config).model
    assert given == [{FrozenLutLinear}]
    ours, theirs = student.state_dict(), plain.state_dict()
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
        n: (t.shape, t.dtype) for n, t in theirs.items()
    }
    embedded = student.get_input_embeddings().weight
    assert embedded.std().item() == pytest.approx(WEIGHT_RMS, rel=0.05)
    assert student.get_output_embeddings().weight is embedded
    fixed = {n: b for n, b in plain.named_buffers() if not n.endswith("packed")}
    fixed |= {n: p for n, p in plain.named_parameters() if "norm" in n}
    found = dict([*student.named_buffers(), *student.named_parameters()])
    assert all(torch.equal(found[name], tensor) for name, tensor in fixed.items())


def test_a_student_computes_and_is_the_same_under_one_seed() -> None:
    config = BenchConfig(device="cpu")
    ids = torch.arange(8)[None]
    hidden = [open_student("tiny", config).hidden(ids, ids) for _ in range(2)]
    assert hidden[0].isfinite().all() and torch.equal(*hidden)
