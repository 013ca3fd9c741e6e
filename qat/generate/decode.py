"""Continue prompts token by token on the device: a static cache, each step one recorded graph.

Shapes: B sequences, S tokens of a prompt, V words.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.backend.base import Backend
from qat.backend.device import on
from qat.generate.step import DecodeStep
from qat.kernels.cache import Angles, Cache
from qat.kernels.lut_matvec import MOST_VECTORS
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.nn.step import form_weights

LOOK_EVERY = 8
"""Steps between two looks at what was said."""
ROOM = 256
"""Positions of a cache come in multiples of it."""

Seen = Callable[[list[list[int]]], None]


def open_speaker(
    source: str, *, device: str, dtype: str
) -> tuple["LanguageModel | Decoder", PreTrainedTokenizerBase]:
    """The model that generates and its tokenizer; a packed decoder where one fits.

    Else the model itself, its quantized weights formed once.

    Raises:
        CheckpointError: no such model or tokenizer.
        ConfigError: the device is not there or cannot compute in `dtype`.
    """
    model = load_model(source, device=device, dtype=dtype)
    tokenizer = load_tokenizer(source)
    if Decoder.fits(model):
        return Decoder(model), tokenizer
    form_weights(model.model, model.dtype)
    return model, tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this mass."""

    def draw(self, logits: Tensor) -> Tensor:
        """Token ids `(B,)` for logits `(B, V)`, by torch's generator of their device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = logits.float() / self.temperature
        if self.top_p < 1:
            ordered, order = scaled.sort(-1)
            rare = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            rare[:, -1] = False
            scaled = scaled.masked_fill(rare.scatter(-1, order, rare), -torch.inf)
        # the smallest of exponential times falls to each token with its probability
        times = torch.empty_like(scaled).exponential_()
        return (scaled.softmax(-1) / times).argmax(-1)


class Decoder:
    """Continues prompts of up to 8 sequences by `DecodeStep`, which takes the model over."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.step = model, DecodeStep(model)
        self._backend = on(model.device)

    @staticmethod
    def fits(model: LanguageModel) -> bool:
        """Whether the model's family is known and its device is one that this is made for."""
        return on(model.device).records() and DecodeStep.fits(model)

    def generate(
        self,
        ids: Tensor,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        ends: Collection[int] = (),
        seen: Seen | None = None,
    ) -> list[list[int]]:
        """New tokens for each of the prompts `ids` `(B, S)`, each up to its first of `ends`.

        `seen` gets what was said since its last call, every few tokens. Draws from torch's
        generator (`qat.backend.device.seeded`).

        Raises:
            ValueError: more than 8 prompts.
        """
        if ids.shape[0] > MOST_VECTORS:
            raise ValueError(f"{ids.shape[0]} prompts at once, expected at most {MOST_VECTORS}")
        ends = set(ends)
        run = self.begin(ids, sampling, max_new_tokens)
        said: list[list[int]] = [[] for _ in ids]
        told = 0
        for count in range(1, max_new_tokens + 1):
            if count % LOOK_EVERY == 0 or count == max_new_tokens:
                said = [until_end(row, ends) for row in run.said[:, :count].tolist()]
                if seen is not None:
                    seen([row[told:] for row in said])
                    told = count
                if all(row[-1] in ends for row in said):
                    break
            if count < max_new_tokens:
                run.advance()
        return said

    @torch.no_grad()
    def begin(self, ids: Tensor, sampling: Sampling, max_new_tokens: int) -> "Generation":
        """Read the prompts, draw the first token, and record the step that draws all others."""
        ids = ids.to(self.model.device)
        num_positions = -(-(ids.shape[1] + max_new_tokens) // ROOM) * ROOM
        logits, caches = self.step.prefill(ids, num_positions)
        run = Generation(self.step, caches, self.step.angles(num_positions), sampling)
        run.start(sampling.draw(logits), ids.shape[1], max_new_tokens)
        if max_new_tokens > 1 and self._backend.records():
            run.record(self._backend)
        return run


class Generation:
    """A generation under way: what one step reads and writes, at addresses that stay."""

    def __init__(
        self, step: DecodeStep, caches: list[Cache], angles: Angles, sampling: Sampling
    ) -> None:
        self._step, self._caches, self._angles = step, caches, angles
        self._sampling = sampling
        self.advance: Callable[[], None] = self._advance

    def start(self, first: Tensor, length: int, max_new_tokens: int) -> None:
        """Begin with the tokens `first` `(B,)` behind prompts of that length."""
        self._token = first.clone()
        self._position = torch.tensor([length], device=first.device)
        self._count = torch.ones(1, dtype=torch.int64, device=first.device)
        self.said = first.new_zeros(first.shape[0], max_new_tokens)
        """`(B, max_new_tokens)`: the new tokens; those not drawn yet are zeros."""
        self.said[:, 0] = first

    def record(self, backend: Backend) -> None:
        """From now on replay one step; it runs once before, without being seen."""
        state = (self._token, self._position, self._count, self.said)
        kept = [tensor.clone() for tensor in state]
        self._advance()
        for tensor, old in zip(state, kept, strict=True):
            tensor.copy_(old)
        self.advance, _ = backend.record(self._advance)

    @torch.no_grad()
    def _advance(self) -> None:
        """One token more for each sequence."""
        logits = self._step.logits(self._token, self._position, self._caches, self._angles)
        self._token.copy_(self._sampling.draw(logits))
        self.said.index_copy_(1, self._count, self._token[:, None])
        self._position += 1
        self._count += 1


def until_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """`ids` up to their first of `ends`, that one included."""
    stop = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: stop + 1]
