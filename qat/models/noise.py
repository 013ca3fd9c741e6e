"""What rounding does to a model: measured, by putting the values of each layer off by as much.

Two ways of computing one thing differ by rounding. How far that carries depends on the model, so
whoever compares two ways holds their difference against that of a model that is put off here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.nn.swap import decoder_layers

TF32_EPS = 2.0**-10
"""The rounding of matmuls that take their factors from float32 in TF32, as a GPU may."""


@contextmanager
def disturbed(model: PreTrainedModel, eps: float) -> Iterator[None]:
    """A block in which every decoder layer gives each value off by `eps` of it, up or down."""
    generator = torch.Generator().manual_seed(0)

    def disturb(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        is_bare = isinstance(output, Tensor)
        hidden = output if is_bare else output[0]
        hidden = hidden * (1 + eps * signs(hidden, generator))
        return hidden if is_bare else (hidden, *output[1:])

    with hooked(decoder_layers(model), disturb):
        yield


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """1 or -1 for each value of `like`."""
    return torch.randint(2, like.shape, generator=generator).to(like) * 2 - 1


def distance(found: Tensor, expected: Tensor) -> float:
    """`|found - expected| / |expected|`, Frobenius."""
    expected = expected.float()
    return ((found.float().to(expected.device) - expected).norm() / expected.norm()).item()


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable) -> Iterator[None]:
    """A block in which `hook` sees, and may replace, what each of the modules gives."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
