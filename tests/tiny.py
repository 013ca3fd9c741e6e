"""Builders of tiny models and tokenizers shared by the tests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 320
IDS = torch.arange(40).view(2, 20) * 7 % VOCAB

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}

ARCHITECTURES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig),
}

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "factor": 8.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0 + i for i in range(16)],
    }
}
"""Overrides that give documents of more than 16 tokens other rotary angles than shorter ones."""


def tiny_model(architecture: str = "qwen3", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random model of 2 layers and width 32, in float32 and eval mode."""
    model_class, config_class = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    return model_class(config_class(**{**SHAPE, **overrides})).eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits `(2, 20, VOCAB)` of `IDS`."""
    return model(IDS).logits


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and enable_thinking "
    "is defined and not enable_thinking %}<think></think>{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined "
    "and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def tiny_tokenizer(vocab_size: int = VOCAB) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few sentences, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog saw the cat"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def save_tiny(out: Path, architecture: str = "qwen3", **overrides: object) -> None:
    """Write a `tiny_model` and its tokenizer to `out`."""
    tiny_model(architecture, **overrides).save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)


@contextmanager
def edited(directory: Path, name: str = "config.json") -> Iterator[dict[str, Any]]:
    """Yield the values of a JSON file, or the tensors of a safetensors file, to change in place.

    The hashes in the directory are dropped, so that what is wrong is found without them.
    """
    path = directory / name
    values = json.loads(path.read_text()) if path.suffix == ".json" else load_file(path)
    yield values
    if path.suffix == ".json":
        path.write_text(json.dumps(values))
    else:
        tensors = {name: tensor.contiguous() for name, tensor in values.items()}
        save_file(tensors, path, {"format": "pt"})
    (directory / "checksums.json").unlink(missing_ok=True)
