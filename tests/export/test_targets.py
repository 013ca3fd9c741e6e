"""Targets: what each holds, that its own library reads our weights and logits, what is refused."""

import copy
import json
import math
import re
import shutil
import sys
from importlib import import_module
from itertools import cycle, permutations, product
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from quantized import SPECS, e5m3_values, frozen_linear, latent_linear, tiny_adapted, tiny_quantized
from ranks_case import run_ranks
from safetensors.torch import load_file
from tiny import IDS, logits, tiny_model, tiny_tokenizer
from tokenizers import Regex, Tokenizer, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from torch import Tensor
from train_case import train_tables
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qat.backend.base import DTYPES
from qat.cli import run_verb
from qat.convert.quantize import quantize_model
from qat.convert.shipping import Shipping
from qat.errors import ConfigError, ExportError
from qat.export import model as exported
from qat.export import parts
from qat.export.config import ExportConfig, TargetName
from qat.export.dense import dense_state_dict
from qat.export.model import export_model
from qat.export.targets import LIBRARIES, check_model, load_target, ships_to, target_names
from qat.extensions.targets import coreml, gguf, mlx, nvfp4, shared
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.gguf import dequantize
from qat.models.gguf_header import read_header, read_metadata
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.models.stored_state import quantized_modules
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import linear_names, table_names, with_tables
from qat.quant.spec import PRESETS, LutSpec, PlanRule, QuantPlan, by_group
from qat.quant.weight import pack, to_stored
from qat.ranks import Ranks

# coremltools leaves temporary directories to their finalizers
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")

WIDE = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 32}
EVEN = ("mlx", "compressed-tensors", "gguf", "torchao", "coreml")
"""Targets that hold evenly spaced levels of 4 bits."""
SHIPPED = (*EVEN, "nvfp4", "mxfp4", "modelopt")
PROGRAMS = ("executorch", "onnx", "openvino", "gptq", "awq", "litert", "litertlm", "ane", "coreai")
FP4 = ("nvfp4", "mxfp4", "modelopt")
GROUPED = tuple(name for name in target_names() if name not in ("ane", "coreai"))
"""Targets that hold scales within a row."""


def mixed(to: TargetName, architecture: str = "qwen3", **overrides: object) -> PreTrainedModel:
    """A tiny student of 2 and 4 bits in the formats that a conversion for `to` gives."""
    model = tiny_model(architecture, initializer_range=0.2, **{**WIDE, **overrides})
    plan = PRESETS["q2a4"]
    return converted(
        to, model, with_tables(plan, model, 4) if load_target(to).HOLDS_TABLES else plan
    )


def converted(to: TargetName, model: PreTrainedModel, plan: QuantPlan) -> PreTrainedModel:
    quantize_model(LanguageModel(model), Shipping({to: load_target(to)}).plan(plan, model))
    return model


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> dict[TargetName, Path]:
    """A checkpoint converted for each target."""
    place = tmp_path_factory.mktemp("students")
    torch.set_num_threads(1)
    for to in (*SHIPPED, *PROGRAMS):
        save_checkpoint(mixed(to), tiny_tokenizer(), place / to)
    return {to: place / to for to in (*SHIPPED, *PROGRAMS)}


def library(to: TargetName) -> None:
    pytest.importorskip(LIBRARIES[to][0], exc_type=ImportError)


@pytest.mark.parametrize(
    ("to", "dtype"),
    [
        *((to, "fp16") for to in SHIPPED),
        *((to, "bf16") for to in SHIPPED if to != "coreml"),
        ("mlx", "fp32"),
        ("coreml", "fp32"),
    ],
)
def test_the_targets_library_reads_our_logits(to, dtype, students, tmp_path, capfd) -> None:
    library(to)
    out = tmp_path / "out"
    report = export_model(str(students[to]), ExportConfig(to=to, dtype=dtype), out)
    assert not re.search(r"\d+%\|", capfd.readouterr().err)  # no library's progress bar
    if load_target(to).COMPARED == "bits":
        assert report.logits_max_diff == 0
    is_close = dtype == "fp32" or (dtype == "fp16" and to != "coreml")
    assert report.logits_max_diff < (1e-4 if is_close else 1e-2)
    assert report.bytes > 0 and DTYPES[dtype] == getattr(torch, report.dtype)
    if (out / "config.json").is_file():  # where transformers 4 and programs like it look
        assert json.loads((out / "config.json").read_text())["rope_theta"] == 10000.0
    shown = (out / exported.CARD).read_text()
    assert f"in the form `{to}`" in shown and "DIR" not in shown and "## How to use it" in shown


LEARNED = {
    "levels": LutSpec(bits=4, group_size=16, scale_bits=8),
    "pairs": LutSpec(bits=6, vector_size=2, group_size=16),
    "fours": LutSpec(bits=6, vector_size=4, group_size=16),
    "even": LutSpec(bits=4, codebook="seq", group_size=32, scale_bits=8),
    "integers": LutSpec(bits=4, codebook="int", group_size=32, scale_bits=8),
}
ANY_LEVELS = ("levels", "pairs", "fours")
HELD = dict.fromkeys(("packed", "dense", "coreml"), ANY_LEVELS)
HELD |= {"mlx": ("even",), "onnx": ("even",), "gguf": ("integers",)}


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("to", "form"), [(to, each) for to in HELD for each in HELD[to]])
def test_tables_that_learned_are_exported_as_they_are(to, form, is_tied, tmp_path) -> None:
    if to in LIBRARIES:
        library(to)
    model = tiny_model("llama", tie_word_embeddings=is_tied, initializer_range=0.2)
    plan = QuantPlan(name=form, rules=(PlanRule(pattern="*", spec=LEARNED[form]),))
    tables = dict.fromkeys(table_names(model), LEARNED[form])
    quantize_model(LanguageModel(model), with_tables(plan, model, tables))
    student = train_tables(tmp_path, model)
    report = export_model(str(student), ExportConfig(to=to, dtype="fp32"), tmp_path / "out")
    assert not report.has_float_tables
    sums = load_target(to).COMPARED in ("sums", "constants")
    assert report.logits_max_diff <= (1e-4 if sums else 0)


