"""Continue prompts token by token on the device, with a static KV cache and graph replay.

Shapes: B sequences, S tokens of a prompt, V words.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from qat.backend.base import Backend
from qat.backend.device import on
from qat.extensions.decode.kernels.cache import Angles, Cache
from qat.extensions.decode.kernels.lut_matvec import MOST_VECTORS
from qat.extensions.decode.step import DecodeStep
from qat.generate.sampling import Sampling, until_end
from qat.models.language_model import LanguageModel

LOOK_EVERY = 8
"""Number of steps between two reads of the new tokens on the host."""
ROOM = 256
"""Cache lengths are rounded up to a multiple of this many positions."""

Seen = Callable[[list[list[int]]], None]


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
        """Capture one step as a graph and replay it from now on."""
        state = (self._token, self._position, self._count, self.said)
        self.advance = recorded(self._advance, state, backend)

    @torch.no_grad()
    def _advance(self) -> None:
        """Draw one more token for each sequence."""
        logits = self._step.logits(self._token, self._position, self._caches, self._angles)
        self._token.copy_(self._sampling.draw(logits))
        self.said.index_copy_(1, self._count, self._token[:, None])
        self._position += 1
        self._count += 1


def recorded(
    advance: Callable[[], None], state: Sequence[Tensor], backend: Backend
) -> Callable[[], None]:
    """Capture `advance`, which changes `state` in place, as a graph; return its replay.

    A warm-up runs first; its effect on the state is undone.
    """
    kept = [tensor.clone() for tensor in state]
    advance()
    for tensor, old in zip(state, kept, strict=True):
        tensor.copy_(old)
    replay, _ = backend.record(advance)
    return replay
