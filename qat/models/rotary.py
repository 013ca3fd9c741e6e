"""Rotary embeddings whose angles depend on a length: each document gets those of its own length.

transformers picks the factors of longrope (Phi-3, Phi-4-mini) and the base of dynamic NTK by the
longest position of a whole batch. A short document would then be read with the angles of a longer
one that was packed or batched with it, so what a model says would depend on the batch.

Shapes: B rows, S positions.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig, PreTrainedModel

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
    """Return whether the angles of `model` depend on how long a text is."""
    return any(_depends_on_length(kind) for module in model.modules() for kind in _kinds(module))


def document_lengths(position_ids: Tensor) -> Tensor:
    """Count the positions of each position's document, `(..., S)` int64 like `position_ids`.

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
        """Return the angles of the module's own forward, for positions `(B, S)`."""
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


# Names that transformers 4, and programs written for it, read rotary settings by. A program that
# misses one takes a default without a word.

NOT_TEXT = ("vision", "audio")
"""The prefixes of the keys whose configurations play no part in reading text."""
EXACT_SCALING = dict.fromkeys(("phi3", "phi4_multimodal"), ("type", "short_factor", "long_factor"))
"""All keys that `rope_scaling` may have in these families."""


def with_older_names(config: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """The `values` of a config.json of `config`, with the rotary settings of transformers 4 too.

    Configurations inside it, such as the text part of a model that sees, get theirs.
    """
    found = {**values, **_older_names(config)}
    for key in config.sub_configs:
        if isinstance(values.get(key), dict) and not key.startswith(NOT_TEXT):
            found[key] = with_older_names(getattr(config, key), values[key])
    return found


def _older_names(config: PreTrainedConfig) -> dict[str, Any]:
    ropes = getattr(config, "rope_parameters", None) or {}
    rope, local = ropes.get("full_attention", ropes), ropes.get("sliding_attention") or {}
    if not rope.get("rope_theta"):  # one for each kind of layer, none of them known here
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
    # transformers 5 prefers the older names, and some of its families read them otherwise
    again = type(config).from_dict(copy.deepcopy({**config.to_dict(), **both}))
    return both if _without_type(again.rope_parameters) == _without_type(ropes) else found


def _without_type(ropes: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings without the older name of `rope_type`, in all of their parts."""
    return {
        key: _without_type(value) if isinstance(value, dict) else value
        for key, value in ropes.items()
        if key != "type"
    }
