"""Quantized embeddings and heads in whole models: found, converted, stored, trained, exported."""

from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER, build
from covering import covering
from crash import stopped_at
from quantized import SPECS, random_weight, tiny_quantized
from safetensors.torch import load_file
from tiny import ARCHITECTURES, tiny_model
from torch import Tensor, nn
from train_case import config as train_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import ConvertConfig
from qat.convert.quantize import quantize_model
from qat.errors import CheckpointError, ConfigError
from qat.generate.text import generate_text
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.cost import (
    linear_bits,
    parameter_count,
    stored_bits,
    tensor_bytes,
    whole_model_bits,
)
from qat.models.language_model import LanguageModel
from qat.models.load import load_model
from qat.models.sizes import checkpoint_sizes
from qat.models.split_check import check_split
from qat.nn.lut_embedding import TiedLutHead, quant_tables
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import (
    embedding_dtype,
    put_table,
    table_names,
    table_spec,
    weight_shape,
    with_tables,
)
from qat.quant.spec import PRESETS, LutSpec, PlanRule, QuantPlan, by_group
from qat.train.optim import Optimizer
from qat.train.start import train_student

IDS = torch.arange(40).view(2, 20) * 7 % 320
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
EITHER = pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])


def with_random_tables(
    bits: int, architecture: str = "qwen3", linears: LutSpec = SPECS["lut2"], **overrides: object
) -> PreTrainedModel:
    model = tiny_quantized(architecture, linears, **overrides)
    for name in table_names(model):
        V, D = weight_shape(model.get_submodule(name))
        spec = table_spec(bits, D)
        put_table(model, name, random_weight(V, D, spec), spec)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize(("architecture", "tied"), covering(ARCHITECTURES, [True, False]))
def test_a_table_computes_as_the_float_table_of_its_values(architecture: str, tied: bool) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    expected = ["model.embed_tokens"] + ["lm_head"] * (not tied)
    assert table_names(model) == expected
    spec = LutSpec(bits=8, group_size=8)
    weights = {}
    for name in expected:
        quantized = random_weight(320, 32, spec)
        put_table(model, name, quantized, spec)
        weights[name] = model.get_submodule(name).quantized_weight()
    assert table_names(model) == expected
    plain = tiny_model(architecture, tie_word_embeddings=tied)
    with torch.no_grad():
        for name, weight in weights.items():
            plain.get_submodule(name).weight.copy_(weight)
    assert torch.equal(logits(model), logits(plain))
    model.tie_weights()  # changes nothing
    assert torch.equal(logits(model), logits(plain))
    check_split(LanguageModel(model))


@pytest.mark.parametrize(
    ("architecture", "bits", "tied"),
    [*zip(ARCHITECTURES, [3, 4, 8], [True, False, True], strict=True)],
)
def test_a_checkpoint_gives_the_same_bits(
    architecture: str, bits: int, tied: bool, tmp_path: Path
) -> None:
    odd = {"vocab_size": 321, "hidden_size": 40, "tie_word_embeddings": tied}
    model = with_random_tables(bits, architecture, LutSpec(bits=2, group_size=8), **odd)
    save_checkpoint(model, None, tmp_path / "packed")
    for reloaded in (
        load_checkpoint(tmp_path / "packed", torch.float32),
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32),
    ):
        assert torch.equal(logits(reloaded), logits(model))
    assert isinstance(reloaded.get_output_embeddings(), TiedLutHead) == tied
    half = load_checkpoint(tmp_path / "packed", torch.bfloat16)
    assert embedding_dtype(half) == logits(half).dtype == torch.bfloat16
    for name, table in quant_tables(half).items():
        assert torch.equal(table.scales, model.get_submodule(name).scales)


