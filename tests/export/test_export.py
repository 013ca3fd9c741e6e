"""Exported models: equal logits after reload, for every form, spec and dtype."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from covering import covering
from quantized import KINDS, SPECS, latent_linear, tiny_adapted, tiny_quantized
from safetensors.torch import load_file
from tiny import ARCHITECTURES, logits, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat.backend.base import DTYPES
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.dense import dense_state_dict
from qat.export.dense import write as write_dense
from qat.export.model import check_equal, export_model
from qat.models.attention import kv_spec
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.cost import linear_bits, parameter_count
from qat.models.document_attention import quantize_kv
from qat.models.load import load_model
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import linear_names, replace_module
from qat.quant.spec import KvSpec, LutSpec


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize(
    ("name", "dtype"), covering(KINDS, [torch.bfloat16, torch.float32, torch.float16])
)
def test_dense_logits_equal_packed_logits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    one_layer = tiny_quantized("qwen3", SPECS[name], num_hidden_layers=1)
    save_checkpoint(one_layer, None, tmp_path / "packed")
    packed = load_checkpoint(tmp_path / "packed", dtype)
    write_dense(packed, None, tmp_path / "dense", dtype)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto")
    assert dense.dtype == dtype
    assert not quant_linears(dense)
    assert torch.equal(logits(dense), logits(packed))


@pytest.mark.parametrize(
    ("architecture", "tied"), [*zip(ARCHITECTURES, itertools.cycle([True, False]))]
)
def test_every_architecture_exports_dense(architecture: str, tied: bool, tmp_path: Path) -> None:
    bias = {} if architecture == "gemma3" else {"attention_bias": True}
    model = tiny_quantized(architecture, SPECS["lut3"], tie_word_embeddings=tied, **bias)
    model.generation_config.max_new_tokens = 5
    write_dense(model, tiny_tokenizer(), tmp_path / "dense", torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(dense), logits(model))
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    assert ("lm_head.weight" in load_file(tmp_path / "dense/model.safetensors")) != tied
    assert dense.generation_config.max_new_tokens == 5
    assert AutoTokenizer.from_pretrained(tmp_path / "dense").eos_token == "<|end|>"


def test_a_latent_model_exports_what_it_computes(tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    for name in linear_names(model):
        old = model.get_submodule(name)
        latent = latent_linear(old.out_features, old.in_features, SPECS["lut2"])
        replace_module(model, name, latent.eval())
    write_dense(model, None, tmp_path / "dense", torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(dense), logits(model))


@pytest.mark.parametrize("is_quantized", [True, False])
def test_overflow_in_fp16_is_refused(is_quantized: bool, tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    layer = model.model.layers[0]
    with torch.no_grad():
        if is_quantized:
            layer.mlp.up_proj.codebook[-1] = 1e8
        else:
            layer.input_layernorm.weight[3] = 70000.0
    culprit = "mlp.up_proj" if is_quantized else "input_layernorm"
    with pytest.raises(ExportError, match=rf"layers.0.{culprit}.weight .* 6.55e\+04"):
        write_dense(model, None, tmp_path / "dense", torch.float16)
    assert list(tmp_path.iterdir()) == []
    dense_state_dict(model, torch.bfloat16)


@pytest.mark.parametrize(
    ("to", "dtype"),
    [("packed", "auto"), ("packed", "bf16"), *(("dense", d) for d in ("auto", "fp16", "fp32"))],
)
def test_export_reads_back_what_it_wrote(to: str, dtype: str, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = export_model(str(packed), ExportConfig(to=to, dtype=dtype), out)
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert reloaded.dtype == DTYPES.get(dtype, torch.float32)
    assert torch.equal(logits(reloaded), logits(load_checkpoint(packed, reloaded.dtype)))
    assert report.bytes == (out / "model.safetensors").stat().st_size
    assert report.bits_per_weight == 8 * report.bytes / parameter_count(reloaded)
    if to == "packed":
        assert 2 < report.linear_bits < 4
    else:
        assert report.linear_bits == 8 * reloaded.dtype.itemsize
    assert report.source_megabytes is None  # nothing says what it was made from
    assert (out / "tokenizer.json").is_file()


def test_bits_of_linears_are_those_of_the_file_that_is_written(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    spec = LutSpec(bits=4, codebook="int", group_size=64, scale_bits=8)
    for name, sizes in (("llama", {}), ("qwen3", {"attention_bias": True})):
        model = tiny_quantized(name, spec, hidden_size=64, intermediate_size=64, **sizes)
        save_checkpoint(model, None, tmp_path / name)
        expected = {"packed": linear_bits(model), "gguf": 4 + 16 / 32, "dense": 16}
        assert expected["packed"] < 4.5  # scales of 8 bits, which Q4_0 does not have
        for to, bits in expected.items():
            out = tmp_path / f"{name}_{to}"
            found = export_model(str(tmp_path / name), ExportConfig(to=to), out)
            assert found.linear_bits == pytest.approx(bits), to


@pytest.mark.parametrize(
    ("to", "dtype"), [("packed", "bf16"), ("packed", "fp32"), ("dense", "fp16"), ("dense", "bf16")]
)
def test_adapters_are_merged_by_dense_and_kept_by_packed(to: str, dtype: str, tmp_path) -> None:
    save_checkpoint(tiny_adapted("qwen3", SPECS["lut2"]), None, tmp_path / "student")
    out = tmp_path / "out"
    report = export_model(str(tmp_path / "student"), ExportConfig(to=to, dtype=dtype), out)
    expected = logits(load_checkpoint(tmp_path / "student", DTYPES[dtype]))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out, dtype="auto")), expected)
    has_adapters = any("lora" in name for name in load_file(out / "model.safetensors"))
    config = json.loads((out / "config.json").read_text())
    assert has_adapters == ("quantization_config" in config) == (to == "packed")
    assert to == "dense" or report.linear_bits > 3 + 16 * 3 * 2 / 64


def test_keys_and_values_are_kept_by_packed_alone(tmp_path: Path, caplog) -> None:
    model = tiny_quantized("qwen3", SPECS["lut4"], initializer_range=0.3)
    quantize_kv(model, KvSpec(bits=4))
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "in")
    for to, kept in (("packed", KvSpec(bits=4)), ("dense", None)):
        export_model(str(tmp_path / "in"), ExportConfig(to=to), tmp_path / to)
        assert kv_spec(load_model(str(tmp_path / to), device="cpu").model.config) == kept
        warned = (
            "dense holds no format of keys and values, which this model was trained to have in 4"
        )
        assert (warned in caplog.text) == (to == "dense")


def test_a_run_exports_its_checkpoint_without_the_trainer(packed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    packed.rename(run / "checkpoints/step-000003")
    (run / "checkpoints/step-000003/trainer").mkdir()
    (run / "latest").write_text("checkpoints/step-000003")
    export_model(str(run), ExportConfig(to="packed"), tmp_path / "out")
    assert not (tmp_path / "out/trainer").exists()


def test_other_logits_are_noticed(packed: Path, tmp_path: Path) -> None:
    model = load_checkpoint(packed)
    write_dense(model, None, tmp_path / "dense", torch.float32)
    check_equal("dense", model, tmp_path / "dense")
    with torch.no_grad():
        model.model.norm.weight[0] += 0.01
    with pytest.raises(ExportError, match="gives other logits"):
        check_equal("dense", model, tmp_path / "dense")
    (tmp_path / "dense/model.safetensors").write_bytes(b"")
    with pytest.raises(ExportError, match="cannot be read back"):
        check_equal("dense", model, tmp_path / "dense")


def test_what_prepares_images_stays_beside_the_model(packed: Path, tmp_path: Path) -> None:
    (packed / "preprocessor_config.json").write_text('{"size": 3}', encoding="utf-8")
    save_checkpoint(load_checkpoint(packed), tiny_tokenizer(), tmp_path / "again")
    for to in ("packed", "dense"):
        export_model(str(tmp_path / "again"), ExportConfig(to=to), tmp_path / "out" / to)
        copy = tmp_path / "out" / to / "preprocessor_config.json"
        assert json.loads(copy.read_text(encoding="utf-8")) == {"size": 3}
