"""How documents of varied lengths become rows: packed, in fixed slices, or in buckets of lengths.

Caches are packed; this is for comparing what that is worth. Lengths are log-normal, as those of
text are, about; tokens and targets are random.

Shapes: B sequences, S positions, N documents.
"""

from dataclasses import replace
from itertools import cycle, islice

import torch
from torch import Tensor

from qat.backend.base import Backend
from qat.bench.batches import Source, random_batch
from qat.data.packing import NO_LABEL, Batch

MEDIAN_SHARE, LOG_SPREAD = 1 / 4, 0.8
"""Median of the lengths as a share of a row, and standard deviation of their logarithm."""
SHORTEST = 2
BUCKETS = (8, 4, 2, 1)
"""A row of each bucket is a whole row divided by this."""
STEPS = 16
"""Steps before the batches repeat: as many as it takes for each bucket to have its share."""


def make_batches(source: Source, layout: str, batch_size: int, backend: Backend) -> list[Batch]:
    """A batch for each of `STEPS` steps, in host memory; all have `batch_size * seq_len` positions.

    `packed`: documents end to end, cut where a row is full. `slices`: one document a row, cut or
    padded to `seq_len`. `buckets`: cut likewise, padded to the next bucket's length; a batch has
    rows of one bucket, and buckets come as often as documents fill them.
    """
    generator = torch.Generator(backend.device).manual_seed(source.seed)
    S = source.seq_len
    if layout == "packed":
        made = [_packed(source, batch_size, generator) for _ in range(STEPS)]
    else:
        lengths = document_lengths(64 * batch_size * STEPS, S, generator).clamp(max=S)
        edges = bucket_edges(S) if layout == "buckets" else [S]
        made = [
            _padded(source, own, edge, generator)
            for own, edge in _rows(lengths, edges, batch_size, S)
        ]
    return [batch.to(torch.device("cpu")) for batch in made]


def document_lengths(count: int, S: int, generator: torch.Generator) -> Tensor:
    """`(N,)` int64 lengths, log-normal with median `S / 4`, at least two tokens."""
    spread = torch.randn(count, generator=generator, device=generator.device) * LOG_SPREAD
    return (spread.exp() * S * MEDIAN_SHARE).long().clamp(min=SHORTEST)


def bucket_edges(S: int) -> list[int]:
    """Lengths of rows, ascending; parts of S too short for a document are left out."""
    return [S // part for part in BUCKETS if S % part == 0 and S // part >= SHORTEST]


def _rows(lengths: Tensor, edges: list[int], batch_size: int, S: int) -> list[tuple[Tensor, int]]:
    """Lengths of the rows of each step, and what they are padded to."""
    bounds = [0, *edges]
    pools = [
        lengths[(lengths > low) & (lengths <= edge)]
        for low, edge in zip(bounds, edges, strict=False)
    ]
    sizes = [batch_size * S // edge for edge in edges]
    # a bucket's share of the steps is its share of all padded positions
    positions = torch.tensor(
        [float(len(pool) * edge) for pool, edge in zip(pools, edges, strict=True)]
    )
    counts = (positions / positions.sum() * STEPS).round().int().tolist()
    order = [index for index, count in enumerate(counts) for _ in range(count)]
    order = order[::3] + order[1::3] + order[2::3]  # sizes alternate, as shuffled buckets do
    steps = [0] * len(edges)
    found = []
    for index in islice(cycle(order), STEPS):
        pool, size = pools[index], sizes[index]
        start = steps[index] * size
        steps[index] += 1
        found.append(
            (pool.repeat(1 + (start + size) // len(pool))[start : start + size], edges[index])
        )
    return found


def _padded(source: Source, lengths_B: Tensor, edge: int, generator: torch.Generator) -> Batch:
    batch = random_batch(replace(source, seq_len=edge), len(lengths_B), generator)
    places = torch.arange(edge, device=lengths_B.device)
    is_text = places < lengths_B[:, None]
    has_next = places < lengths_B[:, None] - 1
    return batch._replace(
        input_ids=batch.input_ids.where(is_text, 0),
        mask=is_text,
        labels=batch.labels.where(has_next, NO_LABEL),
    )


def _packed(source: Source, batch_size: int, generator: torch.Generator) -> Batch:
    S, batch = source.seq_len, random_batch(source, batch_size, generator)
    total = batch_size * S
    lengths = document_lengths(total // SHORTEST, S, generator)
    is_first = torch.zeros(total, dtype=torch.bool, device=lengths.device)
    starts = torch.cumsum(lengths, 0)
    is_first[starts[starts < total]] = True
    is_first = is_first.view(batch_size, S)
    is_first[:, 0] = True
    places = torch.arange(S, device=lengths.device).expand(batch_size, S)
    begun = places.where(is_first, 0).cummax(1).values
    is_last = torch.nn.functional.pad(is_first[:, 1:], (0, 1), value=True)
    return batch._replace(
        position_ids=places - begun, labels=batch.labels.where(~is_last, NO_LABEL)
    )
