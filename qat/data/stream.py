"""Turn a cache's documents into blocks of packed sequences, in a deterministic order."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import cache, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from transformers import PreTrainedTokenizerBase

from qat.data.cache import SPLITS, Split
from qat.data.config import CacheSettings
from qat.data.documents import Document
from qat.data.packing import LOOKAHEAD, PackedRows, Packer
from qat.data.pipeline import computed_ahead
from qat.data.sources import Sourced
from qat.data.text import (
    Tokens,
    encode,
    end_token,
    num_characters,
    render,
    special_tokens,
    whole_turn,
)
from qat.errors import DataError, QatError
from qat.process import cores

if TYPE_CHECKING:
    from datasketch import MinHash

# The held-out split: near-identical documents and answers to one prompt go to the same side.

WORD = re.compile(r"[a-z0-9]+|\w")
"""A Latin word, or a single letter of other scripts, many of which are written without spaces."""
MOST_WORDS = 4096
"""Number of words of a document that are compared for near-duplicates."""
BANDS, ROWS = 6, 4
"""MinHash bands and hashes per band: two documents with a share J of equal shingles match with
probability `1 - (1 - J**4)**6`: 0.998 at J = 0.9, 0.32 at J = 0.5, 0.01 at J = 0.2."""


def split_of(document: Document, seed: int, held_out: float) -> Split:
    """Return the split of a document: a function of content and seed, so copies stay together."""
    return "held_out" if _uniform_hash(document, seed) < held_out else "train"


Assigned = tuple[Sourced, Split]


def divided(documents: Iterable[Document | Sourced], settings: CacheSettings) -> Iterator[Assigned]:
    """Yield each document with its split, after checking that both splits get a document.

    Of a mixture each source must have documents in both splits.

    A near-duplicate of an earlier document goes to the same split, and so does another answer to
    the turns of an earlier chat; any other is assigned by `split_of`. Near-duplicates are found by
    MinHash over shingles of three words (Broder, SEQUENCES 1997), which takes 430 bytes of memory
    per document.

    Raises:
        DataError: the held-out split gets no document, or all of them.
    """
    rows = (each if isinstance(each, Sourced) else Sourced(each) for each in documents)
    if settings.held_out == 0:
        yield from ((row, "train") for row in rows)
        return
    pairs = _assigned(rows, settings)
    ahead: list[Assigned] = []
    sides: defaultdict[tuple[str, float], set[Split]] = defaultdict(set)
    failure = None
    try:  # read until both splits have a document with text of each source
        for row, side in pairs:
            ahead.append((row, side))
            if _whole_text(row.document).strip():
                sides[_part(row), row.share].add(side)
            both = (share for (_, share), found in sides.items() if len(found) == 2)
            if round(sum(both), 6) >= 1:
                break
    except QatError as error:
        failure = error
    for (part, _), found in sides.items():
        if failure is None and len(found) == 1:
            its_own = [row.document for row, _ in ahead if _part(row) == part]
            raise _one_sided(its_own, found.pop(), settings, part)
    yield from ahead
    if failure is not None:  # in its place, so that the shards of the rows before are kept
        raise failure
    yield from pairs


def _part(row: Sourced) -> str:
    """Return the name of the row's source in a mixture; empty for text that has no shares."""
    return row.source if row.share < 1 else ""


def _assigned(rows: Iterable[Sourced], settings: CacheSettings) -> Iterator[Assigned]:
    known: dict[int, Split] = {}
    for row in rows:
        keys = _keys(row.document)
        found = (known[key] for key in keys if key in known)
        side = next(found, None) or split_of(row.document, settings.seed, settings.held_out)
        for key in keys:
            known.setdefault(key, side)
        yield row, side


def _uniform_hash(document: Document, seed: int) -> float:
    """Hash the document to a number in [0, 1); it is held out if that is below `held_out`."""
    content = json.dumps([seed, document], sort_keys=True).encode()
    return xxhash.xxh3_64_intdigest(content) / 2**64


def _keys(document: Document) -> list[int]:
    """Return hash keys, one of which documents share that belong on the same side."""
    keys = _minhash_keys(_whole_text(document))
    # else a teacher's samples of one prompt are learned from and judged on
    if not isinstance(document, str) and document[-1]["role"] == "assistant" and document[1:]:
        asked = json.dumps(document[:-1], sort_keys=True).encode()
        keys.append(xxhash.xxh3_64_intdigest(asked))
    return keys


