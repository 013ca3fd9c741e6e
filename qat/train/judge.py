"""Judges a student during training: on the cache's held-out split, and by a sample of its text."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from qat.backend import device as backends
from qat.convert.calibrate import TokenBatch
from qat.data.batch import Batch
from qat.data.reader import TeacherCache
from qat.evaluate.divergence import cached_divergence
from qat.generate.text import generate_text
from qat.logs import progress
from qat.models.language_model import LanguageModel
from qat.models.regions import as_written
from qat.nsa.health import attention_health, health_numbers
from qat.nsa.swap import nsa_modules
from qat.train.config import TrainConfig
from qat.train.judged import Judged

SAMPLE_TOKENS = 32
LOOKED_AT = 2
"""Sequences that sparse attention is looked at on, which costs what dense attention does."""


class Judge:
    """Evaluates one student on the same held-out sequences every time.

    These are the `judged` ones, or else as many of the first as the settings say.
    """

    def __init__(
        self,
        student: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: TeacherCache,
        config: TrainConfig,
        *,
        judged: Judged | None = None,
    ) -> None:
        self.student = student
        self.tokenizer = tokenizer
        self.cache = cache
        self.config = config
        self.judged = judged
        self.backend = backends.select(config.device)

    def verdict(self, dtype: torch.dtype) -> dict[str, object]:
        """KD, tail KL, top-1 agreement, perplexity and a greedy sample, computing in `dtype`.

        Also how sparse attention fares (`qat.nsa.health`). The student's weights are formed
        before (`qat.nn.step.form_weights`).
        """
        with self.backend.autocast(dtype):
            divergence = cached_divergence(self.student, self._batches())
            sample = generate_text(
                self.student,
                self.tokenizer,
                self.config.sample_prompt,
                max_new_tokens=SAMPLE_TOKENS,
                temperature=0.0,
                raw=True,
            )
            sparse = self._sparse_attention()
        return {**divergence._asdict(), **sparse, "sample": sample.text}

    def _sparse_attention(self) -> dict[str, object]:
        """On a few held-out sequences; nothing of dense attention."""
        if not nsa_modules(self.student.model):
            return {}
        batch = next(self._batches())
        tokens = TokenBatch(batch.input_ids[:LOOKED_AT], batch.position_ids[:LOOKED_AT])
        with as_written(self.student.model):
            return health_numbers(attention_health(self.student, tokens))

    def _batches(self) -> Iterator[Batch]:
        count = min(self.config.eval_sequences, self.cache.num_sequences("held_out"))
        found, ends = np.arange(count), np.full(count, self.cache.sequence_length)
        if self.judged is not None:
            found, ends = np.array(self.judged.places), self.judged.ends()
            count = len(found)
        inside_NS = np.arange(self.cache.sequence_length) < ends[:, None]
        size = min(self.config.batch_size, count)
        with progress("judging", count, "sequences") as ticker:
            for start in range(0, count, size):
                # the last batch is filled up, for a compiled model knows one shape
                places = np.arange(start, start + size)
                batch = self.cache.batch(found[places % count], split="held_out")
                counts = inside_NS[places % count] & (places < count)[:, None]
                yield batch._replace(mask=batch.mask & torch.from_numpy(counts))
                ticker.advance(min(size, count - start))


def score(verdict: dict[str, object]) -> float:
    """The number that decides which checkpoint is best (lower is better).

    The tail KL, or what comes next to it where the cache does not hold its targets.
    """
    found = (verdict[key] for key in ("kl_tail_nats", "sampled_ce_nats", "kd_nats"))
    return next(value for value in found if value is not None)
