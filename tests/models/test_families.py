"""Families of other names and parts: convert, open again, and learn."""

from pathlib import Path

import pytest
import torch
from tiny import VOCAB, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma3Config,
    GPTJConfig,
    GPTNeoXConfig,
    Lfm2Config,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from qat.convert.config import ConvertConfig
from qat.convert.convert import convert_checkpoint
from qat.errors import ConfigError
from qat.models.load import load_model
from qat.nn.step import quant_linears
from qat.nn.swap import decoder_layers, linear_names
from qat.quant.spec import role_of
from qat.train.optim import linears_in_scope

WORDS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
SHAPE = {
    **WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
KEYS = {"num_key_value_heads": 1, "intermediate_size": 64}
TEXT = {**SHAPE, **KEYS, "head_dim": 16, "sliding_window": 32}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 28,
    "patch_size": 14,
}
FAMILIES = {
    "neox": GPTNeoXConfig(**SHAPE, intermediate_size=64),
    "opt": OPTConfig(**{**SHAPE, "pad_token_id": 1}, ffn_dim=64, word_embed_proj_dim=32),
    "falcon": FalconConfig(**SHAPE),
    "bloom": BloomConfig(**WORDS, hidden_size=32, n_layer=2, n_head=2),
    "gptj": GPTJConfig(**WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=64, rotary_dim=8),
    "lfm2": Lfm2Config(
        **SHAPE, **KEYS, layer_types=["conv", "full_attention"], block_multiple_of=16
    ),
    "gemma3 of text and images": Gemma3Config(
        text_config=TEXT,
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    ),
}
MIXTURES = {
    "mixtral": MixtralConfig(**SHAPE, **KEYS, num_local_experts=4),
    "qwen3 moe": Qwen3MoeConfig(
        **SHAPE, **KEYS, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
}
ATTENTION = """
name = "attention"
rules = [{ role = "attention", spec = { bits = 4, group_size = 16 } }]
"""
ALL = """
name = "all"
rules = [{ pattern = "*", spec = { bits = 4, group_size = 16 } }]
"""


def saved(config: PreTrainedConfig, out: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)
    return str(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_fits_and_the_student_learns(family: str, tmp_path: Path) -> None:
    source = saved(FAMILIES[family], tmp_path / "float")
    convert_checkpoint(source, ConvertConfig(to="q2a4", device="cpu"), tmp_path / "packed")
    student = load_model(str(tmp_path / "packed"), device="cpu", dtype="fp32")
    model = student.model
    assert list(quant_linears(model)) == linear_names(model)
    bits = {role_of(name): linear.spec.bits for name, linear in quant_linears(model).items()}
    assert bits == {"mlp": 2, "attention": 4}
    names = linears_in_scope(model, "mlp")
    assert 0 < len(names) < len(linear_names(model))
    scales = [model.get_submodule(name).scales for name in names]
    optimizer = torch.optim.AdamW(scales, lr=1e-2)
    ids = torch.arange(16).view(2, 8) % VOCAB
    losses = []
    for _ in range(3):
        logits = student.logits(student.hidden(ids, torch.arange(8).expand(2, 8)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


def test_the_text_model_of_a_multimodal_one_is_meant(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["gemma3 of text and images"])
    assert all("language_model" in name for name in linear_names(model))
    assert decoder_layers(model) is model.model.language_model.layers


@pytest.mark.parametrize("plan", [None, ALL])
@pytest.mark.parametrize("family", MIXTURES)
def test_fused_experts_are_refused(family: str, plan: str | None, tmp_path: Path) -> None:
    source = saved(MIXTURES[family], tmp_path / "float")
    (tmp_path / "plan.toml").write_text(plan or "")
    to = "q2a4" if plan is None else str(tmp_path / "plan.toml")
    with pytest.raises(ConfigError, match="holds experts in one tensor of shape .4, .* cannot"):
        convert_checkpoint(source, ConvertConfig(to=to, device="cpu"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", MIXTURES)
def test_the_attention_of_a_mixture_can_be_quantized(family: str, tmp_path: Path) -> None:
    source = saved(MIXTURES[family], tmp_path / "float")
    (tmp_path / "plan.toml").write_text(ATTENTION)
    config = ConvertConfig(to=str(tmp_path / "plan.toml"), device="cpu")
    convert_checkpoint(source, config, tmp_path / "out")
    found = quant_linears(load_model(str(tmp_path / "out"), device="cpu").model)
    assert len(found) == 8 and {role_of(name) for name in found} == {"attention"}
