"""Rotary embeddings whose angles depend on a length: each document gets those of its own length.

transformers picks the factors of longrope (Phi-3, Phi-4-mini) and the base of dynamic NTK by the
longest position of a whole batch. A short document would then be read with the angles of a longer
one that was packed or batched with it, so what a model says would depend on the batch.

Shapes: B rows, S positions.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

LONGROPE, DYNAMIC = "longrope", "dynamic"


def rotate_by_document(model: PreTrainedModel) -> None:
    """Let the rotary embeddings of `model` see each document alone; a second call changes nothing.

    A document ends where the next position is not larger. Each gets the angles that transformers
    gives to a batch of that document alone.
    """
    for module in model.modules():
        is_done = isinstance(vars(module).get("forward"), _ByDocument)
        if not is_done and any(map(_depends_on_length, _kinds(module))):
            module.forward = _ByDocument(module)


def reads_lengths(model: PreTrainedModel) -> bool:
    """Whether the angles of `model` depend on how long a text is."""
    return any(_depends_on_length(kind) for module in model.modules() for kind in _kinds(module))


def document_lengths(position_ids: Tensor) -> Tensor:
    """How many positions the document of each position has, `(..., S)` int64 like `position_ids`.

    A row that continues a cached one counts the positions before it.
    """
    S = position_ids.shape[-1]
    places = torch.arange(S, device=position_ids.device)
    ends = torch.ones_like(position_ids, dtype=torch.bool)
    ends[..., :-1] = position_ids[..., 1:] <= position_ids[..., :-1]
    last = torch.where(ends, places, S - 1).flip(-1).cummin(-1).values.flip(-1)
    return position_ids.gather(-1, last) + 1


def _kinds(module: nn.Module) -> list[str]:
    """The kinds of a rotary embedding: one, or one per kind of layer; none of other modules."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return [*kinds.values()]
    return [kinds] if isinstance(kinds, str) else []


def _depends_on_length(kind: str) -> bool:
    return kind == LONGROPE or DYNAMIC in kind  # transformers asks in the same way


class _ByDocument:
    """The forward of a rotary embedding, run for each length by itself."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward

    def __call__(
        self, x: Tensor, position_ids: Tensor | None = None, layer_type: str | None = None
    ) -> Any:
        """As the module's own forward, for positions `(B, S)`."""
        module, given = self._module, {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if position_ids is None or not _depends_on_length(kind):
            return self._forward(x, position_ids, **given)
        lengths = document_lengths(position_ids)[..., None]
        if position_ids.dim() == 3:
            lengths = lengths.amax(0)  # positions of three axes, which text counts alike

        def ending_at(last: int, positions: Tensor) -> Any:
            """The angles of `positions` in rows that end with the position `last`."""
            end = position_ids.new_full((*position_ids.shape[:-1], 1), last)
            found = self._forward(x, torch.cat([positions, end], -1), **given)
            return tree_map(lambda angles: angles[..., :-1, :], found)

        if kind == LONGROPE:
            limit = _longrope_limit(module, layer_type)
            short = ending_at(limit - 1, position_ids.clamp(max=limit - 1))
            long = ending_at(limit, position_ids)
            return tree_map(partial(torch.where, lengths > limit), long, short)
        lengths, found = lengths.clamp(min=module.original_max_seq_len), None
        for length in lengths.unique().tolist():  # waits for the device, as transformers does
            self._forward(x, position_ids.new_zeros(1, 1), **given)  # forgets a longer text's base
            some = ending_at(length - 1, position_ids.clamp(max=length - 1))
            is_its = lengths == length
            found = some if found is None else tree_map(partial(torch.where, is_its), some, found)
        return found


def _longrope_limit(module: nn.Module, layer_type: str | None) -> int:
    """Positions of the longest document that the short factors are for."""
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return parameters["original_max_position_embeddings"]
