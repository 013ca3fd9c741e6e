"""Random joined queries, keys and values, and what attention makes of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """The arguments of `qat.kernels.joined_attention.joined_attention`, and a gradient."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    positions: Tensor
    scale: float
    eps: float
    heads: int
    grad: Tensor

    def in_(self, dtype: torch.dtype, device: str = "cpu") -> "Case":
        """All that is floating-point in `dtype`; the norms in float32, as those that learn."""
        norm_dtype = dtype if dtype == torch.float64 else torch.float32

        def cast(name: str, value: object) -> object:
            if not isinstance(value, Tensor) or name == "positions":
                return value.to(device) if isinstance(value, Tensor) else value
            return value.to(device, norm_dtype if name.endswith("norm") else dtype)

        return Case(*(cast(name, value) for name, value in self._asdict().items()))

    def value_and_gradients(self, attention: Callable) -> tuple[Tensor, ...]:
        """The output, then the gradients of qkv and, if there are norms, of both."""
        leaves = [self.qkv, self.query_norm, self.key_norm]
        leaves = [None if x is None else x.clone().requires_grad_() for x in leaves]
        qkv, query_norm, key_norm = leaves
        rest = (self.positions, self.scale, self.eps, self.heads)
        out = attention(qkv, self.cos, self.sin, query_norm, key_norm, *rest)
        out.backward(self.grad)
        return out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)


def joined_case(
    B: int, S: int, H: int, K: int, D: int, *, has_norms: bool, dtype: torch.dtype = torch.float16
) -> Case:
    """Documents of random lengths; every value is one that `dtype` can hold."""
    starts = torch.rand(B, S) < 0.1
    starts[:, 0] = True
    places = torch.arange(S)
    positions = places - torch.where(starts, places, 0).cummax(1).values
    frequencies = 100.0 ** -torch.linspace(0, 1, D // 2)
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
    norms = [0.5 + torch.rand(D) if has_norms else None for _ in range(2)]
    qkv, grad = torch.randn(B, S, (H + 2 * K) * D), torch.randn(B, S, H, D)
    scale = D**-0.5
    case = Case(qkv, angles.cos(), angles.sin(), *norms, positions, scale, 1e-6, H, grad)
    return case.in_(dtype)
