"""Checks that a model's body and head, run one after the other, compute what the model does."""

from functools import cache

import torch
from torch import Tensor

from qat.errors import CheckpointError
from qat.models.language_model import LanguageModel
from qat.models.noise import TF32_EPS, distance, disturbed, hooked, signs
from qat.models.streamed import StreamedModel
from qat.nn.quant_linear import quant_linears
from qat.nn.step import form_weights, release_weights
from qat.nn.swap import body_of
from qat.process import GIB, available_gib

MOST_OF_NOISE = 2.0
"""Largest allowed difference of two ways through the body, as a multiple of what a rounding in
every layer changes."""
SHARE_OF_ROOM = 1 / 4
"""Share of the host's free memory that weights formed for the check may take."""


def check_split(model: LanguageModel) -> None:
    """Check that `model` can be run as a body and a head; see `_check_split` for errors.

    On a host with room its packed weights are formed once, for all forwards of the check.
    """
    weights = sum(
        each.out_features * each.in_features for each in quant_linears(model.model).values()
    )
    room = available_gib() if model.device.type == "cpu" else None
    if room is None or weights * model.dtype.itemsize > SHARE_OF_ROOM * room * GIB:
        _check_split(model)
        return
    form_weights(model.model, model.dtype)
    try:
        _check_split(model)
    finally:
        release_weights(model.model)


@torch.no_grad()
def _check_split(model: LanguageModel) -> None:
    """Compare head and body, each run separately, with the whole model on four tokens.

    Also compare the body's earlier outputs when the last token is another one.

    Raises:
        CheckpointError: the model changes its hidden states or logits in a way that is not
            supported here, reads later tokens, or computes values that are not finite.
    """
    if model.head is None:
        raise CheckpointError(
            f"{type(model.model).__name__} has no output embedding, expected a causal language "
            "model; choose another model"
        )
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    bodies: list[Tensor] = []
    # OPT's head skips the base model
    parts = {model.model.get_decoder(), body_of(model.model)} - {model.model}
    with hooked(parts, lambda _m, _a, output: bodies.append(output[0])):
        whole = model.model(input_ids=ids, use_cache=False).logits
    if not bodies or not whole.isfinite().all():
        found = "logits that are not finite" if bodies else "logits without its base model"
        raise CheckpointError(
            f"{type(model.model).__name__} gives {found} in {model.dtype}, expected numbers from "
            "its head; try --dtype bf16 or fp32, copy the weights anew, or choose another model"
        )
    _check_head(model, bodies[-1], whole)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    found = model.hidden(ids, positions)

    @cache
    def noise() -> float:
        """Return how far a rounding in every layer moves `found`.

        It depends on the model and is large for deep ones with large values in a few channels.
        """
        with disturbed(model.model, max(torch.finfo(found.dtype).eps, TF32_EPS)):
            return distance(model.hidden(ids, positions), found)

    off = distance(found, model.as_read(bodies[-1]))
    if off and not off <= MOST_OF_NOISE * noise():
        raise CheckpointError(
            f"{type(model.model).__name__} computes other hidden states where documents are "
            f"packed (off by {off:.2g} of their size, where rounding gives {noise():.2g}), "
            "expected the same; choose another model"
        )
    before = slice(0, ids.shape[1] - 1)
    other = model.hidden(ids.index_fill(1, positions[0, -1:], 0), positions)
    off = distance(other[:, before], found[:, before])
    if off and not off <= MOST_OF_NOISE * noise():
        raise CheckpointError(
            f"{type(model.model).__name__} reads tokens that come later (another last one "
            f"changes the hidden states before it by {off:.2g} of their size, where rounding "
            f"gives {noise():.2g}), expected a causal language model; choose another model"
        )


@torch.no_grad()
def check_layers(model: LanguageModel) -> None:
    """Compare `hidden_of` with `hidden`, bit by bit, if the model stays in its files.

    Raises:
        CheckpointError: this architecture cannot be run layer by layer.
    """
    if not isinstance(model, StreamedModel):
        return
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    batch = ids, torch.arange(4, device=model.device)[None]
    (found,) = model.hidden_of([batch])
    if not torch.equal(found, model.hidden(*batch)):
        raise CheckpointError(
            f"{type(model.model).__name__} computes other hidden states layer by layer, which "
            "--device-map disk needs, expected the same; choose another"
        )


def _check_head(model: LanguageModel, body: Tensor, whole: Tensor) -> None:
    """Compare the logits of the head on the same hidden states: only the last bit may differ.

    If the model scales logits and we scale hidden states, the effect of that rounding is
    allowed too.
    """
    wished = getattr(model.head, "in_features", body.shape[-1])
    if body.shape[-1] != wished:
        raise CheckpointError(
            f"{type(model.model).__name__} makes {wished} features of its {body.shape[-1]} "
            "hidden ones before the head, expected nothing between; choose another model"
        )
    # some compute in 16 bits and return float32
    eps = max(torch.finfo(dtype).eps for dtype in (whole.dtype, model.dtype))
    hidden = model.as_read(body)
    split = model.logits(hidden)
    difference = (split.float() - whole.float().to(split.device)).abs().max().item()
    most = eps * whole.abs().max().item()
    if model.gain != 1:
        off = model.logits(
            hidden + hidden.abs() * eps * signs(hidden, torch.Generator().manual_seed(0))
        )
        most += MOST_OF_NOISE * (off.float() - split.float()).abs().max().item()
    # negated, so that NaN counts as different
    if not difference <= most:
        raise CheckpointError(
            f"{type(model.model).__name__} gives other logits than its head makes of its hidden "
            f"states (by up to {difference:.3g}), expected a plain or soft-capped head; choose "
            "another model"
        )
