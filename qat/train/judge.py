"""Evaluation during training: on the cache's held-out split, and by a sample of generated text.

`Judged` identifies the held-out sequences of a run, the same from the first evaluation to the last;
`Judge` evaluates on them (`qat.observe.runs.score` of the result decides which student is best),
and `CodeWatch` counts the codes that changed since the previous evaluation.

Shapes: N sequences, S positions.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Self

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from qat.backend.device import on
from qat.convert.calibrate import TokenBatch
from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.evaluate.divergence import divergence_by_source, sequences_by_source
from qat.generate.text import generate_text
from qat.logs import progress
from qat.models.attention import sparse_attention
from qat.models.language_model import LanguageModel
from qat.models.regions import as_written
from qat.models.stored_state import quantized_modules
from qat.nn.quant_weight import LatentWeight
from qat.quant.weight import pack, unpack
from qat.train.config import TrainConfig

SAMPLE_TOKENS = 32
"""Length of each evaluation's sample: short enough for a log line."""
LOOKED_AT = 2
"""Sequences for measuring sparse attention, which costs as much as dense attention, and for
counting what it reads in a logged step."""
CHUNK = 256
"""Held-out sequences read at a time while searching for those of the evaluation."""
CODES_PREFIX = "codes."
"""Prefix of a `CodeWatch`'s tensors in a checkpoint."""


class Judged(NamedTuple):
    """Held-out sequences, identified by their content."""

    marks: list[str]
    """For each sequence, its number of positions and their xxh3-64, such as
    `64:0123456789abcdef`."""
    places: list[int]
    """Index of each sequence in the cache's held-out split."""

    @classmethod
    def first(cls, cache: TeacherCache, count: int) -> Self:
        """Return the first `count` sequences or all that there are, a share of each source."""
        found = sequences_by_source(cache, "held_out", count)
        places = {int(place) for each in found.values() for place in each}
        rows = enumerate(islice(_held_out(cache), max(places, default=-1) + 1))
        marks = [_mark(row, _end(row)) for place, row in rows if place in places]
        return cls(marks, sorted(places))

    @classmethod
    def found(cls, cache: TeacherCache, marks: Sequence[str]) -> Self | None:
        """Return the sequences with these marks, in this order; None if the cache lacks one.

        A sequence that was last, and therefore padded, may have been extended: only its start must
        match.
        """
        wanted: dict[str, deque[int]] = defaultdict(deque)
        for number, mark in enumerate(marks):
            wanted[mark].append(number)
        ends = sorted({_end_of(mark) for mark in marks}, reverse=True)
        places: dict[int, int] = {}
        for place, row in enumerate(_held_out(cache)):
            # longest first: a row may begin like a shorter one
            same = (wanted[m] for m in (_mark(row, end) for end in ends) if wanted.get(m))
            if (numbers := next(same, None)) is not None:
                places[numbers.popleft()] = place
            if len(places) == len(marks):
                return cls(list(marks), [places[number] for number in range(len(marks))])
        return None

    def ends(self) -> np.ndarray:
        """Return the number of positions of each sequence that may count, `(N,)` int64."""
        return np.array([_end_of(mark) for mark in self.marks], dtype=np.int64)


def _held_out(cache: TeacherCache) -> Iterator[np.ndarray]:
    """Yield tokens, positions and the mask of each held-out sequence, `(3, S)` int64."""
    total = cache.num_sequences("held_out")
    for start in range(0, total, CHUNK):
        batch = cache.batch(range(start, min(start + CHUNK, total)), "held_out", targets=())
        parts = (batch.input_ids, batch.position_ids, batch.mask.long())
        yield from np.stack([part.numpy() for part in parts], axis=1)  # (B, 3, S), row by row


def _looked_at(batch: Batch) -> TokenBatch:
    return TokenBatch(batch.input_ids[:LOOKED_AT], batch.position_ids[:LOOKED_AT])


def _end(row: np.ndarray) -> int:
    """Return the number of positions up to the label of the last one that counts."""
    counted = np.flatnonzero(row[2])
    return min(row.shape[1], int(counted[-1]) + 2) if len(counted) else 1


def _mark(row: np.ndarray, end: int) -> str:
    return f"{end}:{xxhash.xxh3_64_hexdigest(row[:, :end].tobytes())}"


def _end_of(mark: str) -> int:
    return int(mark.partition(":")[0])


