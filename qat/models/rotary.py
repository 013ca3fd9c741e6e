"""Length-dependent rotary embeddings: each document gets the angles of its own length.

transformers selects the factors of longrope (Phi-3, Phi-4-mini) and the base of dynamic NTK by the
longest position of a whole batch. A short document would then get the angles of a longer one that
is packed or batched with it, so the output would depend on the batch.

Shapes: B rows, S positions.
"""

import copy
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig, PreTrainedModel

LONGROPE, DYNAMIC = "longrope", "dynamic"


def rotate_by_document(model: PreTrainedModel) -> None:
    """Compute rotary embeddings of `model` for each document alone; a second call changes nothing.

    A document ends where the next position is not larger. Each gets the angles that transformers
    computes for a batch of that document alone.
    """
    for module in model.modules():
        is_done = isinstance(vars(module).get("forward"), _ByDocument)
        if not is_done and any(map(_depends_on_length, _kinds(module))):
            module.forward = _ByDocument(module)


def reads_lengths(model: PreTrainedModel) -> bool:
    """Return whether the angles of `model` depend on the length of the text."""
    return any(_depends_on_length(kind) for module in model.modules() for kind in _kinds(module))


def document_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of each position's document, `(..., S)` int64 like `position_ids`.

    A row that continues a cached one counts the positions before it.
    """
    S = position_ids.shape[-1]
    places = torch.arange(S, device=position_ids.device)
    ends = torch.ones_like(position_ids, dtype=torch.bool)
    ends[..., :-1] = position_ids[..., 1:] <= position_ids[..., :-1]
    last = torch.where(ends, places, S - 1).flip(-1).cummin(-1).values.flip(-1)
    return position_ids.gather(-1, last) + 1


def _kinds(module: nn.Module) -> list[str]:
    """Return the types of a rotary embedding, one or one per layer type; else an empty list."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return [*kinds.values()]
    return [kinds] if isinstance(kinds, str) else []


def _depends_on_length(kind: str) -> bool:
    return kind == LONGROPE or DYNAMIC in kind  # the same test as in transformers


class _ByDocument:
    """The forward of a rotary embedding, run separately for each length."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward

    def __call__(
        self, x: Tensor, position_ids: Tensor | None = None, layer_type: str | None = None
    ) -> Any:
        """Return the angles of the module's own forward, for positions `(B, S)`."""
        module, given = self._module, {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if position_ids is None or not _depends_on_length(kind):
            return self._forward(x, position_ids, **given)
        lengths = document_lengths(position_ids)[..., None]
        if position_ids.dim() == 3:
            lengths = lengths.amax(0)  # positions of three axes, which are equal for text

        def ending_at(last: int, positions: Tensor) -> Any:
            """Return the angles of `positions` in rows that end with the position `last`."""
            end = position_ids.new_full((*position_ids.shape[:-1], 1), last)
            found = self._forward(x, torch.cat([positions, end], -1), **given)
            return tree_map(lambda angles: angles[..., :-1, :], found)

        if kind == LONGROPE:
            limit = _longrope_limit(module, layer_type)
            short = ending_at(limit - 1, position_ids.clamp(max=limit - 1))
            long = ending_at(limit, position_ids)
            return tree_map(partial(torch.where, lengths > limit), long, short)
        lengths, found = lengths.clamp(min=module.original_max_seq_len), None
        for length in lengths.unique().tolist():  # synchronizes, as transformers does
            # resets the base of a longer text
            self._forward(x, position_ids.new_zeros(1, 1), **given)
            some = ending_at(length - 1, position_ids.clamp(max=length - 1))
            is_its = lengths == length
            found = some if found is None else tree_map(partial(torch.where, is_its), some, found)
        return found


def _longrope_limit(module: nn.Module, layer_type: str | None) -> int:
    """Return the length of the longest document that uses the short factors."""
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return parameters["original_max_position_embeddings"]


# Names of rotary settings for transformers 4 and programs written for it. A program that does not
# find one uses a default without a warning.

NOT_TEXT = ("vision", "audio")
"""Prefixes of keys whose configurations do not affect text."""
EXACT_SCALING = dict.fromkeys(("phi3", "phi4_multimodal"), ("type", "short_factor", "long_factor"))
"""All keys that `rope_scaling` may have in these families."""


def with_older_names(config: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json `values` of `config` with the rotary settings of transformers 4 added.

    Nested configurations, such as the text part of a vision model, get theirs.
    """
    found = {**values, **_older_names(config)}
    for key in config.sub_configs:
        if isinstance(values.get(key), dict) and not key.startswith(NOT_TEXT):
            found[key] = with_older_names(getattr(config, key), values[key])
    return found


def _older_names(config: PreTrainedConfig) -> dict[str, Any]:
    ropes = getattr(config, "rope_parameters", None) or {}
    rope, local = (ropes.get(key) or {} for key in ("full_attention", "sliding_attention"))
    rope = rope or ropes  # layers of all types share one
    if not rope.get("rope_theta"):  # one per layer type, none of them supported here
        return {}
    found = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key not in found}
    if scaling.get("rope_type", "default") == "default" and set(scaling) <= {"rope_type", "type"}:
        return found
    scaling.setdefault("type", scaling.setdefault("rope_type", "default"))
    # transformers 4 refuses any other key here
    known = EXACT_SCALING.get(config.model_type, scaling.keys())
    both = {**found, "rope_scaling": {key: scaling[key] for key in known if key in scaling}}
    # transformers 5 prefers the older names, and some of its families interpret them differently or
    # warn of them: those that transformers 4 never had
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        try:
            again = type(config).from_dict(copy.deepcopy({**config.to_dict(), **both}))
        except FutureWarning:
            return found
    return both if _without_type(again.rope_parameters) == _without_type(ropes) else found


def _without_type(ropes: dict[str, Any]) -> dict[str, Any]:
    """Return rotary settings without `type`, the older name of `rope_type`, at all levels."""
    return {
        key: _without_type(value) if isinstance(value, dict) else value
        for key, value in ropes.items()
        if key != "type"
    }
