"""Students whose keys and values are kept in few bits: one function in every path."""

import json
from pathlib import Path

import families
import pytest
import torch
from quantized import SPECS, gradients, tiny_quantized
from tiny import edited, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from qat.errors import CheckpointError, ConfigError
from qat.models.attention import kv_spec
from qat.models.checkpoint import load_checkpoint, load_skeleton, save_checkpoint, write_model
from qat.models.document_attention import quantize_kv, set_kv
from qat.models.hf_quantizer import FORMAT
from qat.models.language_model import LanguageModel
from qat.models.regions import Regions
from qat.quant.kv import fake_quantize_heads
from qat.quant.spec import KvSpec

IDS = torch.arange(2 * 7).view(2, 7) * 11 % 320
POSITIONS = (torch.arange(7) % 4).expand(2, 7)


def student(architecture: str = "qwen3", bits: int = 4, **overrides: object) -> PreTrainedModel:
    model = tiny_quantized(architecture, SPECS["lut4"], initializer_range=0.3, **overrides)
    quantize_kv(model, KvSpec(bits=bits))
    return model


def textbook(model: PreTrainedModel, bits: int) -> Tensor:
    """The hidden states of a Llama, its attention written out."""
    body, config = model.model, model.config
    x, S = body.embed_tokens(IDS), IDS.shape[1]
    angles = body.rotary_emb(x, torch.arange(S)[None])
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    for layer in body.layers:
        part, h = layer.self_attn, layer.input_layernorm(x)
        split = [p(h).unflatten(-1, (-1, part.head_dim)).transpose(1, 2) for p in _qkv(part)]
        query, key = apply_rotary_pos_emb(*split[:2], *angles)
        key, value = (fake_quantize_heads(each, bits) for each in (key, split[2]))
        key, value = (each.repeat_interleave(query.shape[1], 1) for each in (key, value))
        scores = (query @ key.mT * part.scaling).masked_fill(~seen, -torch.inf)
        x = x + part.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    assert config.num_key_value_heads == 1
    return body.norm(x)


def _qkv(part: torch.nn.Module) -> tuple:
    return part.q_proj, part.k_proj, part.v_proj


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_attention_reads_rounded_keys_and_values(bits: int) -> None:
    model = student("llama", bits)
    expected, plain = textbook(model, bits), tiny_quantized("llama", SPECS["lut4"])
    positions = torch.arange(7).expand(2, 7)
    found = LanguageModel(model).hidden(IDS, positions, is_packed=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.model(IDS).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
    assert kv_spec(model.config) == KvSpec(bits=bits) and kv_spec(plain.config) is None
    set_kv(model, None)
    assert not torch.allclose(model.model(IDS).last_hidden_state, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_compiled_regions_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: compiled(*a, **k, backend="eager"))
    torch.compiler.reset()
    model = LanguageModel(student())
    expected, expected_gradients = gradients(model, IDS, POSITIONS)
    way = Regions(model.model, is_compiled=True, recompute_every=1)
    way.install()
    found, found_gradients = gradients(model, IDS, POSITIONS)
    way.remove()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    names = [name for name in expected_gradients if ".k_proj." in name or ".v_proj." in name]
    assert names and found_gradients.keys() == expected_gradients.keys()
    for name, value in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], value, rtol=1e-3, atol=1e-4)
    assert all(expected_gradients[name].any() for name in names)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_saved_and_opened_to_the_bit(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(student(architecture), tiny_tokenizer(), tmp_path / "first")
    model = load_checkpoint(tmp_path / "first", dtype)
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["quantization_config"]["kv"] == {"bits": 4}
    assert "qat-kv4" not in json.dumps(values)
    for again in (
        load_checkpoint(tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"),
    ):
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert kv_spec(again.config) == KvSpec(bits=4)
    assert kv_spec(load_skeleton(tmp_path / "out").config) == KvSpec(bits=4)
    with pytest.raises(CheckpointError, match="attends by 'eager', expected 'sdpa'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")


def test_a_float_model_is_kept_too(tmp_path: Path) -> None:
    model = tiny_model()
    quantize_kv(model, KvSpec(bits=8))
    write_model(model, None, tmp_path)
    again = load_checkpoint(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    with edited(tmp_path) as values:
        settings = {"features": ["kv"], "format": FORMAT, "kv": {"bits": 8}, "modules": {}}
        assert values["quantization_config"] == settings | {"quant_method": "qat"}
        values["quantization_config"]["kv"] = {"bits": 3}
    with pytest.raises(CheckpointError, match="kv of quantization_config: bits"):
        load_skeleton(tmp_path)


def test_transformers_generates_the_tokens_of_whole_forwards() -> None:
    for architecture in ("qwen3", "gemma3"):
        model = student(architecture, sliding_window=4)
        told = IDS[:, :5]
        for _ in range(10):
            with torch.no_grad():
                following = model(told).logits[:, -1].argmax(-1, keepdim=True)
            told = torch.cat([told, following], 1)
        settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        said = model.generate(IDS[:, :5], attention_mask=torch.ones(2, 5), **settings)
        assert torch.equal(said, told)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM keeps latent vectors"),
        ("MambaForCausalLM", "MambaForCausalLM attends by"),
        ("Lfm2ForCausalLM", "2 of the 4 layers of Lfm2ForCausalLM keep keys and values of heads"),
        ("BloomForCausalLM", "BloomForCausalLM attends by 'eager'"),
        ("GptOssForCausalLM", "GptOssForCausalLM attends by 'eager'"),
    ],
)
def test_what_keeps_something_else_is_refused(family: str, said: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=said):
        quantize_kv(families.build(family), KvSpec(bits=4))


def test_layers_that_share_keys_and_values_round_them_alike() -> None:
    model = families.build("Gemma3nForCausalLM")
    plain = model(IDS).logits
    quantize_kv(model, KvSpec(bits=8))
    found = model(IDS).logits
    assert 0 < (found - plain).abs().max() < 0.1 * plain.abs().max()


def test_sparse_attention_and_odd_heads_are_refused() -> None:
    model = tiny_model()
    model.config.nsa = {"mode": "merged"}
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM with sparse attention"):
        quantize_kv(model, KvSpec(bits=4))