def _whole_text(document: Document) -> str:
    if isinstance(document, str):
        return document
    return "\n".join(map(whole_turn, document))


def _minhash_keys(text: str) -> list[int]:
    """Return hash keys: near-identical texts share at least one, others hardly ever do."""
    words = WORD.findall(text.lower())[:MOST_WORDS]
    if not words:
        return [xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))]
    begun_at = (words[first:] for first in range(min(3, len(words))))
    shingles = set(map(" ".join, zip(*begun_at, strict=False)))
    signature = _no_signature().copy()
    signature.update_batch(map(str.encode, shingles))
    bands = signature.hashvalues.reshape(BANDS, ROWS)
    return [xxhash.xxh3_64_intdigest(bytes([i]) + band.tobytes()) for i, band in enumerate(bands)]


@cache
def _no_signature() -> "MinHash":
    """Return the signature of no text, whose permutations all others share."""
    from datasketch import MinHash  # imports scipy, which takes half a second

    return MinHash(BANDS * ROWS, hashfunc=xxhash.xxh32_intdigest)


def _one_sided(
    documents: list[Document], side: Split, settings: CacheSettings, part: str
) -> DataError:
    count, held_out = len(documents), f"held_out={settings.held_out:g}"
    data = f"{part} in data={settings.data}" if part else f"data={settings.data}"
    firsts, known = [], set()
    for document in documents:
        keys = set(_keys(document))
        if known.isdisjoint(keys):
            firsts.append(document)
        known |= keys
    if len(firsts) == 1:  # no value of held_out can divide it
        found = (
            "one document"
            if count == 1
            else f"{count} documents of one prompt or nearly one text, which count as one"
        )
        is_chat = not isinstance(firsts[0], str)
        remedy = (
            "give answers to other prompts too"
            if is_chat
            else "separate its documents by blank lines or <|endoftext|>, or give more files"
        )
        return DataError(
            f"{data} is {found}, and {held_out} keeps whole documents away from training, "
            f"expected two or more; {remedy}"
        )
    if side == "held_out":
        return DataError(
            f"{held_out} keeps all {count} documents of {data} away from training, expected some "
            "to learn from; lower --held-out or give more documents"
        )
    enough = (
        math.ceil(100 * min(_uniform_hash(document, settings.seed) for document in firsts)) / 100
    )
    return DataError(
        f"{held_out} keeps none of the {count} documents of {data} away from training, expected "
        f"one or more to judge by (near-identical ones and answers to one prompt stay together, so "
        f"they count as {len(firsts)}); --held-out {enough:g} is enough for one, or give more "
        "documents"
    )


