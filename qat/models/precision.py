"""The compute dtype of a model, and the precision of float32 matmuls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.nn.lut_embedding import QuantTable


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[], None]:
    """Let `model` compute in `dtype` (under autocast, which casts parameters that stay float32).

    Parameters without gradient are cast if every value is exact in `dtype`, except those of
    LayerNorms and of quantized tables; a checkpoint then stores the same numbers. It synchronizes
    with the device, so call it at the start of a run and not in a step. The returned function stops
    casting the residual stream.
    """
    if dtype == torch.float32:
        return lambda: None
    # on a CPU a 16-bit LayerNorm refuses a float32 input, such as tokens plus float32 positions
    whole = [m for m in model.modules() if isinstance(m, nn.LayerNorm | QuantTable)]
    kept = {id(parameter) for module in whole for parameter in module.parameters()}
    for parameter in model.parameters():
        is_fixed = parameter.is_floating_point() and not parameter.requires_grad
        if is_fixed and parameter.dtype != dtype and id(parameter) not in kept:
            cast = parameter.detach().to(dtype)
            if torch.equal(cast.to(parameter.dtype), parameter):
                parameter.data = cast

    def in_compute_dtype(_module: nn.Module, _args: tuple, embedded: Tensor) -> Tensor:
        return embedded.to(dtype)

    return model.get_input_embeddings().register_forward_hook(in_compute_dtype).remove


@contextmanager
def matmul_precision(precision: Literal["medium", "highest"]) -> Iterator[None]:
    """Set the precision of float32 matmuls: `medium` allows bf16 or TF32 factors where faster.

    Sums stay in float32. Moment matrices keep their symmetry and sign, because both factors are
    rounded in the same way.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
