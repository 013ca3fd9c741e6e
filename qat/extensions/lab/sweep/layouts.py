"""Batches of documents of varied lengths, packed end to end as in a cache."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat.backend.base import Backend
from qat.data.packing import NO_LABEL, Batch
from qat.extensions.bench.batches import BatchSource, random_batch

# the median length as a fraction of a row, and the standard deviation of the logarithm: lengths are
# log-normal, as those of text are approximately
MEDIAN_SHARE, LOG_SPREAD = 1 / 4, 0.8
SHORTEST = 2
STEPS = 16  # steps before the batches repeat


def packed_batches(source: BatchSource, batch_size: int, backend: Backend) -> list[Batch]:
    """Return `STEPS` batches in host memory; documents are cut at the end of a row."""
    generator = torch.Generator(backend.device).manual_seed(source.seed)
    made = [_packed(source, batch_size, generator) for _ in range(STEPS)]
    return [batch.to(torch.device("cpu")) for batch in made]


def document_lengths(number: int, S: int, generator: torch.Generator) -> Tensor:
    """Return `(number,)` int64 lengths, log-normal with median `S / 4`, at least two tokens."""
    spread = torch.randn(number, generator=generator, device=generator.device) * LOG_SPREAD
    return (spread.exp() * S * MEDIAN_SHARE).long().clamp(min=SHORTEST)


def _packed(source: BatchSource, batch_size: int, generator: torch.Generator) -> Batch:
    S, batch = source.seq_len, random_batch(source, batch_size, generator)
    total = batch_size * S
    starts = torch.cumsum(document_lengths(total // SHORTEST, S, generator), 0)
    is_first = torch.zeros(total, dtype=torch.bool, device=starts.device)
    is_first[starts[starts < total]] = True
    is_first = is_first.view(batch_size, S)
    is_first[:, 0] = True
    places = torch.arange(S, device=starts.device).expand(batch_size, S)
    begun = places.where(is_first, 0).cummax(1).values
    is_last = pad(is_first[:, 1:], (0, 1), value=True)
    return batch._replace(
        position_ids=places - begun, labels=batch.labels.where(~is_last, NO_LABEL)
    )
