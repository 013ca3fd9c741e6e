"""Families of other names and parts: convert, open again, and learn."""

import re
from pathlib import Path

import families
import pytest
import torch
from cli_case import call
from covering import covering
from tiny import VOCAB, tiny_tokenizer

from qat.convert.calibrate import TokenBatch
from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import ConvertConfig
from qat.convert.convert import convert_model
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_teacher
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import decoder_layers, linear_names
from qat.quant.spec import role_of
from qat.train.learnable import weights_in_scope

FAMILIES = (
    "GPTNeoXForCausalLM",
    "OPTForCausalLM",
    "FalconForCausalLM",
    "BloomForCausalLM",
    "GPTJForCausalLM",
    "Lfm2ForCausalLM",
    "Gemma3ForConditionalGeneration",
)
MIXTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
ATTENTION = """
name = "attention"
rules = [{ role = "attention", spec = { bits = 4, group_size = 16 } }]
"""


def saved(family: str, out: Path) -> str:
    """Write a model of that class, of two layers where these show every kind of layer."""
    families.saved(family, out, families.short_config(families.FAMILIES[family]))
    return str(out)


def assert_learns(student: LanguageModel, names: list[str], ids: torch.Tensor) -> None:
    """Three steps on the scales of the linears called `names` lower the loss each time."""
    scales = [student.model.get_submodule(name).scales for name in names]
    optimizer, losses = torch.optim.AdamW(scales, lr=1e-2), []
    for _ in range(3):
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        logits = student.logits(student.hidden(ids, positions))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize(
    "family", [*FAMILIES[:3], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[3:])]
)
def test_a_preset_fits_and_the_student_learns(family: str, tmp_path: Path) -> None:
    source = saved(family, tmp_path / "float")
    convert_checkpoint(source, ConvertConfig(to="q2a4", device="cpu"), tmp_path / "packed")
    student = load_model(str(tmp_path / "packed"), device="cpu", dtype="fp32")
    model = student.model
    assert list(quant_linears(model)) == linear_names(model)
    bits = {role_of(name): linear.spec.bits for name, linear in quant_linears(model).items()}
    assert bits == {"mlp": 2, "attention": 4}
    names = weights_in_scope(model, "mlp")
    assert 0 < len(names) < len(linear_names(model))
    assert_learns(student, names, torch.arange(16).view(2, 8) % VOCAB)


def test_the_text_model_of_a_multimodal_one_is_meant() -> None:
    model = families.build("Gemma3ForConditionalGeneration")
    assert all("language_model" in name for name in linear_names(model))
    assert decoder_layers(model) is model.model.language_model.layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["SmolVLMForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"]
)
def test_the_text_of_a_model_of_images_is_quantized_beside_its_tower(
    family: str, tmp_path: Path
) -> None:
    families.saved(family, tmp_path / "float")
    source = str(tmp_path / "float")
    convert_checkpoint(source, ConvertConfig(to="q2a4", device="cpu"), tmp_path / "packed")
    before, after = (load_model(str(tmp_path / n), device="cpu").model for n in ("float", "packed"))
    assert type(after).__name__ == family
    assert {role_of(name) for name in quant_linears(after)} == {"mlp", "attention"}
    assert not any("vision" in name or "visual" in name for name in quant_linears(after))
    tower = {n: w for n, w in before.named_parameters() if "vision" in n or "visual" in n}
    assert tower and all(torch.equal(after.get_parameter(name), w) for name, w in tower.items())


@pytest.mark.parametrize(("family", "is_calibrated"), covering(MIXTURES, [True, False]))
def test_the_experts_of_a_mixture_are_quantized_and_learn(
    family: str, is_calibrated: bool, tmp_path: Path
) -> None:
    source = saved(family, tmp_path / "float")
    rows = torch.randint(VOCAB, (40, 24))
    batches = [TokenBatch(rows, torch.arange(24).expand(40, 24))] if is_calibrated else []
    student = load_model(source, device="cpu")
    convert_model(student, ConvertConfig(to="q2a4", device="cpu"), calibration=batches)
    model = student.model
    stacks = [name for name in quant_linears(model) if "experts" in name]
    assert len(stacks) == 4 and all(role_of(name) == "mlp" for name in stacks)
    assert not any("gate.weight" in name or name.endswith(".gate") for name in quant_linears(model))
    assert_learns(student, stacks, rows[:4])
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "out")
    again = load_model(str(tmp_path / "out"), device="cpu")
    ids, places = rows[:2], torch.arange(24).expand(2, 24)
    with torch.no_grad():
        assert torch.equal(again.hidden(ids, places), student.hidden(ids, places))


