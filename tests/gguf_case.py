"""Tiny GGUF files, written as llama.cpp writes real ones."""

from pathlib import Path

import gguf
from tiny import tiny_model, tiny_tokenizer
from tokenizers.pre_tokenizers import Digits, Sequence

from qat.extensions.targets.gguf import add_tokenizer

SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def write_gguf(
    path: Path,
    kind: str = "Q5_0",
    *,
    embedding: str | None = None,
    seed: int = 0,
    has_tokenizer: bool = True,
    splits_digits: bool = False,
) -> Path:
    """A Qwen3 of 2 layers whose matrices are in blocks of `kind`, and an untied head of Q8_0.

    The `embedding` may be in blocks of another kind.
    """
    own = {"output.weight": "Q8_0", "token_embd.weight": embedding or kind}
    model = tiny_model("qwen3", seed, **SHAPE, tie_word_embeddings=False)
    writer = gguf.GGUFWriter(path, "qwen3")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    if has_tokenizer:
        tokenizer = tiny_tokenizer()
        if splits_digits:
            steps = [Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
        assert add_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        written, values = names.get_name(name, (".weight",)), tensor.numpy()
        block = gguf.GGMLQuantizationType[own.get(written, kind)]
        if tensor.dim() == 1 or block == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(written, values)
        else:
            writer.add_tensor(written, gguf.quantize(values, block), raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
