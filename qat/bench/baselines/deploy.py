"""What a baseline leaves behind: plain linears of the weights it would deploy, and their bits.

Shapes: O out_features, I in_features.
"""

from typing import NamedTuple

from torch import Tensor, nn

from qat.nn.swap import replace_module

FP16_BITS = 16


class Deployed(NamedTuple):
    """One quantized linear as it would be stored."""

    weight: Tensor
    """`(O, I)`, dequantized."""
    stored_bits: int
    """Codes, scales, zero points and codebook together."""


def put_plain(model: nn.Module, deployed: dict[str, Deployed]) -> float:
    """Put float linears of these weights into `model`; returns their mean bits per weight."""
    for name, (weight, _) in deployed.items():
        bias = model.get_submodule(name).bias
        replace_module(model, name, _linear(weight, bias))
    bits = sum(part.stored_bits for part in deployed.values())
    return bits / sum(part.weight.numel() for part in deployed.values())


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    O, I = weight.shape
    linear = nn.Linear(I, O, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return linear.eval()
