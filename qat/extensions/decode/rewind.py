"""Models with the KV cache of one sequence, which a caller may take back to an earlier position.

Shapes: T new tokens, S tokens of a prompt, V words.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import ModelOutput

from qat.backend.device import on
from qat.errors import ConfigError
from qat.extensions.decode.decoder import ROOM, Decoder
from qat.extensions.decode.kernels.row_attention import row_attention
from qat.extensions.decode.step import DecodeStep
from qat.models.decoding import Decoder as AnyDecoder
from qat.models.language_model import LanguageModel, judging
from qat.models.regions import as_written
from qat.nn.swap import CACHE, body_of


class Rewindable(Protocol):
    """A model that reads one sequence, and goes back when it is given an earlier position."""

    model: LanguageModel
    records: bool
    """True if calls can be captured in a CUDA graph, since they read positions on the device."""

    def begin(self, ids: Tensor, num_positions: int) -> Tensor:
        """Read a prompt `ids` `(1, S)` into a new cache; return the logits `(1, V)` after it."""

    def __call__(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Return the logits `(T, V)` after each of `tokens` `(T,)`, the first at `position` `(1,)`.

        What the cache holds from `position` on is forgotten.
        """


def rewindable(generator: LanguageModel | AnyDecoder) -> Rewindable:
    """Return what `open_generator` opened as a model that can go back.

    Raises:
        ConfigError: its past cannot be shortened, or its device compiles each length.
    """
    if isinstance(generator, LanguageModel):
        return RewindableModel(generator)
    assert isinstance(generator, Decoder)  # the only one that this extension offers
    return RewindableStep(generator.step)


class RewindableStep:
    """A `DecodeStep` over its static cache: to go back is to read fewer positions of it."""

    def __init__(self, step: DecodeStep) -> None:
        self.model, self._step = step.model, step
        self.records = on(step.model.device).records

    def begin(self, ids: Tensor, num_positions: int) -> Tensor:
        """Read a prompt; see `Rewindable`."""
        num_positions = -(-num_positions // ROOM) * ROOM
        logits, self._caches = self._step.prefill(ids, num_positions)
        self._angles = self._step.angles(num_positions)
        return logits

    def __call__(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Read up to 8 tokens; see `Rewindable`."""
        run = partial(self._step.logits, tokens, position, self._caches, self._angles)
        return run() if len(tokens) == 1 else run(attend=row_attention)


class RewindableModel:
    """Any model whose layers keep the keys and values of all positions, by its own forward."""

    records = False

    def __init__(self, model: LanguageModel) -> None:
        self.model, self._cache = model, None
        if on(model.device).is_traced:
            raise ConfigError(
                f"draft: {model.device} compiles each length, expected a CPU or a GPU; leave out "
                "--draft or use another --device"
            )
        probe = self._read(torch.zeros(1, 1, dtype=torch.int64, device=model.device))
        # the cache that the family itself makes: recurrent states and windows have other layers
        kinds = [type(layer) for layer in getattr(probe.get(CACHE), "layers", ())]
        if set(kinds) != {DynamicLayer}:
            other = next((kind.__name__ for kind in kinds if kind is not DynamicLayer), "no cache")
            raise ConfigError(
                f"draft: a {type(model.model).__name__} keeps {other}, expected the keys and "
                "values of all positions, which can be taken back; leave out --draft"
            )

    def begin(self, ids: Tensor, num_positions: int) -> Tensor:  # noqa: ARG002 - the cache grows
        """Read a prompt; see `Rewindable`."""
        self._cache = None
        return self._logits(ids, -1)

    def __call__(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Read tokens; see `Rewindable`."""
        beyond = self._cache.get_seq_length() - int(position)
        if beyond:
            self._cache.crop(-beyond)
        return self._logits(tokens[None], 0)

    def _logits(self, ids: Tensor, first: int) -> Tensor:
        said = self._read(ids)
        self._cache = said[CACHE]
        with torch.no_grad():
            return self.model.logits(self.model.as_read(said.last_hidden_state[0, first:]))

    def _read(self, ids: Tensor) -> ModelOutput:
        past = {} if self._cache is None else {CACHE: self._cache}
        with judging(self.model), as_written(self.model.model):
            return body_of(self.model.model)(input_ids=ids, use_cache=True, **past)
