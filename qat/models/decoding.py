"""Fast decoding, an extension that the core asks through one interface.

Without it packed linears form their weights to multiply, and transformers' own loop continues
texts. Only training on the student's own text cannot do without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor, nn

from qat.hooks import extension, hooks
from qat.nn.quant_linear import FrozenLutLinear, Reader
from qat.ranks import ALONE, Ranks

if TYPE_CHECKING:  # rooms above this one, and what loads transformers, which loads hf_quantizer
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from qat.data.packing import Batch
    from qat.data.reader import TeacherCache
    from qat.evaluate.config import GenerateConfig
    from qat.generate.sampling import Sampling
    from qat.models.language_model import LanguageModel
    from qat.train.config import RolloutConfig
    from qat.train.step_config import StepConfig

GROUP, NAME = "qat.decoding", "decode"
ROLLOUTS = "rollout."
"""Prefix of the tensors of `Rollouts` in a checkpoint."""


class Decoder(Protocol):
    """A model that is continued from packed weights."""

    model: LanguageModel

    def generate(
        self,
        ids: Tensor,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        ends: Collection[int] = (),
        seen: Callable[[list[list[int]]], None] | None = None,
    ) -> list[list[int]]:
        """Return new tokens for each of the prompts `ids` `(B, S)`, up to the first of `ends`.

        `seen` receives the tokens since its last call, every few steps.
        """


class Drafted(Decoder, Protocol):
    """A teacher whose tokens a student drafts."""

    accepted_length: float | None
    """Mean number of tokens per pass of the teacher in the latest text; None without a pass."""


class Rollouts(Protocol):
    """The rows of each step in which the student continues a prompt of the cache itself."""

    order: np.ndarray
    """`(B,)`: order of a micro-batch's sequences, those that only give a prompt last."""
    longest: int
    """Most tokens that the student generates in a row."""

    def needed(self, step: int) -> bool:
        """Return whether `into` generates rows for this step."""

    def into(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Return the micro-batches of a step, on the host, the student's rows being the last."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the latest step's rows over all ranks; all ranks call this together."""

    def state(self) -> dict[str, Tensor]:
        """Return all ranks' waiting rows for a checkpoint; all ranks call this together."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a checkpoint's `state`, on any number of ranks."""


class Decoding(Protocol):
    """The interface of the module that an entry point of the group `qat.decoding` names."""

    def reader(self) -> Reader:
        """Return what multiplies by the packed indices of one linear."""

    def decoder(self, model: LanguageModel) -> Decoder | None:
        """Return the model, whose linears are replaced, as a decoder; None if unsupported."""

    def drafted(
        self,
        teacher: LanguageModel | Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerateConfig,
    ) -> Drafted:
        """Return the teacher as a decoder whose tokens the student of `config` drafts."""

    def rollouts(
        self,
        student: LanguageModel,
        cache: TeacherCache,
        config: RolloutConfig,
        step: StepConfig,
        *,
        end: int | None,
        ranks: Ranks = ALONE,
    ) -> Rollouts:
        """Return the student's own rows; call it before the layers of the student are compiled.

        Args:
            step: the steps whose last rows these are.
            end: the tokenizer's end-of-text token, in addition to those that the model names.
        """


def load_decoding() -> Decoding:
    """Return the extension.

    Raises:
        ConfigError: it is not installed.
    """
    return cast(Decoding, extension(GROUP, NAME))


def open_decoder(model: LanguageModel) -> Decoder | None:
    """Return `model`, which it changes, as a decoder; None without one that supports it."""
    return load_decoding().decoder(model) if NAME in hooks(GROUP) else None


def read_packed(linears: nn.Module) -> None:
    """Let packed linears multiply without gradients straight from their indices, if they can.

    Called where a model is returned to be run: when a checkpoint is opened, and by `qat.quantize`.
    Training and conversion form every weight that they compute with.
    """
    if NAME in hooks(GROUP):
        for module in linears.modules():
            if isinstance(module, FrozenLutLinear):
                module.reader = load_decoding().reader()
