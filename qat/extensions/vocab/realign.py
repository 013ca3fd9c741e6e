"""A teacher's cache for students with another tokenizer: each shard is read, aligned and written.

The text of a document is what the teacher's tokens say, so documents stay on their side of the
held-out split. The student's tokenizer reads it anew, and what the teacher says of each of its
tokens follows from their bytes (`qat.extensions.vocab.align`). A shard depends on one shard of the
teacher's cache alone, so an interrupted run goes on behind its last whole shard.

Shapes: N tokens of a document, F those of a shard, K tokens kept, B rows, L positions of a row.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from transformers import PreTrainedTokenizerBase

from qat.config import fingerprint
from qat.data.cache import (
    IMPORTED_AS,
    MANIFEST,
    Manifest,
    Shard,
    check_place,
    new_manifest,
    read_manifest,
    shard_problem,
    write_atomic,
)
from qat.data.codec import TopK, encode_top_k, id_bits, pack_bits
from qat.data.packing import LOOKAHEAD, PackedRows, Packer
from qat.data.reader import TeacherCache
from qat.data.shard import in_order
from qat.data.shard_file import shard_content
from qat.data.text import tokenizer_hash
from qat.errors import CacheError
from qat.extensions.vocab.align import LOST, Aligner, Heard, Spoken
from qat.extensions.vocab.texts import foreign, pairs
from qat.extensions.vocab.tokens import Vocabulary
from qat.files import held
from qat.logs import progress
from qat.models.load import load_tokenizer

COUNTS = "alignment.json"
"""The counts of each shard's positions and masses, by their fate (`Aligner.counts`)."""
ROWS_AT_ONCE = 64
NEARLY_ALL = 1 - 1e-6
"""The most mass that a tail is given: a cache leaves something to its top K."""

logger = logging.getLogger(__name__)


class Realigned(NamedTuple):
    """A finished cache, and what became of the positions and of the teacher's mass."""

    manifest: Manifest
    counts: Counter[str]
    """Sums of `Aligner.counts` over all shards."""


def realign(
    source: Path,
    out: Path,
    *,
    tokenizer: str,
    teacher: str | None = None,
    sequence_length: int | None = None,
) -> Realigned:
    """Write the cache at `source` for students with the tokenizer of the model `tokenizer`.

    Args:
        teacher: a model with the tokenizer of `source`; by default the teacher that it names.
        sequence_length: tokens in a row; by default as many as in `source`.

    Raises:
        CacheError: `source` is no finished cache with top K and tail, has this tokenizer already,
            holds special tokens that the student lacks, or `out` holds something else.
        ConfigError: a tokenizer does not tell the bytes of its tokens.
        CheckpointError: a tokenizer cannot be opened.
    """
    cache = TeacherCache.open(source)
    theirs = cache.manifest
    if not theirs.settings.top_k or not theirs.has_tail:
        found = "a top K without its tail" if theirs.settings.top_k else "draws alone"
        raise CacheError(
            f"{source} holds {found}, expected the teacher's likeliest tokens and their tail; "
            "build it with --top-k"
        )
    student = Vocabulary(load_tokenizer(tokenizer), tokenizer)
    mine = tokenizer_hash(student.tokenizer)
    if mine == theirs.tokenizer:
        raise CacheError(
            f"{source} has the tokenizer of {tokenizer}, expected another; train on it as it is"
        )
    own = Vocabulary(_their_tokenizer(cache, teacher), teacher or theirs.teacher.name)
    updates = {
        "sequence_length": sequence_length or cache.sequence_length,
        "top_k": min(theirs.settings.top_k, student.size),
        "draws": 0,
    }
    info = theirs.teacher.model_copy(
        update={
            "identity": f"{IMPORTED_AS}{fingerprint([theirs.fingerprint, theirs.tokenizer])}",
            "vocab_size": student.size,
            "max_positions": None,
        }
    )
    fresh = new_manifest(theirs.settings.model_copy(update=updates), info, mine)
    with held(out):
        manifest = _begun(fresh, out)
        if manifest.state == "building":
            manifest = _written(cache, manifest, out, Aligner(own, student))
        counts = sum(map(Counter, _counted(out).values()), Counter())
    _log(counts, out)
    return Realigned(manifest, counts)


def _their_tokenizer(cache: TeacherCache, teacher: str | None) -> PreTrainedTokenizerBase:
    name = teacher or cache.manifest.teacher.name
    tokenizer = load_tokenizer(name)
    if (found := tokenizer_hash(tokenizer)) != cache.manifest.tokenizer:
        raise CacheError(
            f"{cache.directory} was tokenised with tokenizer {cache.manifest.tokenizer}, {name} "
            f"has {found}; name a model with the former by --teacher"
        )
    return tokenizer


