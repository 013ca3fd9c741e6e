"""Where the tokens of a row lie, from whatever mask a model was called with.

Native Sparse Attention counts its blocks from a row's first token, so padding has to leave: real
tokens move to the front, attention runs, and its result moves back. A padded row then equals the
row alone.

Shapes: B rows (1: all alike), S positions, N positions of a cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenRows(NamedTuple):
    """The order to compute in, and where each token's document begins."""

    order: Tensor | None
    """`(B, S)`: which place comes first, second, ...: real tokens before padding; None: as is."""
    first: Tensor | None
    """`(B, S)`, in that order: where the document of each token begins; None: at 0."""

    def to_front(self, tensor: Tensor, dim: int) -> Tensor:
        """`tensor`, with rows along axis 0 and positions along `dim`, in this order."""
        return tensor if self.order is None else _permuted(tensor, self.order, dim)

    def back(self, tensor: Tensor, dim: int) -> Tensor:
        """What `to_front` undid."""
        return tensor if self.order is None else _permuted(tensor, self.order.argsort(-1), dim)


def rows_of_positions(positions: Tensor) -> TokenRows:
    """Of rows without padding: a document begins where positions `(B, S)` do not go on by one.

    What transformers goes by where it is given no mask.
    """
    places = torch.arange(positions.shape[1], device=positions.device)
    is_start = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)
    return TokenRows(None, torch.where(is_start, places, 0).cummax(1).values)


def rows_of_documents(positions: Tensor) -> TokenRows:
    """Of rows without padding, in which positions `(B, S)` count from 0 in each document."""
    places = torch.arange(positions.shape[1], device=positions.device)
    return TokenRows(None, (places - positions).clamp(min=0))


def rows_of_mask(mask: Tensor) -> TokenRows:
    """Of a call with a mask: `(B, S)`, true at tokens, or `(B, 1, S, S)` as transformers has it.

    The latter is bool, or 0 where a key is seen; documents show in it as well as padding.
    """
    if mask.dim() == 2:
        return TokenRows(_tokens_first(mask), None)
    sees = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
    is_token = sees.diagonal(dim1=-2, dim2=-1)
    order = _tokens_first(is_token)
    ahead = is_token.cumsum(-1) - is_token.long()  # real tokens in front of each place
    first = ahead.gather(1, sees.byte().argmax(-1))
    return TokenRows(order, _permuted(first, order, 1))


def padding_of(mask: Tensor | None) -> Tensor | None:
    """`(B, N)` bool, true at tokens, of a mask `(B, N)` or `(B, 1, S, N)` over a cache's keys."""
    if mask is None or mask.dim() == 2:
        return mask
    return (mask if mask.dtype == torch.bool else mask >= 0)[:, 0].any(1)


def _tokens_first(is_token: Tensor) -> Tensor:
    return (~is_token).byte().argsort(dim=-1, stable=True)


def _permuted(tensor: Tensor, order: Tensor, dim: int) -> Tensor:
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = order.shape
    return tensor.take_along_dim(order.view(shape), dim)
