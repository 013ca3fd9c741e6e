"""Measurement of the effect of rounding on a model, by disturbing the values of each layer.

Two ways to compute the same thing differ by rounding, and how much that is amplified depends on the
model. So the difference of two ways is compared with that of a model disturbed here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.nn.swap import decoder_layers

TF32_EPS = 2.0**-10
"""Relative rounding of matmuls with float32 factors in TF32, as on a GPU."""


@contextmanager
def disturbed(
    model: PreTrainedModel, eps: float, *, every_product: bool = False, seed: int = 0
) -> Iterator[None]:
    """Change each output of every decoder layer and of the head by relative `eps` in the block.

    Args:
        model: the model that computes in the block.
        eps: relative change of each value, up or down.
        every_product: also change the embedding and all linears, for a model that rounds their
            inputs: the rounding absorbs most of a change by a layer.
        seed: seed of the directions.
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
    """Return 1 or -1 at random for each value of `like`."""
    return torch.randint(2, like.shape, generator=generator).to(like) * 2 - 1


def distance(found: Tensor, expected: Tensor) -> float:
    """Return `|found - expected| / |expected|`, Frobenius."""
    expected = expected.float()
    return ((found.float().to(expected.device) - expected).norm() / expected.norm()).item()


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable) -> Iterator[None]:
    """Register the forward `hook`, which may replace outputs, on the modules in the block."""
    with ExitStack() as handles:
        for module in modules:
            handles.enter_context(module.register_forward_hook(hook))
        yield
