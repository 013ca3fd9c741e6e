"""The order of a row's tokens and the starts of its documents, from any mask of a model call.

Native Sparse Attention counts blocks from a row's first token, so padding must be moved: real
tokens go to the front, attention runs, and its result is moved back. A padded row then equals the
row alone.

Shapes: B rows (1: all alike), S positions, N positions of a cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenRows(NamedTuple):
    """The order of tokens to compute in, and the start of each token's document."""

    order: Tensor | None = None
    """`(B, S)`: the place that comes first, second, ...: real tokens before padding; None:
    unchanged."""
    first: Tensor | None = None
    """`(B, S)`, in that order: the start of each token's document; None: 0."""

    def to_front(self, tensor: Tensor, dim: int) -> Tensor:
        """Permute `tensor`, with rows along axis 0 and positions along `dim`, into this order."""
        return tensor if self.order is None else _permuted(tensor, self.order, dim)

    def back(self, tensor: Tensor, dim: int) -> Tensor:
        """Undo `to_front`."""
        return tensor if self.order is None else _permuted(tensor, self.order.argsort(-1), dim)


def rows_of_positions(positions: Tensor) -> TokenRows:
    """Return rows without padding; documents start where positions `(B, S)` do not rise by one.

    transformers uses the same rule if it gets no mask.
    """
    places = torch.arange(positions.shape[1], device=positions.device)
    is_start = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)
    return TokenRows(None, torch.where(is_start, places, 0).cummax(1).values)


def rows_of_documents(positions: Tensor) -> TokenRows:
    """Return rows without padding, whose positions `(B, S)` count from 0 in each document."""
    places = torch.arange(positions.shape[1], device=positions.device)
    return TokenRows(None, (places - positions).clamp(min=0))


def rows_of_mask(mask: Tensor) -> TokenRows:
    """Return the rows of a mask: `(B, S)`, true at tokens, or transformers' `(B, 1, S, S)`.

    The latter is bool, or 0 where a key is visible; it shows documents as well as padding.
    """
    if mask.dim() == 2:
        return TokenRows(_tokens_first(mask), None)
    sees = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
    is_token = sees.diagonal(dim1=-2, dim2=-1)
    order = _tokens_first(is_token)
    ahead = is_token.cumsum(-1) - is_token.long()  # real tokens before each place
    first = ahead.gather(1, sees.byte().argmax(-1))
    return TokenRows(order, _permuted(first, order, 1))


def padding_of(mask: Tensor | None) -> Tensor | None:
    """Return `(B, N)` bool, true at tokens, from a cache mask `(B, N)` or `(B, 1, S, N)`."""
    if mask is None or mask.dim() == 2:
        return mask
    return (mask if mask.dtype == torch.bool else mask >= 0)[:, 0].any(1)


def _tokens_first(is_token: Tensor) -> Tensor:
    return (~is_token).byte().argsort(dim=-1, stable=True)


def _permuted(tensor: Tensor, order: Tensor, dim: int) -> Tensor:
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = order.shape
    return tensor.take_along_dim(order.view(shape), dim)
