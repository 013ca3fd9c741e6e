"""Tiny random models of every class of causal language model that transformers knows.

`FAMILIES` names a kind of configuration for each class; `build` makes a model of it, of four layers
and width 64, and `walk` takes one of two layers where these show every kind of layer. Sizes go by
the names that configurations give them, and `OWN` holds what a family asks for beyond that.
"""

import inspect
import random
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tiny import VOCAB, edited, tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

LAYERS = dict.fromkeys(("n_layer", "num_hidden_layers", "n_layers", "num_layers"), 4)
WIDTHS = dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embed_dim"), 64)
INNER = dict.fromkeys(
    (
        "intermediate_size",
        "dense_intermediate_size",
        "ffn_dim",
        "d_ff",
        "dff",
        "n_inner",
        "ffn_hidden_size",
        "dim_ff",
    ),
    96,
)
HEADS = dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
LENGTHS = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128)
EXPERTS = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "shared_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
STATE_SPACES = {
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "state_size": 16,
    "num_ssm_heads": 8,
    "mamba_dt_rank": 16,
    "time_step_rank": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),  # rows are padded to the next one
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SIZES = {
    **LAYERS,
    **WIDTHS,
    **INNER,
    **HEADS,
    **LENGTHS,
    **EXPERTS,
    **STATE_SPACES,
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "kv_channels": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "word_embed_proj_dim": 64,
    "rotary_dim": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "is_decoder": True,
}
LATENT_ATTENTION = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
"""Settings of configurations that have a `kv_lora_rank`."""
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
"""Rotary positions of three axes."""
OWN: dict[str, dict[str, object]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "deepseek_v4": {
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "dots1": {
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention"] * 4,
        "n_shared_experts": 1,
    },
    "longcat_flash": {
        "num_layers": 2,  # of two attentions each
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE}},
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "nemotron_h": {
        "n_groups": 2,
        "ssm_state_size": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "moe_shared_expert_intermediate_size": 32,
    },
    "dots3_note_text": {
        "qk_rope_head_dim": 8,
        "head_dim": 24,
        "moe_intermediate_size": 32,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense"] * 4,
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "qwen4_exp_text": {
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **dict.fromkeys(("glm4v_text", "qwen2_vl_text", "qwen2_5_vl_text"), {"rope_parameters": MROPE}),
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local"] * 4,
        "local_attn_chunk_length": 16,
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "axial_pos_embds": False,
    },
    **dict.fromkeys(("lfm2", "lfm3"), {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
        "mamba_ngroups": 1,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "zaya": {"num_experts_per_tok": 1},
}


OF_IMAGES = (
    "aria",
    "cohere2_vision",
    "deepseek_vl",
    "glm4v",
    "idefics3",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "llava",
    "llava_onevision",
    "mistral3",
    "ovis2",
    "paligemma",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)
"""Kinds of images and text that transformers opens by another name than causal models."""


def _families() -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        name = names if isinstance(names, str) else names[0]
        # several kinds may share a class, which one of them is called after
        if name not in found or name == f"{CONFIG_MAPPING_NAMES[kind][:-6]}ForCausalLM":
            found[name] = kind
    return found | {MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]: kind for kind in OF_IMAGES}


FAMILIES = _families()
"""The name of each class, and the kind of configuration that it is made from."""


def tiny_config(kind: str) -> PreTrainedConfig:
    """A small configuration of that kind."""
    made = CONFIG_MAPPING[kind]
    return made(**_settings(made(), kind))


def short_config(kind: str) -> PreTrainedConfig:
    """The same with two layers, where they are of as many kinds as four, else with four."""
    whole, made = tiny_config(kind), CONFIG_MAPPING[kind]
    short = made(**_settings(made(), kind, num_layers=2))
    return short if _kinds_of_layers(short) == _kinds_of_layers(whole) else whole


def _kinds_of_layers(config: PreTrainedConfig) -> dict[str, set[str]]:
    """The kinds that a configuration gives to its layers, by the name of each list of them."""
    lists = {k: v for k, v in config.get_text_config().to_dict().items() if isinstance(v, list)}
    return {key: set(map(str, kinds)) for key, kinds in lists.items()}


def _settings(config: PreTrainedConfig, kind: str, num_layers: int = 4) -> dict[str, object]:
    made, own = type(config), OWN.get(kind, {})
    known = {*inspect.signature(made.__init__).parameters, *config.to_dict()}
    known |= set(getattr(made, "__dataclass_fields__", {}))
    sizes = SIZES | (LATENT_ATTENTION if "kv_lora_rank" in known else {})
    if kind not in OWN:  # which may name each layer
        sizes = sizes | dict.fromkeys(LAYERS, num_layers)
    settings = {key: value for key, value in sizes.items() if key in known} | own
    for name in getattr(made, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and name not in own:
            settings[name] = _settings(part, part.model_type, num_layers)
    return settings


def build(family: str, seed: int = 0, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """A random model of the class called `family`, in float32 and eval mode."""
    config, made = config or tiny_config(FAMILIES[family]), getattr(transformers, family)
    torch.manual_seed(seed)
    try:
        model = made(config)
    except (AttributeError, TypeError):  # a class of the text alone, which asks for that part
        model = made(config.get_text_config())
    return model.eval()


def saved(family: str, out: Path, config: PreTrainedConfig | None = None) -> None:
    """Write such a model and a tokenizer to `out`."""
    build(family, config=config).save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the four bits of MXFP4 (OCP Microscaling Formats v1.0, E2M1)."""


def saved_in_mxfp4(out: Path) -> dict[str, Tensor]:
    """Write a gpt-oss with random experts as its own files have them; return their weights.

    They are `(E, O, I)`, by name.
    """
    saved("GptOssForCausalLM", out)
    wished, ends = {}, ("experts.gate_up_proj", "experts.down_proj")
    with edited(out, "model.safetensors") as state:
        for name in [name for name in state if name.endswith(ends)]:
            E, I, O = state.pop(name).shape
            codes = torch.randint(16, (E, O, I // 32, 32))
            exponents = torch.randint(118, 124, (E, O, I // 32))
            scales = torch.exp2(exponents.float() - 127)
            wished[name] = (torch.tensor(FP4)[codes] * scales[..., None]).flatten(2)
            state[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            state[f"{name}_scales"] = exponents.to(torch.uint8)
    with edited(out) as config:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return wished


NOT_BUILT = {
    "BltForCausalLM": "its tables of hashed bytes have 3 million rows whatever its configuration",
    "Gemma3nForConditionalGeneration": "its tower for images needs timm",
    "Gemma4AssistantForCausalLM": "drafts for another model, whose states it reads",
    "Gemma4UnifiedAssistantForCausalLM": "drafts for another model, whose states it reads",
    "MusicgenForCausalLM": "makes sound",
    "MusicgenMelodyForCausalLM": "makes sound",
    "ZambaForCausalLM": "cannot be built small in transformers 5.24",
}
"""Classes of which no tiny model is made here, and why."""
WORDS = (
    "the cat sat on a mat and dog saw one bird over old red house where we went to sleep"
).split()


def texts(out: Path) -> Path:
    """A file of 120 short documents, no two alike."""
    chance = random.Random(0)
    documents = (" ".join(chance.choices(WORDS, k=40)) for _ in range(120))
    out.write_text("\n\n".join(documents), encoding="utf-8")
    return out


def walk(
    family: str, folder: Path, call: Callable[..., int], device: str = "cpu", dtype: str = "auto"
) -> str:
    """Take a model of that class from teacher to a trained student that writes, verb by verb.

    Converting opens what it wrote again and compares tensors, exporting compares logits, both to
    the bit.

    Args:
        family: a class of `FAMILIES`.
        folder: an empty directory.
        call: runs `qat` with the tokens that it is given and returns the exit code.
        device: what every verb but `export` computes on.
        dtype: in what caching, training, evaluating and writing compute.

    Returns:
        The verb that refused; empty where all of them ended well.
    """
    saved(family, folder / "float", short_config(FAMILIES[family]))
    cache, student, run = folder / "cache", folder / "student", folder / "run"
    rows = ("--num-sequences", 24, "--sequence-length", 16)
    data = ("--data", texts(folder / "texts.txt"), "--format", "plain", *rows)
    steps = ("--batch-size", 2, "--max-steps", 3, "--eval-sequences", 2, "--force")
    verbs: tuple[tuple[object, ...], ...] = (
        ("cache", "--teacher", folder / "float", *data, "--out", cache),
        ("convert", folder / "float", "--to", "q2a4", "--calibration", cache, "--out", student),
        ("train", student, "--cache-dir", cache, *steps, "--out", run),
        ("eval", run, "--cache-dir", cache, "--max-sequences", 2),
        ("generate", run, "--prompt", "the cat", "--raw", "--max-new-tokens", 4),
        ("export", run, "--to", "dense", "--dtype", "fp32", "--out", folder / "dense"),
    )
    for verb in verbs:
        where = () if verb[0] == "export" else ("--device", device)
        how = () if verb[0] in ("convert", "export") else ("--dtype", dtype)
        if call(*verb, *where, *how):
            return str(verb[0])
    return ""