@TIED
def test_counts_are_those_of_the_file(tied: bool, tmp_path: Path) -> None:
    model = with_random_tables(8, tie_word_embeddings=tied)
    plain = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=tied)
    assert parameter_count(model) == parameter_count(plain)
    assert linear_bits(model) == linear_bits(plain)
    save_checkpoint(model, None, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    stored = sum(t.numel() * t.element_size() for t in tensors.values())
    assert tensor_bytes(model) == stored
    assert whole_model_bits(model) == 8 * stored / parameter_count(model)
    for name, table in quant_tables(model).items():
        own = [t for key, t in tensors.items() if key.startswith(f"{name}.")]
        assert stored_bits(table) == 8 * sum(t.numel() * t.element_size() for t in own)


@EITHER
def test_convert_quantizes_the_tables(tied: bool, tmp_path: Path) -> None:
    plain = tiny_model(initializer_range=0.2, tie_word_embeddings=tied, num_hidden_layers=1)
    plain.save_pretrained(tmp_path / "float")
    TOKENIZER.save_pretrained(tmp_path / "float")
    settings = ConvertConfig(to="q4a4", embedding_bits=8, device="cpu")
    report = convert_checkpoint(str(tmp_path / "float"), settings, tmp_path / "packed")
    tables = ["model.embed_tokens"] + ["lm_head"] * (not tied)
    assert [module.name for module in report.modules[: len(tables)]] == tables
    assert all(m.bits == 8 and m.relative_error < 0.01 for m in report.modules[: len(tables)])
    model = load_checkpoint(tmp_path / "packed", torch.float32)
    assert {*quant_tables(model)} == {*tables} and len(quant_linears(model)) == 7
    sizes = checkpoint_sizes(tmp_path / "packed", None)  # what `qat run` and its page count
    assert report.bits_per_weight == sizes.bits_per_weight
    assert report.megabytes == sizes.megabytes == tensor_bytes(model) / 1e6
    # what has its format is kept; another one is fitted to the base
    again = ConvertConfig(to="q4a4", embedding_bits=4, base=str(tmp_path / "float"), device="cpu")
    report = convert_checkpoint(str(tmp_path / "packed"), again, tmp_path / "four")
    assert report.kept == 7 and [m.name for m in report.modules] == tables
    model = load_checkpoint(tmp_path / "four", torch.float32)
    direct = LanguageModel(plain)
    quantize_model(direct, with_tables(PRESETS["q4a4"], plain, 4))
    assert torch.equal(logits(model), logits(plain))


def test_plans_written_for_linears_leave_tables_alone() -> None:
    names, tables = ["model.layers.0.mlp.up"], ["model.embed_tokens", "lm_head"]
    four, eight = LutSpec(bits=4), LutSpec(bits=8)

    def assigned(*rules: tuple[str, LutSpec | None]) -> dict[str, LutSpec]:
        rules = tuple(PlanRule(pattern=pattern, spec=spec) for pattern, spec in rules)
        return QuantPlan(name="p", rules=rules).assign(names, tables)

    assert assigned(("*", four)) == {names[0]: four}
    assert assigned(("*embed*", eight), ("*", four)) == {tables[0]: eight, names[0]: four}
    assert assigned(("*head", eight)) == {"lm_head": eight}
    assert assigned(("lm_head", None), ("*head*", eight), ("*", four)) == {names[0]: four}
    assert QuantPlan(name="p", rules=(PlanRule(pattern="wte", spec=four),)).assign(
        names, ["wte"]
    ) == {"wte": four}
    with pytest.raises(ConfigError, match="pattern 'lm_head' matches none"):
        QuantPlan(name="p", rules=(PlanRule(pattern="lm_head", spec=four),)).assign(names, [])


@pytest.mark.parametrize(
    ("width", "four", "eight"),
    [(64, 16, 32), (48, 16, 24), (40, 10, 20), (7, 7, 7), (37, 1, 1)],
)
def test_groups_of_a_table_divide_its_width(width: int, four: int, eight: int) -> None:
    assert table_spec(4, width) == by_group(4, four)
    assert table_spec(8, width) == LutSpec(bits=8, group_size=eight)


@EITHER
def test_a_student_trains_goes_on_and_speaks(tied: bool, tmp_path: Path) -> None:
    build(tmp_path / "cache")
    student = with_random_tables(8, tie_word_embeddings=tied, num_hidden_layers=1)
    save_checkpoint(student, TOKENIZER, tmp_path / "student")
    settings = train_config(tmp_path)

    def end(out: Path, *, resume: bool = False) -> PreTrainedModel:
        report = train_student(settings, str(tmp_path / "student"), out, resume=resume)
        return load_model(str(report.final), device="cpu", dtype="fp32").model

    whole = end(tmp_path / "whole")
    with stopped_at(Optimizer, "step", 4):
        end(tmp_path / "broken")
    assert torch.equal(logits(end(tmp_path / "broken", resume=True)), logits(whole))
    for name, table in quant_tables(student).items():
        kept = quant_tables(whole)[name]
        assert torch.equal(kept.quantized_weight(), table.quantized_weight())
    said = generate_text(LanguageModel(whole), TOKENIZER, "the cat", max_new_tokens=4)
    assert said.num_tokens > 0


def test_an_embedding_that_computes_more_is_refused() -> None:
    class Odd(nn.Embedding):
        pass

    model = tiny_model()
    model.set_input_embeddings(Odd(320, 32))
    spec = LutSpec(bits=8)
    with pytest.raises(CheckpointError, match="embed_tokens is a Odd, expected a plain or scaled"):
        put_table(model, "model.embed_tokens", random_weight(320, 32, spec), spec)
