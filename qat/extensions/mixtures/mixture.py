"""Several sources of text, each with its share: `code.jsonl:0.5,prose.jsonl:0.5`.

A share is a weight: those of all sources are divided by their sum. Documents come in turns, so that
at each point the sources have their shares of all characters so far.
"""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from qat.data.config import DataFormat
from qat.data.sources import DataSource, Sourced, open_source
from qat.data.text import num_characters
from qat.errors import DataError

logger = logging.getLogger(__name__)

PART = re.compile(r"\s*(.+?):([^:,/\\]*)(?:,|$)")
"""A source and its share, up to a comma or the end: paths may hold colons and commas."""
EXPECTED = "expected FILE:SHARE,FILE:SHARE with shares above 0, such as code.jsonl:1,prose.jsonl:3"


class Part(NamedTuple):
    """One source of a mixture."""

    place: str
    """The file, directory or data set, as `--data` takes it."""
    share: float
    """Its share of the whole, in (0, 1]."""


def parts_of(mixture: str, *, setting: str) -> list[Part]:
    """Return the sources of a mixture; their shares sum to 1.

    Raises:
        DataError: a source has no share or one that is not above 0, or comes twice.
    """
    found = [(each[1], each[2], each.end()) for each in PART.finditer(mixture)]
    if not found or found[-1][2] < len(mixture):
        raise DataError(f"{setting}={mixture} names a source without its share, {EXPECTED}")
    weights: dict[str, float] = {}
    for place, number, _ in found:
        if "," in place and not Path(place).exists():
            raise DataError(f"{setting}={mixture} names no share of each in {place}, {EXPECTED}")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise DataError(
                f"{setting}={mixture} gives {place} the share {number or 'nothing'}, {EXPECTED}; "
                "leave out what is not wanted"
            )
        if place in weights:
            raise DataError(
                f"{setting}={mixture} names {place} twice, expected each source once; give it the "
                "sum of the shares"
            )
        weights[place] = weight
    total = math.fsum(weights.values())
    return [Part(place, weight / total) for place, weight in weights.items()]


def named(sources: Sequence[DataSource], parts: Sequence[Part]) -> list[str]:
    """Return a name for each source: its short one, or its place where two share that."""
    names = [source.name for source in sources]
    is_clear = len(set(names)) == len(names)
    return names if is_clear else [part.place for part in parts]


def counts_of(total: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers in the ratio of `shares` with the sum `total`, by largest remainder."""
    exact = [round(total * share, 6) for share in shares]
    counts = [*map(math.floor, exact)]
    remainders = [each - count for each, count in zip(exact, counts, strict=True)]
    by_remainder = sorted(range(len(shares)), key=lambda i: (-remainders[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def in_turns(counts: Sequence[int]) -> list[int]:
    """Return the numbers of the sources in an even order in which each comes its count of times."""
    times = [((n + 0.5) / count, i) for i, count in enumerate(counts) for n in range(count)]
    return [i for _, i in sorted(times)]


def open_parts(
    mixture: str, data_format: DataFormat, text_field: str, *, setting: str
) -> list[tuple[Part, str, DataSource]]:
    """Return the sources of a mixture with their names, each opened.

    Raises:
        DataError: see `parts_of` and `open_source`.
    """
    parts = parts_of(mixture, setting=setting)
    opened = [open_source(p.place, data_format, text_field, setting=setting) for p in parts]
    return list(zip(parts, named(opened, parts), opened, strict=True))


def open_mixture(
    mixture: str, data_format: DataFormat, text_field: str, *, setting: str
) -> DataSource:
    """Open all sources as one, whose documents name their source.

    Its format is that of the sources if they have the same, and `messages` for several: text beside
    chats has no turns, so that all of it counts.

    Raises:
        DataError: see `parts_of` and `open_source`.
    """
    opened = open_parts(mixture, data_format, text_field, setting=setting)
    formats = {source.format for _, _, source in opened}
    found = formats.pop() if len(formats) == 1 else "messages"
    return DataSource(_mixed(opened), found, "-".join(name for _, name, _ in opened))


def _mixed(opened: Sequence[tuple[Part, str, DataSource]]) -> Iterator[Sourced]:
    """Yield the next document of the source that is furthest behind, until one source ends."""
    documents = [source.documents for _, _, source in opened]
    characters = [0] * len(opened)
    while True:
        behind = min(range(len(opened)), key=lambda i: characters[i] / opened[i][0].share)
        part, name, _ = opened[behind]
        if (document := next(documents[behind], None)) is None:
            logger.info("%s is read to its end, so no more is read of the other texts", name)
            return
        characters[behind] += max(1, num_characters(document))
        yield Sourced(document, name, part.share)
