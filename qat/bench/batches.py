"""What a benchmark trains on: sequences of a teacher cache, or random ones of the same form.

Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qat.backend.base import Backend
from qat.bench.config import DEFAULT_DRAWS, DEFAULT_LENGTH, DEFAULT_TOP_K, MeasureConfig
from qat.data.packing import NO_LABEL, Batch
from qat.data.reader import TeacherCache
from qat.data.sampler import sequence_indices
from qat.errors import ConfigError
from qat.losses.config import check_targets
from qat.models.language_model import LanguageModel

TAIL_MASS = 0.03
"""Share of a random teacher outside its top K: that of a real one at K = 64, about."""


@dataclass(frozen=True)
class Source:
    """Where batches come from, and their sizes."""

    cache: TeacherCache | None
    seq_len: int
    top_k: int
    draws: int
    vocab_size: int
    seed: int

    @property
    def kind(self) -> str:
        """What a record says about the data."""
        return "synthetic" if self.cache is None else f"cache {self.cache.manifest.fingerprint}"

    @property
    def num_sequences(self) -> int | None:
        """Training sequences that there are, or None if they are made up."""
        return None if self.cache is None else self.cache.num_sequences("train")

    def batch(self, batch_size: int, step: int, backend: Backend) -> Batch:
        """`batch_size` sequences in host memory; which ones depends on seed and step alone.

        A cache with fewer sequences repeats them. Random ones are made on the device, for speed.
        """
        if self.cache is not None:
            total = self.cache.num_sequences("train")
            indices = sequence_indices(self.seed, step, batch_size, total)
            return self.cache.batch(indices)
        generator = backend.generator(self.seed + step)
        return random_batch(self, batch_size, generator).to(torch.device("cpu"))


def open_source(config: MeasureConfig, student: LanguageModel) -> Source:
    """The cache of `config`, or random batches where it names none.

    Raises:
        CacheError: the cache cannot be read, or is not one for this student.
        ConfigError: its sequence length or K is not the one asked for, or the loss needs what it
            does not hold.
    """
    vocab_size = student.config.vocab_size
    if config.cache_dir is None:
        top_k = min(config.top_k or DEFAULT_TOP_K, vocab_size - 1)
        draws = DEFAULT_DRAWS if "sampled" in config.losses else 0
        length = config.seq_len or DEFAULT_LENGTH
        longest = student.longest
        if length > longest:
            raise ConfigError(
                f"seq_len={length}, but the student reads at most {longest} positions; lower "
                "--seq-len"
            )
        return Source(None, length, top_k, draws, vocab_size, config.seed)
    cache = TeacherCache.open(config.cache_dir)
    settings = cache.manifest.settings
    _check_same("seq-len", config.seq_len, settings.sequence_length, config)
    _check_same("top-k", config.top_k, settings.top_k, config)
    has_tail = cache.manifest.has_tail
    check_targets(config.losses, settings.top_k, settings.draws, has_tail=has_tail)
    # a shape has no tokenizer of its own: it takes any cache over its vocabulary
    cache.check_student(cache.manifest.tokenizer, vocab_size, student.longest)
    if cache.num_sequences("train") == 0:
        raise ConfigError(
            f"{config.cache_dir} has no training sequences, expected some; rebuild it from more "
            "documents"
        )
    length, top_k, draws = settings.sequence_length, settings.top_k, settings.draws
    return Source(cache, length, top_k, draws, vocab_size, config.seed)


def check_batch_sizes(source: Source, sizes: tuple[int, ...], grad_accum_steps: int) -> None:
    """Refuse a batch with more sequences than the cache has: it would repeat some.

    Raises:
        ConfigError: naming the largest such batch.
    """
    total = source.num_sequences
    if total is not None and max(sizes) * grad_accum_steps > total:
        raise ConfigError(
            f"batch_size={max(sizes)} x grad_accum_steps={grad_accum_steps} is more than the "
            f"{total} training sequences of {source.cache.directory}; lower --batch-size, or leave "
            "out --cache-dir for random sequences"
        )


def random_batch(source: Source, batch_size: int, generator: torch.Generator) -> Batch:
    """Uniform tokens, one document a row, every position counting, on the generator's device.

    The teacher's log-probabilities fall like a power of the rank and sum to `1 - TAIL_MASS`.
    """
    B, S, K, V = batch_size, source.seq_len, source.top_k, source.vocab_size
    here = {"generator": generator, "device": generator.device}
    input_ids = torch.randint(V, (B, S), **here)
    labels = torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=NO_LABEL)
    slope = 1 + torch.rand(B, S, 1, **here)
    ranks = torch.arange(1, K + 1, device=generator.device)
    logprobs = torch.log_softmax(-slope * ranks.log(), -1) + torch.tensor(1 - TAIL_MASS).log()
    counts = torch.ones(B, S, source.draws, device=generator.device)
    return Batch(
        input_ids=input_ids,
        position_ids=torch.arange(S, device=generator.device).expand(B, S).contiguous(),
        mask=torch.ones(B, S, dtype=torch.bool, device=generator.device),
        labels=labels,
        topk_ids=_distinct_ids((B, S, K), V, generator),
        topk_logprobs=logprobs,
        tail_logprob=torch.full((B, S), TAIL_MASS, device=generator.device).log(),
        sample_ids=_distinct_ids((B, S, source.draws), V, generator),
        sample_counts=counts,
    )


def _distinct_ids(shape: tuple[int, int, int], V: int, generator: torch.Generator) -> Tensor:
    """Ids of that shape, distinct in each position: even strides through the vocabulary."""
    B, S, count = shape
    here = {"generator": generator, "device": generator.device}
    first = torch.randint(V, (B, S, 1), **here)
    stride = torch.randint(1, max(2, V // max(count, 1)), (B, S, 1), **here)
    return (first + stride * torch.arange(count, device=generator.device)) % V


def _check_same(flag: str, wished: int | None, held: int, config: MeasureConfig) -> None:
    if wished is not None and wished != held:
        raise ConfigError(
            f"--{flag} {wished}, but {config.cache_dir} holds {held}; leave out --{flag} or "
            "choose another cache"
        )