@pytest.mark.parametrize("to", ["compressed-tensors", "nvfp4", "mxfp4", "modelopt", "torchao"])
def test_each_linear_is_listed_as_quantized_or_as_left(to: TargetName, tmp_path: Path) -> None:
    library(to)
    model = tiny_model(num_hidden_layers=1, **WIDE)
    linears = {*linear_names(model), "lm_head"}
    spec = load_target(to).scheme(LutSpec(bits=4, codebook="int", scale_bits=8), (32, 32))
    plan = QuantPlan(name="mlp", rules=(PlanRule(pattern="*mlp*", spec=spec),))
    quantize_model(LanguageModel(model), plan)
    save_checkpoint(model, None, tmp_path / "student")
    export_model(str(tmp_path / "student"), ExportConfig(to=to, dtype="fp32"), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    left = found["modules_to_not_convert"] if to == "torchao" else found["ignore"]
    assert {*left} == {name for name in linears if "mlp" not in name}
    if to in ("compressed-tensors", "nvfp4", "mxfp4"):
        (group,) = found["config_groups"].values()
        assert {*group["targets"], *left} == linears


@pytest.mark.parametrize("bits", mlx.BITS)
def test_mlx_words_hold_our_weights(bits: int) -> None:
    mx = pytest.importorskip("mlx.core", exc_type=ImportError)
    linear = frozen_linear(8, 128, mlx.scheme(LutSpec(bits=bits, group_size=16), (8, 128)))
    weight = shared.affine(linear)
    words = pack(weight.codes, bits).view(torch.uint32).numpy()
    scales, biases = (shared.exact("it", t, torch.float16) for t in weight[1:])
    arrays = (mx.array(t.float().numpy()) for t in (scales, biases))
    size = linear.spec.group_size
    read = mx.dequantize(mx.array(words), *arrays, group_size=size, bits=bits)
    assert torch.equal(torch.from_numpy(np.array(read)), linear.quantized_weight())


NVFP4_FORMATS = [("e2m1", 4, 32), ("int", 3, 16), ("ternary", 2, 64), ("seq", 1, 16)]


def nvfp4_weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights that compressed-tensors decompresses, by linear."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    settings = QuantizationConfig.model_validate(config)
    compressor = BaseCompressor.get_value_from_registry(settings.format)
    tensors, found = load_file(directory / "model.safetensors"), {}
    for scheme in settings.config_groups.values():
        for name in scheme.targets:
            parts = compressor.compression_param_names(scheme)
            packed = {part: tensors.pop(f"{name}.{part}") for part in parts}
            assert packed["weight_scale"].dtype == torch.float8_e4m3fn
            found[name] = compressor.decompress(packed, scheme)["weight"]
    assert not [key for key in tensors if "weight_" in key]
    return found


@pytest.mark.parametrize(("codebook", "bits", "size"), NVFP4_FORMATS)
def test_nvfp4_is_the_weight_to_the_bit(codebook: str, bits: int, size: int, tmp_path) -> None:
    library("nvfp4")
    spec = LutSpec(bits=bits, codebook=codebook, group_size=size, scale_bits=8)
    model = tiny_quantized("qwen3", spec, **WIDE)
    q_proj = quant_linears(model)["model.layers.0.self_attn.q_proj"]
    with torch.no_grad():
        q_proj.scales[0], q_proj.scales[1] = 0, 2.0**-17
    nvfp4.write(model, None, tmp_path)
    found = nvfp4_weights(tmp_path)
    assert found.keys() == quant_linears(model).keys()
    for name, linear in quant_linears(model).items():
        assert torch.equal(found[name].float(), linear.quantized_weight())


def test_the_names_of_model_optimizer_hold_the_same_numbers(tmp_path: Path) -> None:
    library("modelopt")
    model = tiny_quantized("qwen3", SPECS["e2m1"], **WIDE)
    for to in ("nvfp4", "modelopt"):
        (tmp_path / to).mkdir()
        load_target(to).write(model, None, tmp_path / to)
    found, theirs = (load_file(tmp_path / to / "model.safetensors") for to in ("modelopt", "nvfp4"))
    for name in quant_linears(model):
        assert torch.equal(found.pop(f"{name}.weight"), theirs.pop(f"{name}.weight_packed"))
        octets = found.pop(f"{name}.weight_scale"), theirs.pop(f"{name}.weight_scale")
        assert torch.equal(*(part.view(torch.uint8) for part in octets))
        assert found.pop(f"{name}.weight_scale_2") == 1 / theirs.pop(f"{name}.weight_global_scale")
    assert found.keys() == theirs.keys()
    said = json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text())["quantization"]
    assert said["quant_algo"] == "W4A16_NVFP4" and said["exclude_modules"] == ["lm_head"]


