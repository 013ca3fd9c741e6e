"""A cache of long rows and students with sparse attention, for tests of training."""

import random
from pathlib import Path

import torch
from cache_case import TOKENIZER, WORDS, build
from quantized import SPECS, tiny_quantized
from tiny import tiny_model

from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.swap import swap_attention
from qat.models.checkpoint import save_checkpoint, write_model
from qat.models.directory import atomic_directory

SPARSE = NSAConfig(
    compress_block=4,
    compress_stride=2,
    select_block=8,
    num_selected=4,
    window=8,
    select_tile=8,
    pooling="weighted",
)
LENGTH = 64


def make_sparse_place(place: Path, config: NSAConfig = SPARSE, length: int = LENGTH) -> Path:
    """A cache of rows that sparse attention does not read whole, and students: `student`, `float`.

    The first one is packed, with two-bit weights.
    """
    rng = random.Random(5)
    words = (length // 2, length + length // 2)
    documents = [" ".join(rng.choices(WORDS, k=rng.randrange(*words))) for _ in range(30)]
    build(place / "cache", sequence_length=length, documents=documents)
    torch.manual_seed(7)
    packed = tiny_quantized("qwen3", SPECS["lut2"])
    swap_attention(packed, config)
    save_checkpoint(packed, TOKENIZER, place / "student")
    plain = tiny_model(use_cache=False)
    swap_attention(plain, config)
    with atomic_directory(place / "float") as partial:
        write_model(plain, TOKENIZER, partial)
    return place