BATCH_CHARACTERS = 2**19  # about 130,000 tokens of English
BATCHES_AHEAD = max(3, cores() // 8)
"""Number of batches in flight. At least 3: the interpreter's own work takes one core meanwhile, and
a batch of long documents, each of which is tokenised on one core, keeps few cores busy."""


class ShardBlock(NamedTuple):
    """The sequences of one shard."""

    split: Split
    index: int
    first_sequence: int
    packed: PackedRows
    source: str = ""
    """Name of the source of all its text; empty if that has none."""

    @property
    def file(self) -> str:
        """File name of the shard."""
        return f"{self.split}-{self.index:05d}.safetensors"


def blocks(
    documents: Iterable[Document | Sourced],
    tokenizer: PreTrainedTokenizerBase,
    settings: CacheSettings,
) -> Iterator[ShardBlock]:
    """Yield blocks of `shard_size` sequences of both splits, as the documents fill them.

    A sequence holds text of one source, and so does a block. Reading stops after `num_sequences`
    training sequences, of which each source of a mixture has its share; the held-out split then has
    the documents read until that point, at least one of each. The last block of each split and
    source is smaller.

    Raises:
        DataError: the documents hold no text, or a split gets no document.
        ConfigError: the tokenizer cannot render chats or has no end token.
    """
    end, special = end_token(tokenizer), special_tokens(tokenizer)
    limits = {"train": settings.num_sequences, "held_out": 0}
    cutters = {
        split: _Cutter(split, end, special, settings=settings, limit=limits[split])
        for split in SPLITS
    }
    train, held_out = cutters["train"], cutters["held_out"]
    for row, split, texts in _tokenised(divided(documents, settings), tokenizer, settings):
        for tokens in texts:
            cutters[split].push(row, tokens)
        yield from cutters[split].full_blocks()
        if train.is_satisfied and (not settings.held_out or train.parts <= held_out.parts):
            break
    if not any(cutter.parts for cutter in cutters.values()):
        raise DataError(
            f"data={settings.data} holds no text, expected at least one document; "
            "check the file and --text-field"
        )
    for cutter in cutters.values():
        yield from cutter.last_blocks()


def _tokenised(
    documents: Iterator[Assigned], tokenizer: PreTrainedTokenizerBase, settings: CacheSettings
) -> Iterator[tuple[Sourced, Split, list[Tokens]]]:
    """Yield each document, its split and its renderings' tokens; batches are encoded ahead."""
    thinking, targets = settings.thinking, settings.targets

    def encoded(batch: list[Assigned] | QatError) -> tuple[list, QatError | None]:
        if isinstance(batch, QatError):
            return [], batch
        rendered, failure = [], None
        for row, _ in batch:
            try:
                rendered.append(render(row.document, tokenizer, thinking, targets))
            except QatError as error:
                failure = error
                break
        tokens = iter(encode(list(chain.from_iterable(rendered)), tokenizer))
        found = zip(batch, rendered, strict=False)
        return [(*each, list(islice(tokens, len(texts)))) for each, texts in found], failure

    with closing(computed_ahead(encoded, _batches(documents), BATCHES_AHEAD)) as ahead:
        for batch, failure in ahead:
            yield from batch
            if failure is not None:
                raise failure


def _batches(documents: Iterator[Assigned]) -> Iterator[list[Assigned] | QatError]:
    """Yield batches of documents, each large enough for the tokenizer to use all cores.

    The error of a bad row comes last, as an item, so that it is raised only if that row is needed.
    """
    batch, characters = [], 0
    try:
        for document in documents:
            batch.append(document)
            characters += num_characters(document[0].document)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    except QatError as error:
        yield batch
        yield error
        return
    yield batch


class _Cutter:
    """Cuts one split's sequences into blocks; `limit` sequences at most, 0 for no limit."""

    def __init__(
        self,
        split: Split,
        end: int,
        special: frozenset[int],
        *,
        settings: CacheSettings,
        limit: int,
    ) -> None:
        together = min(LOOKAHEAD, settings.shard_size)
        new_packer = partial(
            Packer,
            settings.sequence_length,
            end,
            special,
            lookahead=together,
            # held-out sequences keep their order, so that a run finds its own in a larger cache
            sorts=split == "train",
        )
        self.parts: set[str] = set()
        """Sources of a mixture that the split has tokens of; an empty name for other text."""
        self._packers: defaultdict[str, Packer] = defaultdict(new_packer)
        self._most: dict[str, int] = {}
        self._split = split
        self._size = settings.shard_size
        self._limit = limit
        self._blocks = 0
        self._sequences: Counter[str] = Counter()

    def push(self, row: Sourced, tokens: Tokens) -> None:
        """Add a rendering of a document, unless the split has enough of its source."""
        packer = self._packers[row.source]
        self._most[row.source] = math.ceil(round(self._limit * row.share, 6))
        if len(tokens.ids) > 1 and packer.num_full < self._wanted(row.source):
            packer.push(*tokens)
            if not packer.is_empty:
                self.parts.add(_part(row))

    @property
    def is_satisfied(self) -> bool:
        """True if the packers hold enough sequences to reach the limit."""
        found = (
            min(self._sequences[source] + packer.num_full, self._most[source])
            for source, packer in self._packers.items()
        )
        return bool(self._limit) and sum(found) >= self._limit

    def full_blocks(self) -> Iterator[ShardBlock]:
        """Yield blocks of full size while a packer has enough sequences."""
        for source, packer in self._packers.items():
            while min(packer.num_full, self._wanted(source)) >= self._size:
                yield self._cut(source, self._size)

    def last_blocks(self) -> Iterator[ShardBlock]:
        """Yield the remaining sequences of each source as a last block, if there are any."""
        for source, packer in self._packers.items():
            packer.finish()
            if count := min(packer.num_full, self._wanted(source)):
                yield self._cut(source, count)

    def _wanted(self, source: str) -> float:
        """Return how many sequences of a source may still be cut."""
        rest = self._limit - self._sequences.total()
        return min(rest, self._most[source] - self._sequences[source]) if self._limit else math.inf

    def _cut(self, source: str, count: int) -> ShardBlock:
        first, packed = self._sequences.total(), self._packers[source].take(count)
        block = ShardBlock(self._split, self._blocks, first, packed, source)
        self._blocks += 1
        self._sequences[source] += count
        return block