def _begun(fresh: Manifest, out: Path) -> Manifest:
    """Return the manifest of `out` if it is the start of the same cache, else a new one."""
    check_place(out)
    if not (out / MANIFEST).exists():
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / MANIFEST, fresh.to_bytes())
        return fresh
    old = read_manifest(out)
    if old.fingerprint != fresh.fingerprint:
        raise CacheError(
            f"{out} holds another cache ({old.fingerprint}), expected this one "
            f"({fresh.fingerprint}) or nothing; choose another --out or delete the directory"
        )
    kept = [shard for shard in old.shards if shard_problem(out, shard, deep=False) is None]
    is_whole = len(kept) == len(old.shards)
    return old.model_copy(update={"shards": kept} | ({} if is_whole else {"state": "building"}))


def _written(cache: TeacherCache, manifest: Manifest, out: Path, aligner: Aligner) -> Manifest:
    """Align all shards that `out` lacks, and return the finished manifest."""
    known, counts = {shard.file for shard in manifest.shards}, _counted(out)
    firsts: Counter[str] = Counter()
    with progress("aligning", cache.manifest.total("sequences"), "sequences") as ticker:
        for theirs in cache.manifest.shards:
            first = firsts[theirs.split]
            firsts[theirs.split] += theirs.sequences
            if theirs.file in known:
                ticker.skip(theirs.sequences)
                continue
            aligner.counts.clear()
            packer = Packer(
                manifest.settings.sequence_length,
                pad=0,
                lookahead=min(LOOKAHEAD, manifest.settings.shard_size),
                sorts=theirs.split == "train",
            )
            heard = [_padding(aligner.student.end, manifest.settings.top_k)]
            place = 1
            for begin in range(first, first + theirs.sequences, ROWS_AT_ONCE):
                rows = range(begin, min(begin + ROWS_AT_ONCE, first + theirs.sequences))
                spoken = [*_documents(cache, rows, theirs)]
                for each in _heard(spoken, aligner, cache):
                    heard.append(each)
                    # places stand for tokens, so that what is known of each is found behind them
                    packer.push(np.arange(place, place + len(each.ids)), np.roll(each.counts, 1))
                    place += len(each.ids)
                ticker.advance(len(rows))
            packer.finish()
            if packer.num_full:
                joined = Heard(*map(np.concatenate, zip(*heard, strict=True)))
                packed = packer.take(packer.num_full)
                shard = _write_shard(theirs, packed, joined, out=out, manifest=manifest)
                shards = in_order([*manifest.shards, shard])
                manifest = manifest.model_copy(update={"shards": shards})
                counts[shard.file] = dict(aligner.counts)
                written = {shard.file: counts[shard.file] for shard in shards}
                write_atomic(out / COUNTS, json.dumps(written, indent=1).encode())
                write_atomic(out / MANIFEST, manifest.to_bytes())
    if not manifest.of_split("train"):
        raise CacheError(
            f"{cache.directory} has no position that {aligner.student.name} could learn from, "
            "expected some; look at its text with 'qat cache info'"
        )
    manifest = manifest.model_copy(update={"state": "complete"})
    write_atomic(out / MANIFEST, manifest.to_bytes())
    return manifest


def _counted(out: Path) -> dict[str, dict[str, float]]:
    """Return what became of each finished shard's positions and masses."""
    path = out / COUNTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _documents(cache: TeacherCache, rows: range, shard: Shard) -> Iterator[Spoken]:
    """Yield the documents of rows in which something counts."""
    batch = cache.batch(rows, shard.split, targets=("topk",))
    for b in range(len(rows)):
        begins = np.flatnonzero(batch.position_ids[b].numpy() == 0)
        for begin, end in zip(begins, [*begins[1:], batch.mask.shape[1]], strict=True):
            part = b, slice(begin, end)
            if batch.mask[part].any():
                yield Spoken(
                    ids=batch.input_ids[part].numpy(),
                    counts=batch.mask[part].numpy(),
                    top_ids=batch.topk_ids[part].numpy(),
                    top=batch.topk_logprobs[part].double().exp().numpy(),
                    tail=batch.tail_logprob[part].double().exp().numpy(),
                )


def _heard(spoken: list[Spoken], aligner: Aligner, cache: TeacherCache) -> Iterator[Heard]:
    """Yield the documents for the student, without those of which nothing can be told."""
    teacher, student = aligner.teacher, aligner.student
    for each in spoken:
        if (name := foreign(each.ids.tolist(), teacher, student)) is not None:
            raise CacheError(
                f"{cache.directory} holds {name}, a special token that {student.name} lacks, "
                "expected text that both read; build it of plain text, or with --thinking none"
            )
    documents = [each.ids.tolist() for each in spoken]
    for each, pair in zip(spoken, pairs(documents, teacher, student), strict=True):
        if pair is None:
            aligner.counts["dropped"] += int(each.counts.sum())
            continue
        heard = aligner.align(each, pair)
        if heard.counts.any():
            yield heard


