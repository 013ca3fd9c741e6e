"""Checkpoints of students with quantized inputs: the same bits after a reload, strict loading."""

import json
from pathlib import Path

import pytest
import torch
from quantized import SPECS, tiny_quantized, with_rounded_inputs
from safetensors.torch import load_file
from tiny import IDS, edited, logits
from transformers import PreTrainedModel

from qat.errors import CheckpointError
from qat.models.checkpoint import check_written, load_checkpoint, load_skeleton, save_checkpoint
from qat.models.hf_quantizer import QatConfig
from qat.models.language_model import LanguageModel
from qat.models.split_check import check_split
from qat.models.stored_state import INPUT_SCALE, activation_counts, packed_state_dict
from qat.nn.latent import to_latent
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import linear_names, put_table, table_spec
from qat.quant.fit import fit_weight
from qat.quant.spec import ACTIVATION_KINDS


def student(kind: str, *, has_head: bool = False) -> PreTrainedModel:
    """A tiny student whose linears, and head if wished, quantize their inputs."""
    model = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=True)
    if has_head:
        weight, form = model.model.embed_tokens.weight.detach(), table_spec(4, 32)
        put_table(model, "model.embed_tokens", fit_weight(weight, form), form)
    return with_rounded_inputs(model, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_reloaded_logits_are_equal(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = student(kind, has_head=True)
    save_checkpoint(made, None, tmp_path / "a")
    check_written(tmp_path / "a", made)
    first = load_checkpoint(tmp_path / "a", dtype)
    save_checkpoint(first, None, tmp_path / "b")
    again = load_checkpoint(tmp_path / "b", dtype)
    assert torch.equal(logits(first), logits(again))
    if dtype == torch.float32:
        assert torch.equal(logits(made), logits(again))
    assert activation_counts(again) == {kind: 15}
    assert again.config.quantization_config.features == ["activations"]
    to_latent(again, linear_names(again))
    if dtype == torch.float32:
        assert torch.equal(logits(first), logits(again))
    plain = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=True)
    assert QatConfig.of(plain).features == []


@pytest.mark.parametrize("kind", ["int8", "int8-static"])
def test_a_head_rounds_once_however_it_is_called(kind: str) -> None:
    made = student(kind, has_head=True)
    model = LanguageModel(made)
    check_split(model)
    positions = torch.arange(IDS.shape[1]).expand_as(IDS)
    with torch.no_grad():
        found = model.logits(model.hidden(IDS, positions))
    torch.testing.assert_close(found, logits(made))
    head = model.head_in(torch.float32)
    with torch.no_grad():
        assert torch.equal(model.hidden(IDS, positions) @ head.weight.T, found)


def test_a_shared_scale_stays_shared_and_in_float32(tmp_path: Path) -> None:
    save_checkpoint(student("int8-static").bfloat16(), None, tmp_path / "a")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    scales = {name: t for name, t in stored.items() if name.endswith(INPUT_SCALE)}
    assert len(scales) == 14 and {t.dtype for t in scales.values()} == {torch.float32}
    model = load_checkpoint(tmp_path / "a")
    assert model.dtype == torch.bfloat16
    attention = model.model.layers[1].self_attn
    assert attention.k_proj.activation is attention.q_proj.activation
    assert attention.o_proj.activation is not attention.q_proj.activation
    assert attention.q_proj.activation.scale.item() == torch.tensor(0.0123 * 8).item()
    names = [name for name, _ in model.named_parameters() if name.endswith(INPUT_SCALE)]
    assert len(names) == 8
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    entry = config["quantization_config"]["modules"]["model.layers.1.self_attn.k_proj"]
    assert entry["activation"] == {"kind": "int8-static"}
    assert entry["input_scale_of"] == "model.layers.1.self_attn.q_proj"


def test_a_scale_of_16_bits_is_stored_as_it_is_computed_with(tmp_path: Path) -> None:
    made = with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2"]), "int8-static", 16)
    save_checkpoint(made, None, tmp_path / "a")
    check_written(tmp_path / "a", made)
    again = load_checkpoint(tmp_path / "a")
    assert torch.equal(logits(again), logits(made))
    for name, linear in quant_linears(again).items():
        own = quant_linears(made)[name].activation
        assert linear.activation.spec == own.spec
        assert torch.equal(linear.activation.scale, own.scale.half().float())
        assert not torch.equal(linear.activation.scale, own.scale)


UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q["modules"][UP].update(activation={"kind": "int7"}), "activation|kind"),
        (lambda q: q["modules"][UP].update(input_scale_of="nobody"), "input_scale_of='nobody'"),
        (lambda q: q["modules"][UP].update(input_scale_of=UP), "a static scale of its own"),
        (lambda q: q.update(features=[]), r"expected \['activations'\]"),
        (lambda q: q["modules"][DOWN].pop("activation"), "no place for"),
    ],
)
def test_damage_is_told(change: object, message: str, tmp_path: Path) -> None:
    save_checkpoint(student("int8-static"), None, tmp_path / "a")
    with edited(tmp_path / "a") as config:
        change(config["quantization_config"])
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "a")


def test_a_scale_that_is_no_size_is_refused(tmp_path: Path) -> None:
    made = student("int8-static")
    with torch.no_grad():
        quant_linears(made)[UP].activation.scale.zero_()
    save_checkpoint(made, None, tmp_path / "a")
    with pytest.raises(CheckpointError, match="expected a positive number"):
        load_checkpoint(tmp_path / "a")


def test_a_skeleton_has_the_same_tensors(tmp_path: Path) -> None:
    made = student("int8-static", has_head=True)
    save_checkpoint(made, None, tmp_path / "a")
    skeleton = load_skeleton(tmp_path / "a")
    assert skeleton.state_dict().keys() == load_checkpoint(tmp_path / "a").state_dict().keys()
    assert packed_state_dict(made)[f"{UP}.{INPUT_SCALE}"].dtype == torch.float32
