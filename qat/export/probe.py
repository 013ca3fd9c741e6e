"""Logits on a few tokens: how an export is compared with the model that it came from.

Shapes: B sequences, S positions, V words.
"""

import copy
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat.models.checkpoint import quiet_transformers
from qat.nn.swap import embedding_dtype

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
        return logits_of(reloaded.eval(), ids)  # some decompress at the first call


def logits_of_weights(
    model: PreTrainedModel, weights: dict[str, Tensor], ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """Those of a float model like `model` with these weights, computing in `dtype`.

    Raises:
        RuntimeError: a weight is missing, or there is one too many.
    """
    return logits_of(float_model(model, weights, dtype), ids)


def float_model(
    model: PreTrainedModel, weights: dict[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """A float model like `model` with these weights in `dtype`, in eval mode.

    Raises:
        RuntimeError: a weight is missing, or there is one too many.
    """
    with init_empty_weights(include_buffers=False):
        dense = float_skeleton(model, dtype)
    state = {name: weight.to(dtype) for name, weight in weights.items()}
    for pair in dense.all_tied_weights_keys.items():
        for one, other in (pair, pair[::-1]):
            if one in state:
                state.setdefault(other, state[one])
    dense.load_state_dict(state, assign=True)
    dense.tie_weights()
    return dense.eval()


def float_skeleton(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A new model of the same class and configuration, without quantization."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return type(model)._from_config(config, dtype=dtype)
