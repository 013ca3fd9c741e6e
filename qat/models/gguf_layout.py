"""What llama.cpp's files say in another way than transformers: names, rows, rotary frequencies."""

import math
from pathlib import Path

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import CheckpointError
from qat.models.gguf import dequantize
from qat.models.gguf_header import read_header, read_metadata
from qat.nn.swap import head_dim

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
"""GGUF's name of the architecture for a `model_type`."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the frequencies of a llama's rotary embedding."""
LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192
"""Settings of every Llama 3, which a file does not name."""
DIGITS_APART = frozenset("smollm starcoder refact command-r codeshell exaone minerva-7b".split())
"""llama.cpp's names of the rule that splits off each digit, and then splits text as GPT-2 does."""


def tensor_names(model: PreTrainedModel) -> dict[str, str]:
    """Return GGUF's name of each module that has a weight or a bias, without `.weight`.

    The `model_type` must be one of `ARCHITECTURES`.
    """
    import gguf

    architecture = ARCHITECTURES[model.config.model_type]
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    found = {name: known.get_name(name) for name, _ in model.named_modules()}
    return {name: written for name, written in found.items() if written is not None}


def gguf_sizes(path: Path, model: PreTrainedModel) -> dict[str, int]:
    """Return the bytes of each tensor in the GGUF file of `model`, by the names in the model."""
    names = {f"{written}.weight": f"{name}.weight" for name, written in tensor_names(model).items()}
    tensors = read_header(path).items()
    return {names.get(n, n): round(t.bits * math.prod(t.shape) / 8) for n, t in tensors}


def row_order(name: str, config: PreTrainedConfig) -> Tensor | None:
    """Return the source rows of llama's q and k: ggml rotates neighbours, transformers halves."""
    if config.model_type != "llama" or not name.endswith(("q_proj", "k_proj")):
        return None
    is_query, width = name.endswith("q_proj"), head_dim(config)
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    return torch.arange(heads * width).view(heads, 2, width // 2).mT.reshape(-1)


def rope_factors(config: PreTrainedConfig) -> Tensor:
    """Return the values of `ROPE_FACTORS` for a llama of rope_type llama3, float32 `(width / 2,)`.

    Short waves keep their frequency, long ones get it divided by `factor`, and between them the
    divisor moves with the frequency. Every step is rounded to float32 as llama.cpp's converter
    does.
    """
    rope, width = config.rope_parameters, head_dim(config)
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width))
    wavelengths = 2 * math.pi / frequencies
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (length / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    between[wavelengths < length / high] = 1.0
    between[wavelengths > length / low] = factor
    return between


def read_rope_scaling(path: Path, config: PreTrainedConfig) -> None:
    """Give `config` the rope_type llama3 if the GGUF file at `path` has its factors.

    transformers reads neither. The file has the factors alone, so the settings behind them are
    found and must give the same factors.

    Raises:
        CheckpointError: the factors are no Llama 3's.
    """
    tensor = read_header(path).get(ROPE_FACTORS) if config.model_type == "llama" else None
    if tensor is None:
        return
    octets = np.memmap(path, np.uint8, "r", tensor.place, tensor.byte_shape)
    factors = torch.from_numpy(dequantize(np.asarray(octets), tensor.type))
    factor, plain = factors.max(), dict(config.rope_parameters)
    scaled = {**plain, **LLAMA3_FACTORS, "rope_type": "llama3", "factor": factor.item()}
    scaled["original_max_position_embeddings"] = LLAMA3_LENGTH
    between = (factors > 1) & (factors < factor)
    if between.any():
        low, high = LLAMA3_FACTORS.values()
        smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
        exponents = torch.arange(len(factors)) / len(factors)
        lengths = 2 * math.pi * plain["rope_theta"] ** exponents * (smooth * (high - low) + low)
        scaled["original_max_position_embeddings"] = round(lengths[between].median().item())
    config.rope_parameters = scaled
    found = rope_factors(config)
    if found.shape != factors.shape or not torch.allclose(found, factors, rtol=1e-5):
        raise CheckpointError(
            f"{path} divides rotary frequencies by factors up to {factor:.4g} that are no Llama "
            "3's, expected low_freq_factor=1 and high_freq_factor=4; name the directory of the "
            "model that it was made from"
        )


def read_digit_rule(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let `tokenizer` split each digit off if the GGUF file at `path` says so.

    transformers takes GPT-2's rule for names that it does not know, and these are among them.
    """
    rule = read_metadata(path).get("tokenizer.ggml.pre")
    backend = tokenizer.backend_tokenizer
    is_plain = isinstance(backend.pre_tokenizer, ByteLevel)
    if is_plain and rule is not None and rule.parts[0].decode() in DIGITS_APART:
        digits = Digits(individual_digits=True)
        backend.pre_tokenizer = Sequence([digits, backend.pre_tokenizer])