class Judge:
    """Evaluates one student on the same held-out sequences every time.

    These are the `judged` ones; without them, the first of the cache, as many as `config` says.
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
        self.num_sequences = config.eval_sequences
        self.judged = judged
        self.batch_size = config.batch_size
        self._prompt = config.sample_prompt

    def verdict(self, dtype: torch.dtype) -> dict[str, object]:
        """Return KD, tail KL, top-1 agreement, perplexity and a greedy sample, in `dtype`.

        Also measures of sparse attention. The student's weights must be formed
        (`qat.nn.step.form_weights`).
        """
        with on(self.student.device).autocast(dtype):
            divergence, by_source = divergence_by_source(self.student, self._by_source())
            sample = generate_text(
                self.student,
                self.tokenizer,
                self._prompt,
                max_new_tokens=SAMPLE_TOKENS,
                temperature=0.0,
                raw=True,
            )
            sparse = self._sparse_attention()
        return {**divergence._asdict(), **by_source, **sparse, "sample": sample.text}

    def _sparse_attention(self) -> dict[str, object]:
        """Measure sparse attention on a few held-out sequences; empty for dense attention."""
        sparse = sparse_attention(self.student.model)
        if sparse is None:
            return {}
        tokens = _looked_at(next(next(iter(self._by_source().values()))))
        with as_written(self.student.model):
            return sparse.measure(self.student, tokens)

    def count_reads(
        self, batch: Batch, dtype: torch.dtype, event: Callable[..., None]
    ) -> dict[str, float]:
        """Count what sparse attention reads in the first rows of a step; empty for dense attention.

        The student runs once more on these rows, uncompiled, with the weights of this moment.
        All ranks call this together: each layer's weights may be gathered as it runs. The first
        difference from the prediction is passed to `event`, as a kind and facts.
        """
        sparse, device = sparse_attention(self.student.model), on(self.student.device)
        if sparse is None:
            return {}
        tracing = device.tracing.compiling("the count of blocks read")
        with device.autocast(dtype), tracing, as_written(self.student.model):
            return sparse.count_reads(self.student, _looked_at(batch), event)

    def _by_source(self) -> dict[str, Iterator[Batch]]:
        judged = self.judged or Judged.first(self.cache, self.num_sequences)
        places, ends = np.array(judged.places), judged.ends()
        size = min(self.batch_size, len(places))
        found = sequences_by_source(self.cache, "held_out")
        chosen = {n: np.isin(places, rows) for n, rows in found.items()}
        return {
            n: self._batches(places[of], ends[of], size) for n, of in chosen.items() if of.any()
        }

    def _batches(self, found: np.ndarray, ends: np.ndarray, size: int) -> Iterator[Batch]:
        """Yield the held-out sequences `found`, of which the positions before `ends` may count."""
        count = len(found)
        inside_NS = np.arange(self.cache.sequence_length) < ends[:, None]
        with progress("judging", count, "sequences") as ticker:
            for start in range(0, count, size):
                # the last batch is padded, because a compiled model has one shape
                places = np.arange(start, start + size)
                batch = self.cache.batch(found[places % count], split="held_out")
                counts = inside_NS[places % count] & (places < count)[:, None]  # (B, S)
                yield batch._replace(mask=batch.mask & torch.from_numpy(counts))
                ticker.advance(min(size, count - start))


class CodeWatch:
    """Counts which codes changed since it was last called; it keeps them packed."""

    def __init__(self, model: nn.Module) -> None:
        weights = quantized_modules(model).items()
        self._weights = {name: m for name, m in weights if isinstance(m, LatentWeight)}
        self._last: dict[str, Tensor] = {}

    def flipped_frac(self) -> float | None:
        """Return the share of codes that differ from those of the previous call, in [0, 1].

        None at the first call, and without latent weights. It compares the two states only: a code
        that changed and changed back has not flipped. Waits for the device.
        """
        flipped, codes = [], 0
        for name, weight in self._weights.items():
            indices, spec = weight.indices(), weight.spec
            if name in self._last:
                before = unpack(self._last[name], spec.bits, indices.shape[1])
                flipped.append((indices != before).sum())
                codes += indices.numel()
            self._last[name] = pack(indices, spec.bits)
        if not flipped:
            return None
        total = torch.stack(flipped).sum()
        backend = on(total.device)
        backend.step_end()
        return backend.read([total])[0] / codes

    def state(self) -> dict[str, Tensor]:
        """Return the stored codes for a checkpoint."""
        return {CODES_PREFIX + name: octets for name, octets in self._last.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the codes of a checkpoint's `state`."""
        for name, weight in self._weights.items():
            if CODES_PREFIX + name in state:
                self._last[name] = state[CODES_PREFIX + name].to(weight.codebook.device)
