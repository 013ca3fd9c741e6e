"""The batches of a benchmark: sequences of a teacher cache, or random ones of the same form.

Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat.backend.base import Backend
from qat.data.packing import NO_LABEL, Batch
from qat.data.reader import TeacherCache
from qat.data.sampler import sequence_indices
from qat.errors import ConfigError
from qat.extensions.bench.config import DEFAULT_DRAWS, DEFAULT_LENGTH, DEFAULT_TOP_K, MeasureConfig
from qat.losses.config import check_targets
from qat.models.language_model import LanguageModel

TAIL_MASS = 0.03  # mass of a random teacher outside its top K, about that of a real one at K = 64


@dataclass(frozen=True)
class BatchSource:
    """The source of batches, and their sizes."""

    cache: TeacherCache | None
    seq_len: int
    top_k: int
    draws: int
    vocab_size: int
    seed: int

    @property
    def kind(self) -> str:
        """The description of the data in a record."""
        return "synthetic" if self.cache is None else f"cache {self.cache.manifest.fingerprint}"

    @property
    def num_sequences(self) -> int | None:
        """The number of training sequences; None for random ones."""
        return None if self.cache is None else self.cache.num_sequences("train")

    def batch(self, batch_size: int, step: int, backend: Backend) -> Batch:
        """Return `batch_size` sequences in host memory, chosen by seed and step alone.

        A cache with fewer sequences repeats them. Random ones are made on the device, for speed,
        if it has random numbers.
        """
        if self.cache is not None:
            indices = sequence_indices(self.seed, step, batch_size, self.num_sequences)
            return self.cache.batch(indices)
        place = torch.device("cpu") if backend.is_traced else backend.device
        generator = torch.Generator(place).manual_seed(self.seed + step)
        return random_batch(self, batch_size, generator).to(torch.device("cpu"))


def random_source(config: MeasureConfig, vocab_size: int) -> BatchSource:
    """Return random batches of the sizes in `config`, or of the default sizes."""
    return BatchSource(
        cache=None,
        seq_len=config.seq_len or DEFAULT_LENGTH,
        top_k=min(config.top_k or DEFAULT_TOP_K, vocab_size - 1),
        draws=DEFAULT_DRAWS if "sampled" in config.losses else 0,
        vocab_size=vocab_size,
        seed=config.seed,
    )


def open_source(config: MeasureConfig, student: LanguageModel) -> BatchSource:
    """Open the cache of `config`; without one return random batches.

    Raises:
        CacheError: the cache cannot be read, or its sequences are too long for this student.
        ConfigError: its sequence length or K is not the requested one, or it lacks what the loss
            needs.
    """
    vocab_size = student.config.vocab_size
    if config.cache_dir is None:
        source = random_source(config, vocab_size)
        if source.seq_len > student.longest:
            raise ConfigError(
                f"seq_len={source.seq_len}, but the student reads at most {student.longest} "
                "positions; lower --seq-len"
            )
        return source
    cache = TeacherCache.open(config.cache_dir)
    settings, has_tail = cache.manifest.settings, cache.manifest.has_tail
    length, top_k, draws = settings.sequence_length, settings.top_k, settings.draws
    requested = {"seq-len": (config.seq_len, length), "top-k": (config.top_k, top_k)}
    for flag, (value, held) in requested.items():
        if value is not None and value != held:
            raise ConfigError(
                f"--{flag} {value}, but {config.cache_dir} holds {held}; leave out --{flag} or "
                "choose another cache"
            )
    check_targets(config.losses, top_k, draws, has_tail=has_tail)
    # a shape has no tokenizer of its own: it takes any cache, and learns the words of both
    known = cache.manifest.tokenizer
    student.num_words = cache.check_student(known, vocab_size, student.longest)
    if cache.num_sequences("train") == 0:
        raise ConfigError(
            f"{config.cache_dir} has no training sequences, expected some; rebuild it from more "
            "documents"
        )
    return BatchSource(cache, length, top_k, draws, vocab_size, config.seed)


def check_batch_sizes(source: BatchSource, sizes: tuple[int, ...], grad_accum_steps: int) -> None:
    """Raise ConfigError for a batch of more sequences than the cache has: it would repeat some."""
    total = source.num_sequences
    if total is not None and max(sizes) * grad_accum_steps > total:
        raise ConfigError(
            f"batch_size={max(sizes)} x grad_accum_steps={grad_accum_steps} is more than the "
            f"{total} training sequences of {source.cache.directory}; lower --batch-size, or leave "
            "out --cache-dir for random sequences"
        )


def random_batch(source: BatchSource, batch_size: int, generator: torch.Generator) -> Batch:
    """Return uniform tokens, one document per row, all positions valid, on the generator's device.

    The teacher's probabilities follow a power law of the rank and sum to `1 - TAIL_MASS`.
    """
    B, S, V, device = batch_size, source.seq_len, source.vocab_size, generator.device
    here = {"generator": generator, "device": device}

    def distinct_ids(number: int) -> Tensor:
        """Return `(B, S, number)`, distinct per position: an even stride through the vocabulary."""
        first = torch.randint(V, (B, S, 1), **here)
        stride = torch.randint(1, max(2, V // max(number, 1)), (B, S, 1), **here)
        return (first + stride * torch.arange(number, device=device)) % V

    input_ids = torch.randint(V, (B, S), **here)
    slope = 1 + torch.rand(B, S, 1, **here)
    ranks = torch.arange(1, source.top_k + 1, device=device)
    logprobs = torch.log_softmax(-slope * ranks.log(), -1) + torch.tensor(1 - TAIL_MASS).log()
    return Batch(
        input_ids=input_ids,
        position_ids=torch.arange(S, device=device).expand(B, S).contiguous(),
        mask=torch.ones(B, S, dtype=torch.bool, device=device),
        labels=pad(input_ids[:, 1:], (0, 1), value=NO_LABEL),
        topk_ids=distinct_ids(source.top_k),
        topk_logprobs=logprobs,
        tail_logprob=torch.full((B, S), TAIL_MASS, device=device).log(),
        sample_ids=distinct_ids(source.draws),
        sample_counts=torch.ones(B, S, source.draws, device=device),
    )