def test_one_factor_of_nvfp4_holds_every_scale_up_to_1_75(tmp_path: Path) -> None:
    """The bytes of 5 exponent and 3 mantissa bits up to there are those of E4M3, 2^8 times less."""
    library("nvfp4")
    model = tiny_quantized("qwen3", SPECS["e2m1"], **WIDE)
    first, *_, last = quant_linears(model).values()
    held = e5m3_values().float()
    held = held[held <= 1.75]
    with torch.no_grad():
        first.scales.view(-1)[: len(held)] = held
    nvfp4.write(model, None, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    factors = {float(value) for key, value in stored.items() if key.endswith("global_scale")}
    assert factors == {2.0**8}
    name = next(name for name, linear in quant_linears(model).items() if linear is first)
    octets = stored[f"{name}.weight_scale"].view(torch.uint8)
    assert torch.equal(octets, to_stored("scales", first.scales_as_stored().by_group(), 8))
    with torch.no_grad():
        last.scales[0, 0] = 1.875
    with pytest.raises(ExportError, match="scale of .* 3.5, .* --lr-scales"):
        nvfp4.write(model, None, tmp_path / "again")
    with torch.no_grad():
        first.scales.clamp_min_(2.0**-10)
    nvfp4.write(model, None, tmp_path)
    assert torch.equal(nvfp4_weights(tmp_path)[name].float(), first.quantized_weight())


GGUF_FORMATS = {
    "Q1_0": [("seq", 1, 128), ("seq", 1, 512)],
    "TQ1_0": [("ternary", 2, 256)],
    "Q2_0": [("int", 2, 64), ("int", 2, 256), ("ternary", 2, 64), ("seq", 1, 64)],
    "Q2_K": [("seq", 2, 256), ("seq", 2, 512)],
    "Q3_K": [("int", 3, 256)],
    "Q4_0": [("int", 4, 32), ("int", 3, 64), ("ternary", 2, 32), ("seq", 1, 32), ("seq", 3, 256)],
    "Q4_1": [("seq", 4, 32), ("seq", 4, 256)],
    "Q5_0": [("int", 5, 32)],
    "Q6_K": [("int", 6, 256), ("int", 6, 512), ("seq", 5, 256)],
    "Q8_0": [("int", 8, 32), ("int", 6, 64), ("seq", 7, 32)],
}


@pytest.mark.parametrize(
    ("kind", "codebook", "bits", "size"),
    [(kind, *one) for kind, formats in GGUF_FORMATS.items() for one in formats],
)
def test_blocks_of_gguf_hold_our_weights(kind: str, codebook: str, bits: int, size: int) -> None:
    pytest.importorskip("gguf")
    spec = LutSpec(bits=bits, codebook=codebook, group_size=size, scale_bits=8)
    linear = frozen_linear(5, 512, spec)
    with torch.no_grad():
        linear.scales[0] = 0  # the smallest weights have scales that round to zero
    found = gguf.block_type(spec)
    blocks = gguf.to_blocks("it", shared.affine(linear), spec).numpy()
    assert found.name == kind
    assert torch.equal(torch.from_numpy(dequantize(blocks, kind)), linear.quantized_weight())


@pytest.mark.parametrize(("codebook", "bits"), [("seq", 1), ("int", 2), ("ternary", 2)])
def test_a_block_of_q1_0_or_q2_0_is_as_ggml_defines_it(codebook: str, bits: int) -> None:
    spec = LutSpec(bits=bits, codebook=codebook, group_size=128 // bits, scale_bits=16)
    linear = frozen_linear(3, 256, spec)
    blocks = gguf.to_blocks("it", shared.affine(linear), spec)
    assert blocks.shape == (3, 256 * bits // 128 * 18)  # 1.125 or 2.25 bits a weight
    expected = []
    for block in blocks.reshape(-1, 18).numpy():
        scale = float(block[:2].view(np.float16)[0])
        codes = [block[2 + i * bits // 8] >> i * bits % 8 & 2**bits - 1 for i in range(128 // bits)]
        expected += [scale * (2 * int(c) - 1 if bits == 1 else int(c) - 1) for c in codes]
    assert torch.equal(torch.tensor(expected).view(3, 256), linear.quantized_weight())


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [("qwen3", "default"), ("llama", "default"), ("llama", "llama3"), ("gemma3", "default")],
)
def test_transformers_reads_our_gguf(architecture: str, rope: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    own = {"query_pre_attn_scalar": 32} if architecture == "gemma3" else {}
    if architecture == "llama":
        own = {"rope_parameters": ROPES[rope], "rms_norm_eps": 1e-3}
    model = mixed("gguf", architecture, **shape, **own)
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "packed")
    out = tmp_path / "out"
    export_model(str(tmp_path / "packed"), ExportConfig(to="gguf"), out)
    read = gguf.read_weights(model, out / gguf.FILE_NAME)
    for name, module in quantized_modules(model).items():
        assert torch.equal(read[f"{name}.weight"], module.quantized_weight())
    if architecture != "gemma3":  # of which it needs a vision tower's config
        theirs = load_model(str(out / gguf.FILE_NAME), device="cpu", dtype="fp32").model
        torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_llama_cpp_computes_our_logits(architecture: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    shape = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    shape |= {"rope_parameters": ROPES["llama3"]} if architecture == "llama" else {}
    model = tiny_model(architecture, initializer_range=0.1, tie_word_embeddings=False, **shape)
    formats = [found[0] for found in GGUF_FORMATS.values()]
    rules = [
        PlanRule(
            pattern=name,
            spec=LutSpec(bits=bits, codebook=codebook, group_size=size, scale_bits=8),
        )
        for name, (codebook, bits, size) in zip(
            ["lm_head", "model.embed_tokens", *linear_names(model)], cycle(formats), strict=False
        )
    ]
    plan = QuantPlan(name="all", rules=tuple(rules))
    quantize_model(LanguageModel(model), plan)
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "packed")
    export_model(str(tmp_path / "packed"), ExportConfig(to="gguf"), tmp_path / "out")
    path = str(tmp_path / "out" / gguf.FILE_NAME)
    llama = llama_cpp.Llama(path, n_ctx=32, logits_all=True, n_threads=1, verbose=False)
    llama.eval(IDS[0].tolist())
    theirs = torch.from_numpy(llama.scores[: IDS.shape[1]].copy())
    ours, theirs = logits(model)[0].log_softmax(-1), theirs.log_softmax(-1)
    spread = (ours.exp() * (ours - ours.mean(-1, keepdim=True))).sum(-1).mean()
    assert (ours.exp() * (ours - theirs)).sum(-1).mean() < 1e-3 < spread / 100
    text = "the cat sat, and 3 dogs saw it"
    assert llama.tokenize(text.encode(), special=True) == tiny_tokenizer()(text).input_ids
    llama.close()


def test_a_tensor_that_is_written_wrong_is_named(students, tmp_path, monkeypatch) -> None:
    pytest.importorskip("gguf")
    own = gguf.to_blocks

    def harmed(name: str, *given: object) -> Tensor:
        blocks = own(name, *given)
        if name.endswith("embed_tokens.scales"):
            blocks[-1, 2] ^= 1  # a row that the few tokens whose logits are compared do not have
        return blocks

    monkeypatch.setattr(gguf, "to_blocks", harmed)
    with pytest.raises(ExportError, match="embed_tokens"):
        export_model(str(students["gguf"]), ExportConfig(to="gguf"), tmp_path / "out")


def test_the_tokenizer_goes_into_a_gguf(students: dict[TargetName, Path], tmp_path, caplog) -> None:
    library = pytest.importorskip("gguf")
    export_model(str(students["gguf"]), ExportConfig(to="gguf"), tmp_path / "out")
    fields = read_metadata(tmp_path / "out" / gguf.FILE_NAME)
    tokens = [token.decode() for token in fields["tokenizer.ggml.tokens"].parts]
    vocabulary = tiny_tokenizer().get_vocab()
    assert {token: tokens.index(token) for token in vocabulary} == vocabulary
    assert fields["tokenizer.ggml.pre"].parts == [b"gpt-2"]
    assert fields["tokenizer.ggml.eos_token_id"].parts == [(vocabulary["<|end|>"],)]
    assert b"<|end|>" in fields["tokenizer.chat_template"].parts[0]
    text = "the cat sat, and 3 dogs saw it\n"
    read = load_tokenizer(str(tmp_path / "out" / gguf.FILE_NAME))
    assert read(text).input_ids == tiny_tokenizer()(text).input_ids
    tokenizer = copy.deepcopy(tiny_tokenizer())
    byte_level = tokenizer.backend_tokenizer.pre_tokenizer
    for digits, expected in (([Digits(individual_digits=True)], True), ([Digits()], False)):
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([*digits, byte_level])
        writer = library.GGUFWriter(None, "llama")
        assert gguf.add_tokenizer(writer, tokenizer, 320) == expected
        if expected:
            assert writer.kv_data[0]["tokenizer.ggml.pre"].value == "smollm"
    regex, whole = ByteLevel(add_prefix_space=False), ByteLevel(False, use_regex=False)
    qwen = Regex(next(iter(gguf.PRE_TOKENIZERS)))
    for steps, expected in (
        (ByteLevel(add_prefix_space=True), None),
        (whole, None),
        (Sequence([Split(qwen, "isolated"), whole]), "qwen2"),
        (Sequence([Split(qwen, "isolated"), regex]), None),
        (Sequence([Split(qwen, "removed"), whole]), None),
        (Sequence([Split(Regex("x+"), "isolated"), whole]), None),
        (Sequence([Digits(individual_digits=True), whole]), None),
        (Sequence([regex, Digits(individual_digits=True)]), None),
    ):
        tokenizer.backend_tokenizer.pre_tokenizer = steps
        values = json.loads(tokenizer.backend_tokenizer.to_str())
        assert gguf.pre_tokenizer(values) == expected
    tokenizer.backend_tokenizer.pre_tokenizer = regex
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert gguf.pre_tokenizer(json.loads(tokenizer.backend_tokenizer.to_str())) is None
    for prefix in ("\u2581", ""):
        model = models.BPE({"<0x61>": 0, "a": 1, "\u2581": 2}, [], byte_fallback=True)
        marked = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
        marked.backend_tokenizer.normalizer = normalizers.Prepend(prefix) if prefix else None
        writer = library.GGUFWriter(None, "llama")
        assert gguf.add_tokenizer(writer, marked, 3)
        assert writer.kv_data[0]["tokenizer.ggml.add_space_prefix"].value == bool(prefix)
    tokenizer.backend_tokenizer.pre_tokenizer = None
    writer = library.GGUFWriter(None, "llama")
    assert not gguf.add_tokenizer(writer, tokenizer, 320)
    assert "none that GGUF files know" in caplog.text


def test_all_chat_templates_and_only_tokens_of_the_table_go_into_a_gguf() -> None:
    library = pytest.importorskip("gguf")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.add_special_tokens({"pad_token": "<|beyond|>"})
    size = tokenizer.pad_token_id
    writer = library.GGUFWriter(None, "llama")
    assert gguf.add_tokenizer(writer, tokenizer, size)
    found = {key: field.value for key, field in writer.kv_data[0].items()}
    assert found["tokenizer.chat_template"] == "plain"
    assert found["tokenizer.chat_template.tool_use"] == "with tools"
    assert found["tokenizer.chat_templates"] == ["tool_use"]
    assert len(found["tokenizer.ggml.tokens"]) == size
    assert "tokenizer.ggml.padding_token_id" not in found
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("to", "spec", "reason"),
    [
        ("mlx", SPECS["lut2"], "codebook is lut"),
        ("mlx", SPECS["seq2"], "groups of 16"),
        ("mlx", LutSpec(bits=7, codebook="int"), "bits=7"),
        ("mlx", SPECS["int4_r3"], "low rank"),
        ("compressed-tensors", SPECS["seq2"], "codebook is seq"),
        ("gguf", SPECS["e2m1"], "codebook is e2m1"),
        ("nvfp4", SPECS["lut2"], "codebook is lut"),
        ("nvfp4", LutSpec(bits=4, codebook="int"), "int of 4 bits"),
        ("nvfp4", SPECS["int3"], "groups of 8"),
        ("nvfp4", SPECS["seq2"], "16 bits"),
        ("mxfp4", LutSpec(bits=4, codebook="e2m1", scale_bits=8), "8 bits"),
        ("gguf", SPECS["int3"], "groups of 8"),
        ("torchao", SPECS["lut2"], "codebook is lut"),
        ("coreml", SPECS["lut2_r4"], "low rank"),
        ("mlx", SPECS["fours8_s8"], "4 weights"),
        ("nvfp4", SPECS["fours8_s8"], "4 weights"),
        ("anemll", SPECS["fours10_r2"], "4 weights"),
        ("coreml", LutSpec(bits=10, vector_size=2), "1024 codewords"),
    ],
)
def test_what_would_lose_is_refused(to: TargetName, spec: LutSpec, reason: str) -> None:
    model = tiny_quantized("qwen3", spec, num_hidden_layers=1)
    how = f"qat convert{' --to q2a4' if spec.vector_size > 1 else ''} --for {to}'"
    with pytest.raises(ExportError, match=f"cannot hold model.*{reason}.*{how}"):
        check_model(to, model)


@pytest.mark.parametrize("to", ["gguf", "compressed-tensors", "onnx"])
def test_ternary_codewords_go_out_as_levels(to: TargetName, tmp_path: Path) -> None:
    library(to)
    spec = LutSpec(bits=5, vector_size=4, codebook="ternary", group_size=64, scale_bits=8)
    model = tiny_quantized("qwen3", spec, **WIDE)
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "student")
    report = export_model(
        str(tmp_path / "student"), ExportConfig(to=to, dtype="fp32"), tmp_path / to
    )
    assert report.logits_max_diff <= (1e-4 if to == "onnx" else 0)
    if to == "gguf":
        header = read_header(tmp_path / to / "model.gguf")
        assert {header[f"blk.0.{name}.weight"].type for name in ("ffn_up", "attn_q")} == {"Q2_0"}
    packed = load_model(str(tmp_path / "student"), device="cpu").model
    assert quant_linears(packed)["model.layers.0.mlp.up_proj"].spec == spec
    with pytest.raises(ExportError, match="drop --for and take --embedding-bits 16"):
        load_target(to).scheme(spec, (64, 64))


def test_adapters_are_refused() -> None:
    model = tiny_adapted("qwen3", LutSpec(bits=2, codebook="int", scale_bits=8))
    for to in SHIPPED:
        with pytest.raises(ExportError, match="adapter .* --to dense"):
            check_model(to, model)


def test_quantized_tables_are_refused() -> None:
    model = tiny_model()
    with_head = with_tables(plan(LutSpec(bits=2, codebook="int"), "*.mlp.*"), model, 8)
    only_head = QuantPlan(name="head", rules=with_head.rules[:1])
    targets = ("compressed-tensors", "torchao", "nvfp4", "modelopt")
    for to in targets:
        with pytest.raises(ExportError, match="embedding and head"):
            Shipping({to: load_target(to)}).plan(with_head, model)
    quantize_model(LanguageModel(model), only_head)
    for to in targets:
        with pytest.raises(ExportError, match="embed_tokens .* quantized table"):
            check_model(to, model)


def plan(spec: LutSpec, pattern: str = "*") -> QuantPlan:
    return QuantPlan(name="mine", rules=(PlanRule(pattern=pattern, spec=spec),))


@pytest.mark.parametrize(
    ("to", "spec", "shape", "reason"),
    [
        ("mlx", LutSpec(bits=7), {}, "mlx cannot hold .*q_proj: .* bits=7"),
        ("gguf", LutSpec(bits=4), {"hidden_size": 48}, "rows of 48 .* groups of 32"),
        ("coreml", SPECS["lut2_r4"], {}, "low rank"),
        ("compressed-tensors", LutSpec(bits=1), {}, "2 bits"),
        ("nvfp4", LutSpec(bits=5), {}, "5 bits"),
        ("nvfp4", LutSpec(bits=4), {"hidden_size": 40}, "rows of 40"),
        ("torchao", SPECS["pairs6"], {}, "torchao cannot hold .*q_proj: .* 2 weights, .*q2a4"),
        ("anemll", SPECS["pairs6"], {}, "anemll cannot hold .*q_proj: .* 2 weights, .*q2a4"),
        ("coreml", LutSpec(bits=10, vector_size=2), {}, "1024 codewords"),
    ],
)
def test_a_plan_that_cannot_be_held_is_refused_before_training(to, spec, shape, reason) -> None:
    with pytest.raises(ExportError, match=reason):
        Shipping({to: load_target(to)}).plan(plan(spec), tiny_model(**shape))


def test_what_stays_quantized_must_be_held_too() -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    shipping = Shipping({"mlx": load_target("mlx")})
    with pytest.raises(ExportError, match="self_attn.q_proj"):
        shipping.plan(plan(LutSpec(bits=2), "*.mlp.*"), model)


def test_a_plan_is_bent_to_its_target() -> None:
    model = tiny_model(**WIDE)
    bent = {}
    for to in SHIPPED:
        rules = Shipping({to: load_target(to)}).plan(PRESETS["q2a4"], model).rules
        specs = {rule.pattern.rsplit(".", 1)[1]: rule.spec for rule in rules}
        assert {spec.scale_bits for spec in specs.values()} == {5 if to == "mxfp4" else 8}
        assert (specs["up_proj"].bits, specs["q_proj"].bits) == (2, 4)
        bent[to] = {n: (specs[n].codebook, specs[n].group_size) for n in ("up_proj", "down_proj")}
    assert bent == {
        "mlx": {"up_proj": ("seq", 32), "down_proj": ("seq", 32)},
        "compressed-tensors": {"up_proj": ("int", 16), "down_proj": ("int", 16)},
        "gguf": {"up_proj": ("int", 64), "down_proj": ("seq", 256)},
        "torchao": {"up_proj": ("seq", 16), "down_proj": ("seq", 16)},
        "coreml": {"up_proj": ("lut", 16), "down_proj": ("lut", 16)},
        "nvfp4": {"up_proj": ("seq", 16), "down_proj": ("seq", 16)},
        "mxfp4": {"up_proj": ("seq", 32), "down_proj": ("seq", 32)},
        "modelopt": {"up_proj": ("seq", 16), "down_proj": ("seq", 16)},
    }


def test_a_plan_takes_the_type_of_ggml_that_fits_its_rows() -> None:
    for bits, codebook, width, expected in (
        (2, "lut", 512, "Q2_K"),
        (2, "lut", 576, "Q2_0"),
        (2, "lut", 288, "Q4_0"),
        (2, "int", 512, "Q2_0"),
        (2, "ternary", 512, "TQ1_0"),
        (2, "ternary", 576, "Q2_0"),
        (3, "lut", 512, "Q3_K"),
        (3, "lut", 576, "Q4_0"),
        (1, "lut", 512, "Q1_0"),
        (1, "lut", 576, "Q2_0"),
        (1, "lut", 288, "Q4_0"),
    ):
        found = gguf.scheme(LutSpec(bits=bits, codebook=codebook), (8, width))
        kind = gguf.block_type(found)
        assert (kind.name, found.bits, found.scale_bits) == (expected, bits, 8)
        assert found.group_size == kind.size and gguf.lost(found, (8, width)) is None


@pytest.mark.parametrize(
    ("preset", "names"),
    [
        ("q2a4", ("gguf", "mlx")),
        ("q2a4", tuple(n for n in GROUPED if n not in (*FP4, "executorch"))),
        ("q2a2", tuple(n for n in GROUPED if n != "mxfp4")),
        ("q2a4", ("executorch", "torchao", "compressed-tensors", "packed")),
    ],
)
def test_a_plan_is_bent_to_what_all_its_targets_hold(preset, names) -> None:
    model = tiny_model(**WIDE)
    shipping = Shipping({name: load_target(name) for name in names})
    bent = shipping.plan(PRESETS[preset], model)
    assert bent.name == f"{preset}_{'_'.join(names)}"
    quantize_model(LanguageModel(model), bent)
    for name in names:
        check_model(name, model)
    wished = {int(bits) for bits in preset[1::2]}
    assert {m.spec.bits for m in quantized_modules(model).values()} == wished


def test_learned_levels_and_vectors_stay_where_all_targets_hold_them() -> None:
    model = tiny_model(**WIDE)
    for names, rows in ((("ane", "coreai"), 16), (("packed", "coreml"), 0)):
        several = Shipping({name: load_target(name) for name in names})
        for rule in several.plan(PRESETS["q2a2"], model).rules:
            assert (rule.spec.codebook, rule.spec.table_rows) == ("lut", rows)
    given = {name: spec for name, spec in PRESETS["v2a4"].assign(linear_names(model)).items()}
    targets = {name: load_target(name) for name in ("packed", "dense", "coreml")}
    bent = Shipping(targets).plan(PRESETS["v2a4"], model)
    for rule in bent.rules:
        wished = {"level_bits": 16, "scale_bits": 8}
        assert rule.spec == given[rule.pattern].model_copy(update=wished)
    targets["gguf"] = load_target("gguf")
    with pytest.raises(ExportError, match="^gguf cannot hold .*gate_proj"):
        Shipping(targets).plan(PRESETS["v2a4"], model)


def test_two_targets_without_a_common_format_are_named() -> None:
    wide = {"hidden_size": 64, "intermediate_size": 128 * 65, "num_hidden_layers": 1}
    model = tiny_model(**wide)
    targets = {name: load_target(name) for name in ("packed", "anemll", "mlx")}
    with pytest.raises(ExportError, match="^anemll and mlx .* 2 bits .*down"):
        Shipping(targets).plan(PRESETS["q2a4"], model)


@pytest.mark.parametrize(
    ("names", "most"),
    [(("mlx", "gguf"), 2.5), (("gguf", "onnx"), 2.25), (("torchao", "onnx"), 2.5)],
)
def test_targets_agree_on_the_smallest_format_in_any_order(names, most: float) -> None:
    ways = [Shipping({name: load_target(name) for name in order}) for order in permutations(names)]
    for bits, shape in product((2, 3, 4), ((576, 576), (64, 1024))):
        found = {way.bend("weight", by_group(bits, 16), shape) for way in ways}
        assert len(found) == 1
        if bits == 2:
            assert ways[0].stored_bits(*found, shape) <= most * math.prod(shape)


def test_a_checkpoint_says_where_it_goes_without_its_weights(students, tmp_path) -> None:
    def lacking(directory: Path, **how: bool) -> dict[str, str]:
        for weights in directory.glob("*.safetensors"):
            weights.unlink()
        return {name: lack.reason for name, lack in ships_to(directory, **how).items() if lack}

    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), None, tmp_path / "lut")
    lut = "its codebook is lut"
    assert lacking(tmp_path / "lut") == {
        "ane": "it has a scale for each 16 features of a row",
        "coreai": "it has a scale for each 16 features of a row",
        "mlx": lut,
        "compressed-tensors": lut,
        "gguf": lut,
        "torchao": lut,
        "executorch": lut,
        "onnx": lut,
        "gptq": lut,
        "awq": lut,
        "litert": lut,
        "litertlm": lut,
        **dict.fromkeys(FP4, lut),
    }
    assert "holds no adapters" in lacking(tmp_path / "lut", adapters=True).values()
    copied = shutil.copytree(students["mlx"], tmp_path / "mlx")
    assert lacking(copied)["compressed-tensors"] == "its codebook is seq"
    assert "mlx" not in lacking(copied)