def _padding(end: int, K: int) -> Heard:
    """Return a token that counts nowhere."""
    return Heard(
        ids=np.array([end]),
        counts=np.array([False]),
        top_ids=np.full((1, K), LOST),
        top=np.zeros((1, K)),
        tail=np.ones(1),
    )


def _write_shard(
    theirs: Shard, packed: PackedRows, heard: Heard, *, out: Path, manifest: Manifest
) -> Shard:
    """Write the rows of a shard; the tokens of `packed` are places in `heard`."""
    B, V = len(packed.tokens), manifest.teacher.vocab_size
    places_BL, starts_BL, mask_BL = map(torch.from_numpy, packed[:3])
    tokens_BL = torch.from_numpy(heard.ids)[places_BL.long()]
    places = packed.tokens.flatten()
    heard = Heard(*(field[places] for field in heard))
    tensors = {
        "tokens": pack_bits(tokens_BL, id_bits(V)),
        "starts": pack_bits(starts_BL, 1),
        "mask": pack_bits(mask_BL, 1),
        **encode_top_k(_top_k(heard, manifest.settings.top_k, V), B, V),
    }
    raw = shard_content(tensors)
    write_atomic(out / theirs.file, raw)
    content = tokens_BL.int().numpy().tobytes() + packed.starts.tobytes()
    return Shard(
        file=theirs.file,
        split=theirs.split,
        sequences=B,
        tokens=packed.num_tokens,
        counted=int(packed.mask.sum()),
        bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
        content=xxhash.xxh3_64_hexdigest(content),
        source=theirs.source,
    )


def _top_k(heard: Heard, K: int, vocab_size: int) -> TopK:
    """Return the targets in full: a format of K tokens has no room for fewer.

    Where fewer are known, the last ids of the vocabulary, the rarest words, follow with
    probability 0. Positions that do not count get what is no more than valid.
    """
    ids, top = heard.top_ids[:, :K].copy(), heard.top[:, :K].copy()
    # what stands behind the first K of a small vocabulary, too
    tail = np.minimum(heard.tail + heard.top[:, K:].sum(1), NEARLY_ALL)
    is_empty = ~top.any(1)
    top[is_empty, 0], ids[is_empty, 0], tail[is_empty] = 0.5, 0, 0.5
    fillers = np.arange(vocab_size)[: -1 - 2 * K : -1]
    is_open = (ids == LOST) | (top == 0)
    is_near = (np.where(is_open, 0, ids) > vocab_size - 1 - 2 * K).any(1)
    simple = is_open & ~is_near[:, None]
    ids[simple] = np.broadcast_to(fillers[:K], ids.shape)[simple]
    for row in np.flatnonzero(is_near & is_open.any(1)).tolist():
        own = is_open[row]
        ids[row, own] = fillers[~np.isin(fillers, ids[row, ~own])][: own.sum()]
    if K == vocab_size:
        tail = np.zeros_like(tail)
    with np.errstate(divide="ignore"):
        logprobs, tail = np.log(top), np.log(tail)
    return TopK(
        ids=torch.from_numpy(ids),
        distances=torch.from_numpy(logprobs[:, :1] - logprobs),
        log_sum_exp=torch.zeros(len(ids)),
        tail_logprob=torch.from_numpy(tail).float(),
    )


def _log(counts: Counter[str], out: Path) -> None:
    shares = summary(counts)
    logger.info(
        "%s: %d positions have targets, %.1f %% of them by the chain rule; %.2f %% of all are "
        "dropped; of the teacher's mass %.2f %% is of tokens of other bytes, %.2f %% is lost",
        *(out, counts["exact"] + counts["chained"], 100 * shares["chained_frac"]),
        *(100 * shares[name] for name in ("dropped_frac", "split_mass_frac", "lost_mass_frac")),
    )


def summary(counts: Counter[str]) -> dict[str, float]:
    """Return shares of positions, and of the teacher's mass where positions are kept."""
    kept = counts["exact"] + counts["chained"]
    return {
        "chained_frac": counts["chained"] / max(kept, 1),
        "dropped_frac": counts["dropped"] / max(kept + counts["dropped"], 1),
        "split_mass_frac": counts["split"] / max(kept, 1),
        "lost_mass_frac": counts["lost"] / max(kept, 1),
    }
