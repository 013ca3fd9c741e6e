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
def disturbed(
    model: PreTrainedModel, eps: float, *, every_product: bool = False, seed: int = 0
) -> Iterator[None]:
    """A block in which every decoder layer and the head give each value off by `eps` of it.

    Args:
        model: computes in the block.
        eps: of each value, which goes up or down by it.
        every_product: So do the embedding and all linears, for a model that rounds what these read:
            the rounding swallows most of what comes from a layer.
        seed: of the directions.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = {*decoder_layers(model), model.get_output_embeddings()}
    if every_product:
        modules |= {each for each in model.modules() if isinstance(each, nn.Linear | nn.Embedding)}

    def disturb(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        is_bare = isinstance(output, Tensor)
        hidden = output if is_bare else output[0]
        hidden = hidden * (1 + eps * signs(hidden, generator))
        return hidden if is_bare else (hidden, *output[1:])

    with hooked([each for each in model.modules() if each in modules], disturb):
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
