"""Fast decoding as the core sees it: `qat.models.decoding.Decoding`.

Functions import what they need: a model that only answers needs nothing of training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qat.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qat.data.reader import TeacherCache
    from qat.evaluate.config import GenerateConfig
    from qat.extensions.decode.decoder import Decoder
    from qat.extensions.decode.draft import Drafted
    from qat.extensions.decode.packed_reader import PackedReader
    from qat.extensions.decode.rollout import Rollouts
    from qat.models.language_model import LanguageModel
    from qat.train.config import RolloutConfig
    from qat.train.step_config import StepConfig


def reader() -> PackedReader:
    """Return what multiplies by the packed indices of one linear."""
    from qat.extensions.decode.packed_reader import PackedReader

    return PackedReader()


def decoder(model: LanguageModel) -> Decoder | None:
    """Return the model as a decoder where the device captures graphs and its family is known."""
    from qat.extensions.decode.decoder import Decoder

    return Decoder(model) if Decoder.fits(model) else None


def drafted(
    teacher: LanguageModel | Decoder, tokenizer: PreTrainedTokenizerBase, config: GenerateConfig
) -> Drafted:
    """Return the teacher as a decoder whose tokens a student drafts."""
    from qat.extensions.decode.draft import open_drafted

    return open_drafted(teacher, tokenizer, config)


def rollouts(
    student: LanguageModel,
    cache: TeacherCache,
    config: RolloutConfig,
    step: StepConfig,
    *,
    end: int | None,
    ranks: Ranks = ALONE,
) -> Rollouts:
    """Return the student's own rows of the steps."""
    from qat.extensions.decode.rollout import Rollouts

    return Rollouts(student, cache, config, step, end=end, ranks=ranks)
