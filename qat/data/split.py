"""Which documents are kept away from training, near-identical ones together."""

import json
import math
import re
from collections.abc import Iterable, Iterator

import xxhash

from qat.data.cache import Split
from qat.data.chat import Document
from qat.data.config import CacheSettings
from qat.errors import DataError, QatError

WORD = re.compile(r"[a-z0-9]+|\w")
"""A Latin word or a letter of any other script: many of them are written without blanks."""
MOST_WORDS = 4096
"""Of a longer document, its beginning tells whether it is near-identical to another."""
BANDS, ROWS = 6, 4
"""Two documents with a share J of equal shingles meet with probability `1 - (1 - J**4)**6`: 0.998
at J = 0.9, 0.32 at J = 0.5, 0.01 at J = 0.2."""


def split_of(document: Document, seed: int, held_out: float) -> Split:
    """The split of a document: of its content and the seed alone, so copies stay together."""
    return "held_out" if _place(document, seed) < held_out else "train"


def divided(
    documents: Iterable[Document], settings: CacheSettings
) -> Iterator[tuple[Document, Split]]:
    """Each document with its split; nothing comes before both splits are known to get one.

    A document that is near-identical to an earlier one goes where that went, any other by
    `split_of`. They are told by MinHash over shingles of three words (Broder, SEQUENCES 1997),
    which takes 430 bytes of memory for each document read.

    Raises:
        DataError: no document, or every one, is kept away from training.
    """
    if settings.held_out == 0:
        yield from ((document, "train") for document in documents)
        return
    pairs = _assigned(documents, settings)
    ahead, sides, trouble = [], set(), None
    try:
        for document, side in pairs:
            ahead.append((document, side))
            if _text(document).strip():
                sides.add(side)
            if len(sides) == 2:
                break
    except QatError as error:
        trouble = error
    if trouble is None and len(sides) == 1:
        raise _one_sided([document for document, _ in ahead], sides.pop(), settings)
    yield from ahead
    if trouble is not None:
        raise trouble
    yield from pairs


def _assigned(
    documents: Iterable[Document], settings: CacheSettings
) -> Iterator[tuple[Document, Split]]:
    known: dict[int, Split] = {}
    for document in documents:
        keys = _keys(_text(document))
        found = (known[key] for key in keys if key in known)
        side = next(found, None) or split_of(document, settings.seed, settings.held_out)
        for key in keys:
            known.setdefault(key, side)
        yield document, side


def _place(document: Document, seed: int) -> float:
    """Where the document stands between 0 and 1: below `held_out`, it is kept away."""
    content = json.dumps([seed, document], sort_keys=True).encode()
    return xxhash.xxh3_64_intdigest(content) / 2**64


def _text(document: Document) -> str:
    if isinstance(document, str):
        return document
    return "\n".join(message["content"] for message in document)


def _keys(text: str) -> list[int]:
    """Numbers of which near-identical texts have one in common, and others hardly ever."""
    words = WORD.findall(text.lower())[:MOST_WORDS]
    if not words:
        return [xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))]
    from datasketch import MinHash  # brings scipy, which takes half a second

    width = min(3, len(words))
    shingles = {" ".join(words[i : i + width]) for i in range(len(words) - width + 1)}
    signature = MinHash(BANDS * ROWS, hashfunc=xxhash.xxh32_intdigest)
    signature.update_batch(shingle.encode() for shingle in shingles)
    bands = signature.hashvalues.reshape(BANDS, ROWS)
    return [xxhash.xxh3_64_intdigest(bytes([i]) + band.tobytes()) for i, band in enumerate(bands)]


def _one_sided(documents: list[Document], side: Split, settings: CacheSettings) -> DataError:
    count, held_out = len(documents), f"held_out={settings.held_out:g}"
    data = f"data={settings.data}"
    if count == 1:
        return DataError(
            f"{data} is one document, and {held_out} keeps whole documents away from training, "
            "expected two or more; separate its documents by blank lines or <|endoftext|>, give "
            "more files, or keep none away with --held-out 0"
        )
    if side == "held_out":
        return DataError(
            f"{held_out} keeps all {count} documents of {data} away from training, expected some "
            "to learn from; lower --held-out or give more documents"
        )
    firsts, known = [], set()
    for document in documents:
        keys = set(_keys(_text(document)))
        if known.isdisjoint(keys):
            firsts.append(document)
        known |= keys
    enough = math.ceil(100 * min(_place(document, settings.seed) for document in firsts)) / 100
    return DataError(
        f"{held_out} keeps none of the {count} documents of {data} away from training, expected "
        f"one or more to judge by (near-identical ones stay together, so they count as "
        f"{len(firsts)}); --held-out {enough:g} is enough for one, or give more documents, or keep "
        "none away with --held-out 0"
    )
