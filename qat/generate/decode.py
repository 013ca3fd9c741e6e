"""Continue prompts token by token on the device, with a static KV cache and graph replay.

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
"""Number of steps between two reads of the new tokens on the host."""
ROOM = 256
"""Cache lengths are rounded up to a multiple of this many positions."""

Seen = Callable[[list[list[int]]], None]


def open_generator(
    source: str, *, device: str, dtype: str
) -> tuple["LanguageModel | Decoder", PreTrainedTokenizerBase]:
    """Open a model for generation and its tokenizer; as a packed `Decoder` where supported.

    Otherwise the model itself is returned, with its quantized weights formed once.

    Raises:
        CheckpointError: no such model or tokenizer.
        ConfigError: the device is missing or cannot compute in `dtype`.
    """
    model = load_model(source, device=device, dtype=dtype)
    tokenizer = load_tokenizer(source)
    if Decoder.fits(model):
        return Decoder(model), tokenizer
    form_weights(model.model, model.dtype)
    return model, tokenizer


@dataclass(frozen=True)
class Sampling:
    """Parameters for drawing the next token."""

    temperature: float
    """Softmax temperature of the draw; 0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling: draw from the smallest set of tokens with this probability mass."""

    def draw(self, logits: Tensor) -> Tensor:
        """Draw token ids `(B,)` from logits `(B, V)` with torch's generator of their device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = logits.float() / self.temperature
        if self.top_p < 1:
            ordered, order = scaled.sort(-1)
            rare = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            rare[:, -1] = False
            scaled = scaled.masked_fill(rare.scatter(-1, order, rare), -torch.inf)
        # exponential race: token i with rate p_i is first with probability p_i
        times = torch.empty_like(scaled).exponential_()
        return (scaled.softmax(-1) / times).argmax(-1)


class Decoder:
    """Continues up to 8 prompts at once with `DecodeStep`, which replaces the model's linears."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.step = model, DecodeStep(model)
        self._backend = on(model.device)

    @staticmethod
    def fits(model: LanguageModel) -> bool:
        """Return whether the device captures graphs and the model's family is supported."""
        return on(model.device).records and DecodeStep.fits(model)

    def generate(
        self,
        ids: Tensor,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        ends: Collection[int] = (),
        seen: Seen | None = None,
    ) -> list[list[int]]:
        """Return new tokens for each of the prompts `ids` `(B, S)`, up to the first of `ends`.

        `seen` receives the tokens since its last call, every few steps. Draws use torch's generator
        (`qat.backend.device.seeded`).

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
        """Prefill the prompts, draw the first token, and capture the step that draws all others."""
        ids = ids.to(self.model.device)
        num_positions = -(-(ids.shape[1] + max_new_tokens) // ROOM) * ROOM
        logits, caches = self.step.prefill(ids, num_positions)
        run = Generation(self.step, caches, self.step.angles(num_positions), sampling)
        run.start(sampling.draw(logits), ids.shape[1], max_new_tokens)
        if max_new_tokens > 1 and self._backend.records:
            run.record(self._backend)
        return run


class Generation:
    """The state of a running generation, at fixed addresses so that a graph can be replayed."""

    def __init__(
        self, step: DecodeStep, caches: list[Cache], angles: Angles, sampling: Sampling
    ) -> None:
        self._step, self._caches, self._angles = step, caches, angles
        self._sampling = sampling
        self.advance: Callable[[], None] = self._advance

    def start(self, first: Tensor, length: int, max_new_tokens: int) -> None:
        """Start with the first new tokens `first` `(B,)` after prompts of the given length."""
        self._token = first.clone()
        self._position = torch.tensor([length], device=first.device)
        self._count = torch.ones(1, dtype=torch.int64, device=first.device)
        self.said = first.new_zeros(first.shape[0], max_new_tokens)
        """New tokens `(B, max_new_tokens)`; zeros where none was drawn yet."""
        self.said[:, 0] = first

    def record(self, backend: Backend) -> None:
        """Capture one step as a graph and replay it from now on.

        A warm-up step runs first; its effect on the state is undone.
        """
        state = (self._token, self._position, self._count, self.said)
        kept = [tensor.clone() for tensor in state]
        self._advance()
        for tensor, old in zip(state, kept, strict=True):
            tensor.copy_(old)
        self.advance, _ = backend.record(self._advance)

    @torch.no_grad()
    def _advance(self) -> None:
        """Draw one more token for each sequence."""
        logits = self._step.logits(self._token, self._position, self._caches, self._angles)
        self._token.copy_(self._sampling.draw(logits))
        self.said.index_copy_(1, self._count, self._token[:, None])
        self._position += 1
        self._count += 1


def until_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """Return `ids` up to and including the first of `ends`."""
    stop = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: stop + 1]
