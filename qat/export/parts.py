"""Parts that every target may use: float models like a student, read back, and their logits."""

import copy
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from qat.errors import ExportError
from qat.models.checkpoint import quiet_transformers
from qat.models.opening import auto_class
from qat.models.stored_state import INPUT_SCALE, PACKED, quantized_modules, weight_parts
from qat.nn.lut_embedding import QuantTable
from qat.nn.sites import open_sites
from qat.nn.swap import embedding_dtype
from qat.quant.spec import LutSpec

LATENT = "weight"
"""Name of the float weight that a linear in training quantizes."""


class DtypeError(ExportError):
    """A value does not fit into the dtype, but may fit into another one."""


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype` if it is a floating-point one; `name` is for the message.

    Raises:
        DtypeError: a finite value overflows `dtype`.
    """
    if not tensor.is_floating_point():
        return tensor
    cast = tensor.to(dtype)
    if cast.isinf().any():
        raise DtypeError(
            f"{name} holds {tensor.abs().max().item():.4g}, but {dtype} ends at "
            f"{torch.finfo(dtype).max:.4g}; export with --dtype bf16"
        )
    return cast


def loses_nothing(spec: LutSpec, shape: tuple[int, int]) -> None:
    """Lose nothing: the target holds every format (`Target.lost`)."""


def as_it_is(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return `spec` itself, for a target that holds every format (`Target.scheme`)."""
    return spec


def any_model(model: PreTrainedModel) -> None:
    """Accept every model that transformers runs (`Target.check`)."""


def without_quantized(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of the model without its quantized weights and the scales of inputs."""
    state = model.state_dict()
    for name, module in quantized_modules(model).items():
        for key in (PACKED, LATENT, INPUT_SCALE, *weight_parts(module)):
            state.pop(f"{name}.{key}", None)
    return state


# Logits on a few tokens, which compare an export with its model: B sequences, S positions, V words.

NUM_PROBE_TOKENS = 16
"""Tokens whose logits are compared."""


def probe_ids(model: PreTrainedModel) -> Tensor:
    """Return tokens spread over the vocabulary, `(1, S)`."""
    vocab_size = model.config.get_text_config().vocab_size
    return torch.arange(NUM_PROBE_TOKENS)[None] * (vocab_size // NUM_PROBE_TOKENS) % vocab_size


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits `(B, S, V)` in the dtype that the model computes in."""
    return model(input_ids=ids, use_cache=False).logits


def align(model: PreTrainedModel) -> None:
    """Move each parameter to newly allocated memory.

    A tensor in a file may begin at any byte, and a CPU then sums a product of few rows in another
    order.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def reloaded_logits(
    model: PreTrainedModel, directory: Path, ids: Tensor, **settings: object
) -> Tensor:
    """Return logits of the model that transformers reads from `directory`, in the dtype of `model`.

    `settings` go to `from_pretrained`.
    """
    found = reloaded(model, directory, dtype=embedding_dtype(model), **settings)
    with quiet_transformers():
        return logits_of(found, ids)  # some are decompressed at the first call


def reloaded(model: PreTrainedModel, directory: Path, **settings: object) -> PreTrainedModel:
    """Load a model like `model` from `directory` by transformers with these `settings`."""
    with quiet_transformers():
        found = auto_class(model.config).from_pretrained(
            directory, local_files_only=True, **settings
        )
    open_sites(found)  # experts then multiply in the same layout as in `model`
    align(found)
    return found.eval()


def float_model(
    model: PreTrainedModel, weights: dict[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """Return a float model like `model` with these weights in `dtype`, in eval mode.

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


def quantize_inputs(copy: PreTrainedModel, model: PreTrainedModel) -> None:
    """Let the linears and the head of a float copy of `model` quantize their inputs likewise."""
    for name, module in quantized_modules(model).items():
        if module.activation is not None:
            is_head = isinstance(module, QuantTable)  # a tied head has the embedding's name
            reader = copy.get_output_embeddings() if is_head else copy.get_submodule(name)
            reader.register_forward_pre_hook(
                lambda _module, args, read=module.activation: (read(args[0]),)
            )


def float_skeleton(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a new model of the same class and configuration, without quantization."""
    return type(model)._from_config(plain_config(model), dtype=dtype)


def plain_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of the configuration without our quantization."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config
