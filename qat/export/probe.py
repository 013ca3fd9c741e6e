"""Logits on a few tokens: how an export is compared with the model that it came from.

Shapes: B sequences, S positions, V words.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat.models.checkpoint import quiet_transformers
from qat.models.tables import embedding_dtype

NUM_PROBE_TOKENS = 16


def probe_ids(model: PreTrainedModel) -> Tensor:
    """Tokens spread over the vocabulary, `(1, S)`."""
    vocab_size = model.config.get_text_config().vocab_size
    return torch.arange(NUM_PROBE_TOKENS)[None] * (vocab_size // NUM_PROBE_TOKENS) % vocab_size


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`(B, S, V)` in the dtype that the model computes in."""
    return model(input_ids=ids, use_cache=False).logits


def reloaded_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Those of the model that transformers reads from `directory`, in the dtype of `model`."""
    with quiet_transformers():
        reloaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=embedding_dtype(model), local_files_only=True
        )
    return logits_of(reloaded.eval(), ids)
