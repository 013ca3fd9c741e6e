"""Published sizes of the models that students are made of, by name.

From each model's config.json on the hub. What does not change the cost of a step (rotary base,
epsilon, tokens of a kind) is left at its architecture's default.
"""

from qat.errors import ConfigError


def _qwen3(width: int, ffn: int, layers: int, heads: int, *, tied: bool = True) -> dict:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
    }


def _llama(width: int, layers: int, heads: int, head_dim: int) -> dict:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": width,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }


def _gemma3(width: int, ffn: int, layers: int, *, window: int, max_positions: int) -> dict:
    return {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": window,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
    }


SHAPES: dict[str, dict] = {
    "tiny": {
        **_qwen3(64, 128, 2, 2),
        "vocab_size": 512,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "llama-3.2-1b": _llama(2048, 16, 32, 64),
    "llama-3.2-3b": _llama(3072, 28, 24, 128),
    "gemma-3-270m": _gemma3(640, 2048, 18, window=512, max_positions=32768),
    "gemma-3-1b": _gemma3(1152, 6912, 26, window=512, max_positions=32768),
}
"""Arguments of each architecture's configuration class."""


def shape_called(name: str) -> dict:
    """The sizes published under `name`, upper or lower case.

    Raises:
        ConfigError: no shape has that name.
    """
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise ConfigError(
            f"student={name} is neither a model directory nor a shape; name a checkpoint of 'qat "
            f"convert' or one of {', '.join(SHAPES)}"
        )
    return shape
