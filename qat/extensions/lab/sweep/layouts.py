"""Batches of documents of varied lengths: packed end to end as in a cache, or in length buckets.

Buckets measure the gain from packing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat.backend.base import Backend
from qat.data.packing import NO_LABEL, Batch
from qat.extensions.bench.batches import BatchSource, random_batch
from qat.extensions.lab.buckets import SHORTEST, WINDOW, bucket_of, interleaved

# the median length as a fraction of a row, and the standard deviation of the logarithm: lengths are
# log-normal, as those of text are approximately
MEDIAN_SHARE, LOG_SPREAD = 1 / 4, 0.8
STEPS = WINDOW  # steps before the batches repeat


def packed_batches(source: BatchSource, batch_size: int, backend: Backend) -> list[Batch]:
    """Return `STEPS` batches in host memory; documents are cut at the end of a row."""
    generator = torch.Generator(backend.device).manual_seed(source.seed)
    made = [_packed(source, batch_size, generator) for _ in range(STEPS)]
    return [batch.to(torch.device("cpu")) for batch in made]


def bucketed_batches(
    source: BatchSource, batch_size: int, buckets: Sequence[int], backend: Backend
) -> list[Batch]:
    """Return `STEPS` batches of about `batch_size * seq_len` positions in host memory.

    Documents are cut at the longest of the `buckets` and padded to the next one; with one bucket
    these are fixed slices. The rows of a batch are of one bucket. Buckets are as frequent as their
    share of padded positions.
    """
    generator = torch.Generator(backend.device).manual_seed(source.seed)
    S = source.seq_len
    lengths = document_lengths(64 * batch_size * STEPS, S, generator).clamp(max=buckets[-1])
    rows = _rows(lengths, buckets, batch_size * S)
    made = [_padded(source, own, bucket, generator) for own, bucket in rows]
    return [batch.to(torch.device("cpu")) for batch in made]


def document_lengths(number: int, S: int, generator: torch.Generator) -> Tensor:
    """Return `(number,)` int64 lengths, log-normal with median `S / 4`, at least two tokens."""
    spread = torch.randn(number, generator=generator, device=generator.device) * LOG_SPREAD
    return (spread.exp() * S * MEDIAN_SHARE).long().clamp(min=SHORTEST)


def _rows(lengths: Tensor, buckets: Sequence[int], positions: int) -> Iterator[tuple[Tensor, int]]:
    """Yield for each of `STEPS` steps the document lengths of its rows and their padded length."""
    places = bucket_of(lengths, buckets)
    pools = {bucket: lengths[places == place] for place, bucket in enumerate(buckets)}
    padded = torch.tensor([float(len(pool) * bucket) for bucket, pool in pools.items()])
    counts = (padded / padded.sum() * STEPS).round().int().tolist()
    order = [bucket for bucket, times in zip(buckets, counts, strict=True) for _ in range(times)]
    begun = dict.fromkeys(buckets, 0)
    for bucket in islice(cycle(interleaved(order)), STEPS):
        count = max(1, positions // bucket)
        places = torch.arange(begun[bucket], begun[bucket] + count, device=lengths.device)
        begun[bucket] += count
        yield pools[bucket][places % len(pools[bucket])], bucket


def _padded(
    source: BatchSource, lengths_B: Tensor, bucket: int, generator: torch.Generator
) -> Batch:
    batch = random_batch(replace(source, seq_len=bucket), len(lengths_B), generator)
    places = torch.arange(bucket, device=lengths_B.device)
    is_text = places < lengths_B[:, None]
    has_next = places < lengths_B[:, None] - 1
    return batch._replace(
        input_ids=batch.input_ids.where(is_text, 0),
        mask=is_text,
        labels=batch.labels.where(has_next, NO_LABEL),
    )


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