def test_experts_that_calibration_hardly_reached_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved("Qwen3MoeForCausalLM", tmp_path / "float")
    student = load_model(source, device="cpu")
    batches = [TokenBatch(torch.arange(24)[None], torch.arange(24)[None])]
    convert_model(student, ConvertConfig(to="q2a4", device="cpu"), calibration=batches)
    assert "16 of 16 weights of experts saw fewer than 64 calibration tokens" in caplog.text


@pytest.mark.parametrize("family", MIXTURES)
def test_the_attention_of_a_mixture_can_be_quantized(family: str, tmp_path: Path) -> None:
    source = saved(family, tmp_path / "float")
    (tmp_path / "plan.toml").write_text(ATTENTION)
    config = ConvertConfig(to=str(tmp_path / "plan.toml"), device="cpu")
    convert_checkpoint(source, config, tmp_path / "out")
    found = quant_linears(load_model(str(tmp_path / "out"), device="cpu").model)
    assert len(found) == 8 and {role_of(name) for name in found} == {"attention"}


HEAD = "than its head makes of its hidden states|hidden ones before the head, expected nothing"
PART = "for which transformers has no causal language model, expected one that has"
LATER = "reads tokens that come later"
REFUSED = {
    "BertLMHeadModel": HEAD,
    "BigBirdForCausalLM": HEAD,
    "CamembertForCausalLM": HEAD,
    "Data2VecTextForCausalLM": HEAD,
    "ElectraForCausalLM": HEAD,
    "ErnieForCausalLM": HEAD,
    "MegatronBertForCausalLM": HEAD,
    "ModernBertDecoderForCausalLM": HEAD,
    "ProphetNetForCausalLM": HEAD,
    "RemBertForCausalLM": HEAD,
    "RobertaForCausalLM": HEAD,
    "RobertaPreLayerNormForCausalLM": HEAD,
    "RoCBertForCausalLM": HEAD,
    "RoFormerForCausalLM": HEAD,
    "XLMRobertaForCausalLM": HEAD,
    "XLMRobertaXLForCausalLM": HEAD,
    "XmodForCausalLM": HEAD,
    "Cohere2VisionForConditionalGeneration": HEAD,
    "PaliGemmaForConditionalGeneration": "computes other hidden states where documents are packed",
    "CpmAntForCausalLM": LATER,
    "XLNetLMHeadModel": LATER,
    "Emu3ForCausalLM": PART,
    "MllamaForCausalLM": PART,
    "DbrxForCausalLM": "holds experts in one tensor",
    "HrmTextForCausalLM": "has no list of 16 decoder blocks",
    "DoryForCausalLM": "cannot be run one by one",
    "ReformerModelWithLMHead": "cannot be run one by one",
    "XLMWithLMHeadModel": "keeps the parts of its 2 decoder blocks apart",
}
"""Classes that are refused, and what is said of them."""


@pytest.mark.slow
@pytest.mark.usefixtures("short_fits")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_class_works_or_is_refused_in_one_line(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if family in families.NOT_BUILT:
        pytest.skip(families.NOT_BUILT[family])
    verb = families.walk(family, tmp_path, lambda *tokens: call(monkeypatch, *tokens))
    said = capsys.readouterr().err
    assert bool(verb) == (family in REFUSED), said
    if verb:
        assert re.search(REFUSED[family], said.splitlines()[-1])
    else:  # a GPU opens it in 16 bits
        load_teacher(str(tmp_path / "float"), device="cpu", dtype="bf16")
    assert "Traceback" not in said