def test_levels_of_16_bits_stay_so_while_they_learn() -> None:
    spec = LutSpec(bits=2, group_size=8, scale_bits=8, level_bits=16)
    linear = latent_linear(6, 16, spec)
    with torch.no_grad():
        linear.codebook += torch.rand(4) * 1e-3
    levels = linear.quantized().codebook
    assert torch.equal(levels, levels.half().float()) and not torch.equal(levels, linear.codebook)
    x = torch.randn(3, 16)
    y = linear(x)
    assert torch.equal(y, x @ linear.quantized_weight().T)
    y.square().sum().backward()
    assert linear.codebook.grad.abs().sum() > 0


def test_numbers_that_a_dtype_does_not_hold_are_refused() -> None:
    with pytest.raises(ExportError, match="0.1, .* bf16"):
        shared.exact("it", torch.tensor([1.0, 0.1], dtype=torch.float64), torch.bfloat16)
    model = tiny_quantized("qwen3", LutSpec(bits=2, codebook="seq"))  # scales of 16 bits
    with pytest.raises(ExportError, match="q_proj.biases .* fp16"):
        mlx.write(as_dtype(model, "fp16"), None, Path("nowhere"))


def as_dtype(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """The same model with its float tensors in `dtype`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    return model


def test_core_ml_has_no_bfloat16(students: dict[TargetName, Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="bf16, .* --dtype fp16"):
        export_model(str(students["coreml"]), ExportConfig(to="coreml", dtype="bf16"), tmp_path)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}
GEMMA = {
    "hidden_size": 96,  # its root is no bfloat16
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 100,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 3e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    },
}


@pytest.mark.parametrize(
    ("to", "architecture", "settings", "is_tied"),
    [
        *(
            ("mlx", kind, {"rope_parameters": r, "num_hidden_layers": 1}, kind == "llama")
            for kind, r in zip(("llama", "qwen3", "llama", "qwen3"), ROPES.values(), strict=True)
        ),
        *(
            ("coreml", "llama", {"rope_parameters": ROPES[n], "num_hidden_layers": 1}, tied)
            for n, tied in (("default", True), ("llama3", False))
        ),
        *(
            (to, "gemma3", GEMMA, bool(i & 1))
            for i, to in enumerate(("mlx", "compressed-tensors", "torchao", "nvfp4"))
        ),
    ],
)
def test_the_rotary_settings_of_real_models_are_kept(
    to: TargetName, architecture: str, settings: dict, is_tied: bool, tmp_path: Path
) -> None:
    """None of them has the settings that a library takes when its own name for them is missing."""
    library(to)
    model = mixed(to, architecture, tie_word_embeddings=is_tied, **settings)
    save_checkpoint(model, None, tmp_path / "student")
    export_model(str(tmp_path / "student"), ExportConfig(to=to, dtype="fp32"), tmp_path / "out")


def test_only_rounding_to_the_dtype_is_let_pass(students, monkeypatch) -> None:
    model = load_checkpoint(students["coreml"], torch.float16)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        weights = dense_state_dict(model, torch.float16)
        rounded = parts.logits_of(parts.float_model(model, weights, torch.float32), ids)
    monkeypatch.setattr(exported, "probe_ids", lambda _: ids)
    monkeypatch.setattr(coreml, "read_logits", lambda *_: rounded)
    assert exported.check_equal("coreml", model, Path()) == 0
    monkeypatch.setattr(coreml, "read_logits", lambda *_: rounded + 1)
    with pytest.raises(ExportError, match="export --to dense"):
        exported.check_equal("coreml", model, Path())


def deep_with_outliers(to: TargetName, architecture: str) -> PreTrainedModel:
    """A student of many layers, some of whose channels are large, as those of real models are."""
    torch.manual_seed(0)
    model = tiny_model(
        architecture, initializer_range=0.1, **WIDE, num_hidden_layers=8, tie_word_embeddings=False
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :2] *= 40
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[2] *= 20
    return converted(to, model, PRESETS["q2a4"])


@pytest.mark.parametrize(
    ("to", "dtype"), [("mlx", "fp32"), pytest.param("coreml", "fp16", marks=pytest.mark.slow)]
)
def test_of_a_deep_model_with_outliers_only_wrong_files_are_refused(to, dtype, tmp_path) -> None:
    library(to)
    model = as_dtype(deep_with_outliers(to, "llama"), dtype)
    write_wrong(to, model, {}, tmp_path / "right")
    assert exported.check_equal(to, model, tmp_path / "right") > 0
    for what in ({"rope_theta": 2e4}, {"head": 1}):
        write_wrong(to, model, what, tmp_path / "wrong")
        with pytest.raises(ExportError, match="other logits"):
            exported.check_equal(to, model, tmp_path / "wrong")
        shutil.rmtree(tmp_path / "wrong")


def write_wrong(to: TargetName, model: PreTrainedModel, what: dict, directory: Path) -> None:
    """Write a model that differs in one setting, as the target would write it."""
    other = copy.deepcopy(model)
    if "rope_theta" in what:
        other.config.rope_parameters["rope_theta"] = what["rope_theta"]
        other.model.rotary_emb = type(other.model.rotary_emb)(other.config)
    if "head" in what:  # rows of two words change places
        weight = other.lm_head.weight.data
        weight[[0, what["head"]]] = weight[[what["head"], 0]]
    directory.mkdir()
    load_target(to).write(other, None, directory)


def test_the_dtype_is_what_the_target_holds(tmp_path: Path) -> None:
    pytest.importorskip("coremltools")
    torch.manual_seed(0)
    one = {"num_hidden_layers": 1}
    short, free = mixed("coreml", **one), tiny_quantized("qwen3", SPECS["lut2"], **one)
    short, free = as_dtype(short, "bf16"), as_dtype(free, "bf16")
    for linear in quant_linears(free).values():
        linear.codebook.data = linear.codebook.data.float() + 1e-5  # no fp16 number
    for name, student, found in (("short", short, "float16"), ("free", free, "float32")):
        save_checkpoint(student, None, tmp_path / name)
        report = export_model(str(tmp_path / name), ExportConfig(to="coreml"), tmp_path / found)
        assert (report.dtype, report.saved_dtype) == (found, "bfloat16")
        config = json.loads((tmp_path / found / "config.json").read_text())
        assert (
            config["dtype"] == found
            and f"| {found} |" in (tmp_path / found / exported.CARD).read_text()
        )
    with pytest.raises(ExportError, match="fp16 number, .* --dtype fp32"):
        export_model(
            str(tmp_path / "free"), ExportConfig(to="coreml", dtype="fp16"), tmp_path / "x"
        )


@pytest.mark.parametrize(
    ("to", "architecture", "settings", "reason"),
    [
        ("coreml", "gemma3", {}, "model_type=gemma3_text"),
        ("gguf", "llama", {"rope_parameters": ROPES["linear"]}, "rope_type=linear"),
        ("coreml", "llama", {"rope_parameters": ROPES["dynamic"]}, "rope_type=dynamic"),
        ("coreml", "llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("gguf", "llama", {"hidden_act": "gelu"}, "is gelu"),
        ("gguf", "gemma3", {**GEMMA, "rope_parameters": None}, "layer 2"),
        ("gguf", "gemma3", {"query_pre_attn_scalar": 100}, "root of 32"),
        ("mlx", "gemma3", {}, "full attention"),
        ("mlx", "qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    ],
)
def test_unknown_architectures_are_refused(to, architecture, settings, reason) -> None:
    library(to)
    built = tiny_model(architecture, **settings)
    with pytest.raises(ExportError, match=reason):
        load_target(to).check(built)
    built.config.model_type = "other"
    with pytest.raises(ExportError, match="model_type=other"):
        load_target(to).check(built)


def test_a_missing_library_is_named_with_its_extra(students, tmp_path, monkeypatch) -> None:
    for to, (library, extra) in LIBRARIES.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            with pytest.raises(ExportError, match=rf"^{library} .*run: .*\[{extra}\]"):
                export_model(str(students[to]), ExportConfig(to=to, dtype="fp32"), tmp_path / "out")
            if to == "awq":  # a library would not help a student that does not fit
                with pytest.raises(ExportError, match="^awq cannot hold"):
                    export_model(str(students["ane"]), ExportConfig(to=to), tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


SHORT = {"level_bits": 16}
INTEGERS = {"int8": LutSpec(bits=8, codebook="int", group_size=32, scale_bits=8)}
"""Integers of 8 bits, which need no table."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "fp16") for name in ("lut1", "seq2", "ternary", "e2m1", "int3_s8", "pairs6")),
        ("lut2", "fp32"),
        ("fours8_s8", "fp32"),
        ("int8", "fp16"),
        ("int8", "fp32"),
    ],
)
def test_core_ml_tables_hold_our_weights(name: str, dtype: str) -> None:
    pytest.importorskip("coremltools")
    from coremltools.converters.mil import Builder as mb

    from qat.extensions.targets import coreml_program

    linear = frozen_linear(6, 64, INTEGERS.get(name) or SPECS[name].model_copy(update=SHORT))
    with torch.no_grad():
        linear.codebook.copy_(linear.levels())
    table = coreml._lookup("it", linear, DTYPES[dtype])
    assert (table.lut is None) == (name in INTEGERS)

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=coreml_program.OPSET)
    def program(x):
        return mb.add(x=mb.cast(x=x, dtype=dtype), y=coreml_program.lookup(table, "it"))

    found = coreml_program.read_weights(program)["it"]
    assert torch.equal(torch.from_numpy(found), linear.quantized_weight(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_core_ml_program_reads_codewords(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("coremltools")
    model = tiny_quantized("llama", SPECS["fours8_s8"], num_hidden_layers=1)
    save_checkpoint(model, None, tmp_path / "student")
    report = export_model(
        str(tmp_path / "student"), ExportConfig(to="coreml", dtype=dtype), tmp_path / "out"
    )
    assert report.logits_max_diff < (1e-4 if dtype == "fp32" else 1e-1)
    shown = (tmp_path / "out" / exported.CARD).read_text()
    assert "| 7 | 2 | lut, 256 codewords of 4 weights | one of 8 bits for 16 weights" in shown


def test_a_core_ml_program_with_biases_and_a_head_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("coremltools")
    shape = {"attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 1}
    model = mixed("coreml", "llama", **shape)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.bias.normal_()
    coreml.write(model, None, tmp_path)
    found = coreml.read_logits(model, tmp_path, IDS[:1])
    torch.testing.assert_close(found, logits(model)[:1], rtol=1e-4, atol=1e-4)


def test_other_weights_are_noticed(students: dict[TargetName, Path], tmp_path: Path) -> None:
    pytest.importorskip("coremltools")
    model = load_checkpoint(students["coreml"], torch.float32)
    coreml.write(model, None, tmp_path)
    linear = next(iter(quant_linears(model).values()))
    with torch.no_grad():
        linear.scales *= 2
    with pytest.raises(ValueError, match="q_proj_weight"):
        coreml.read_logits(model, tmp_path, IDS[:1])


def test_the_verbs_convert_for_targets_and_export_to_them(tmp_path: Path, capsys) -> None:
    pytest.importorskip("gguf")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    tiny_model(initializer_range=0.2, **small).save_pretrained(tmp_path / "float")
    tiny_tokenizer().save_pretrained(tmp_path / "float")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog saw the cat\n" * 40)
    source, student, out = (str(tmp_path / name) for name in ("float", "student", "out"))
    words = ["convert", source, "--for", "gguf,mlx", "--bits-budget", "3.5", "--group-size", "64"]
    words += ["--calibration", str(text), "--calibration-length", "32", "--out", student]
    words += ["--embedding-bits", "16"]
    found = run_verb(words)
    assert found["plan"] == "mixed-3.5-of-linears_gguf_mlx"
    assert found["budget_bits_per_weight"] <= 3.5
    assert {"gguf", "mlx"} < set(found["ships_to"]) and "anemll" not in found["ships_to"]
    said = " ".join(capsys.readouterr().out.split())
    assert "; anemll: has one LUT size for all linears of " in said
    assert not ships_to(Path(student))["anemll"].is_format  # --for anemll would not help
    shipped = run_verb(["export", student, "--to", "gguf", "--out", out])
    assert shipped["logits_equal"] and shipped["logits_max_diff"] == 0
    with pytest.raises(ConfigError, match="--for .* --from"):
        run_verb(["convert", source, "--from", "anemll", "--for", "gguf", "--out", out])
    with pytest.raises(ExportError, match="gguf .* rows of 48"):
        tiny_model(hidden_size=48).save_pretrained(tmp_path / "odd")
        tiny_tokenizer().save_pretrained(tmp_path / "odd")
        run_verb(["convert", str(tmp_path / "odd"), "--to", "q2a2", "--for", "gguf", "--out", "x"])
    assert not Path("x").exists()


def test_parameters_move_to_where_torch_puts_them() -> None:
    model = tiny_model(tie_word_embeddings=True)
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        room = torch.empty(parameter.numel() + 3)
        room[3:] = parameter.detach().flatten()
        parameter.data = room[3:].view_as(parameter)
    assert any(parameter.data_ptr() % 64 for parameter in model.parameters())
    parts.align(model)
    assert not any(parameter.data_ptr() % 64 for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("family", "site"),
    [
        ("Qwen3MoeForCausalLM", "model.layers.0.mlp.experts keeps experts in one tensor"),
        ("GPT2LMHeadModel", r"transformer.h.0.attn.c_\w+ keeps its weight transposed"),
    ],
)
def test_weights_that_are_not_those_of_linears_stay_packed_or_dense(tmp_path, family, site) -> None:
    families.saved(family, tmp_path / "float")
    student = load_model(str(tmp_path / "float"), device="cpu")
    for to in set(target_names()) - {"packed", "dense"}:
        with pytest.raises(ExportError, match=f"{to} cannot hold {family}: {site}"):
            Shipping({to: load_target(to)}).plan(PRESETS["q2a4"], student.model)
    quantize_model(student, PRESETS["q2a4"])
    save_checkpoint(student.model, tiny_tokenizer(), tmp_path / "packed")
    lacks = ships_to(tmp_path / "packed")
    assert [name for name, lack in lacks.items() if lack is None] == ["packed", "dense"]
    with pytest.raises(ExportError, match=f"mlx cannot hold {family}: {site}"):
        export_model(str(tmp_path / "packed"), ExportConfig(to="mlx"), tmp_path / "mlx")
    export_model(str(tmp_path / "packed"), ExportConfig(to="dense"), tmp_path / "dense")


EXTRAS = (
    "coremltools", "gguf", "mlx", "mlx_lm", "compressed_tensors", "torchao", "executorch", "peft",
    "onnx", "onnxruntime", "openvino", "auto_round",
)  # fmt: skip


def test_what_a_student_ships_to_is_known_without_the_libraries_of_targets(
    students: dict, tmp_path: Path
) -> None:
    def act(ranks: Ranks) -> list[str]:
        for name in [*sys.modules]:
            if name.partition(".")[0] in EXTRAS:
                sys.modules[name] = None
            elif name.startswith(("qat.export", "qat.extensions.anemll")):
                del sys.modules[name]
        sys.modules |= dict.fromkeys(EXTRAS)
        return [*import_module("qat.export.targets").ships_to(students["mlx"])]

    assert run_ranks(1, act, tmp_path) == [[*target_names()]]
