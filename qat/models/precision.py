"""What a model computes in: its dtype, and the precision of float32 matmuls.

What does not learn is kept in the compute dtype where that loses nothing. The residual stream takes
its dtype from the embedding's output; what learns stays float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend.device import on


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[], None]:
    """Let `model` compute in `dtype` (under autocast, which casts what stays float32).

    Parameters without gradient are cast if every value survives; a checkpoint stores the same
    numbers afterwards. Decides on the host: for the start of a run, not for a step. What it gives
    back ends the casting of the residual stream.
    """
    if dtype == torch.float32:
        return lambda: None
    for parameter in model.parameters():
        is_fixed = parameter.is_floating_point() and not parameter.requires_grad
        if is_fixed and parameter.dtype != dtype:
            cast = parameter.detach().to(dtype)
            if on(cast.device).equal(cast.to(parameter.dtype), parameter):
                parameter.data = cast

    def in_compute_dtype(_module: nn.Module, _args: tuple, embedded: Tensor) -> Tensor:
        return embedded.to(dtype)

    return model.get_input_embeddings().register_forward_hook(in_compute_dtype).remove


@contextmanager
def matmul_precision(precision: Literal["medium", "highest"]) -> Iterator[None]:
    """`medium`: float32 matmuls may multiply in bf16 or TF32 where the device does so faster.

    Sums stay in float32. Moment matrices keep their symmetry and sign: both factors round alike.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
