"""Caches of the reference system as ours: K targets without a tail.

Its shards know no log-sum-exp over the vocabulary, so that nobody knows how much of the teacher's
mass the K tokens carry: log-probabilities are normalised over them.

Shapes: N sequences, S positions, K teacher tokens kept, R random tokens.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from qat.anemll.shards import (
    CacheShape,
    ForeignShard,
    Meta,
    cache_root,
    common_shape,
    read_meta,
    read_shard,
    shard_files,
)
from qat.config import fingerprint
from qat.data.cache import IMPORTED_AS, MANIFEST, Manifest, Shard, Split, TeacherInfo, write_atomic
from qat.data.codec import TopK, encode_top_k, id_bits, pack_bits
from qat.data.config import CacheSettings, ImportConfig
from qat.data.shard_file import shard_content
from qat.data.text import tokenizer_hash
from qat.errors import CacheError, CheckpointError, HubError
from qat.files import check_free
from qat.logs import progress
from qat.models.directory import atomic_directory
from qat.models.load import load_config, load_tokenizer

PIECE = 2**21
"""Logits that are encoded at once."""


class Wish(NamedTuple):
    """What the imported cache shall say of itself."""

    meta: Meta
    tokenizer: str
    """`tokenizer_hash` of the tokenizer that made the tokens."""
    held_out: float
    """Share of the sequences to keep away from training: the last ones."""
    keeps_negatives: bool


def write_cache(root: Path, wish: Wish, out: Path) -> Manifest:
    """Write the cache at `root` as ours into `out`, which exists and is empty.

    The last `held_out` of the sequences become the held-out split: they lie in the order of the
    documents, so at most one document is on both sides of the cut.

    Raises:
        CacheError: a shard is damaged or holds what cannot be, or the disk is full.
    """
    files = shard_files(root)
    shape = common_shape(files, wish.meta)
    if not wish.keeps_negatives:
        shape = shape._replace(negatives=0)
    num_train = _num_train(sum(shape.sequences), wish.held_out)
    shards: dict[Split, list[Shard]] = {"train": [], "held_out": []}
    first = 0
    with progress("importing", len(files), "shards") as ticker:
        for file in files:
            whole = read_shard(file, wish.meta.vocab_size)
            if shape.negatives == 0:
                whole = whole._replace(random_ids=None, random_logits=None)
            for split, rows in _parts(first, len(whole.input_ids), num_train):
                part = ForeignShard(*(None if t is None else t[rows] for t in whole))
                path = out / f"{split}-{len(shards[split]):05d}.safetensors"
                content = _tensors(part, wish.meta.vocab_size)
                shards[split].append(_write_shard(path, split, part, content))
            first += len(whole.input_ids)
            ticker.advance()
    manifest = _manifest(wish, shape, [*shards["train"], *shards["held_out"]])
    write_atomic(out / MANIFEST, manifest.to_bytes())
    return manifest


def _num_train(total: int, held_out: float) -> int:
    num_held_out = round(total * held_out)
    if held_out > 0:
        num_held_out = max(1, num_held_out)
    if num_held_out >= total:
        raise CacheError(
            f"the cache has {total} sequences, of which held_out={held_out} leaves none to train "
            "on; lower --held-out"
        )
    return total - num_held_out


def _parts(first: int, count: int, num_train: int) -> Iterator[tuple[Split, slice]]:
    """The rows of a shard that go to each split."""
    cut = min(max(num_train - first, 0), count)
    if cut > 0:
        yield "train", slice(0, cut)
    if cut < count:
        yield "held_out", slice(cut, count)


def _tensors(shard: ForeignShard, vocab_size: int) -> dict[str, Tensor]:
    """What a shard file of ours holds."""
    tokens, starts, mask = _sequences(shard)
    bits = id_bits(vocab_size)
    tensors = {
        "tokens": pack_bits(tokens, bits),
        "starts": pack_bits(starts, 1),
        "mask": pack_bits(mask, 1),
        **_encoded(shard, vocab_size),
    }
    if shard.random_ids is not None:
        tensors["negative_ids"] = pack_bits(shard.random_ids.flatten(1), bits)
        tensors["negative_logits"] = shard.random_logits.half().contiguous()
    return tensors


def _write_shard(
    path: Path, split: Split, shard: ForeignShard, tensors: dict[str, Tensor]
) -> Shard:
    raw = shard_content(tensors)
    write_atomic(path, raw)
    tokens, starts, mask = _sequences(shard)
    content = tokens.int().numpy().tobytes() + starts.numpy().tobytes()
    return Shard(
        file=path.name,
        split=split,
        sequences=len(tokens),
        tokens=int(shard.attention.sum()),
        counted=int(mask.sum()),
        bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
        content=xxhash.xxh3_64_hexdigest(content),
    )


def _sequences(shard: ForeignShard) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, starts and mask, `(N, S)`: every sequence is one document, as its teacher read it."""
    attention = shard.attention
    starts = torch.zeros_like(attention)
    starts[:, 0] = True
    starts[:, 1:] |= attention[:, :-1] & ~attention[:, 1:]
    mask = torch.zeros_like(attention)
    mask[:, :-1] = attention[:, :-1] & attention[:, 1:]
    return shard.input_ids.long(), starts, mask


def _encoded(shard: ForeignShard, vocab_size: int) -> dict[str, Tensor]:
    """The rows of the teacher's word, most likely first, normalised over the K tokens."""
    S, K = shard.input_ids.shape[1], shard.ids.shape[2]
    size = max(1, PIECE // (S * K))
    pieces = [
        _encode_piece(ids, logits, vocab_size)
        for ids, logits in zip(shard.ids.split(size), shard.logits.split(size), strict=True)
    ]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _encode_piece(ids: Tensor, logits: Tensor, vocab_size: int) -> dict[str, Tensor]:
    N = len(ids)
    # the last position, where nothing is known and nothing counts, repeats the one before
    ids, logits = (
        torch.cat([t, t[:, -1:]], 1).flatten(0, 1) for t in (ids.long(), logits.double())
    )
    by_id = ids.argsort(1)
    order = by_id.gather(1, logits.gather(1, by_id).argsort(dim=1, descending=True, stable=True))
    ids, logits = ids.gather(1, order), logits.gather(1, order)
    top = TopK(
        ids=ids,
        distances=logits[:, :1] - logits,
        log_sum_exp=logits.logsumexp(1).float(),
        tail_logprob=torch.full((len(ids),), -torch.inf),
    )
    return encode_top_k(top, N, vocab_size)


def _manifest(wish: Wish, shape: CacheShape, shards: list[Shard]) -> Manifest:
    meta = wish.meta
    settings = CacheSettings(
        data=meta.data,
        format=meta.format,
        thinking=meta.thinking,
        sequence_length=shape.length,
        top_k=shape.top_k,
        held_out=wish.held_out,
        shard_size=max(shape.sequences),
    )
    identity = fingerprint([shard.sha256 for shard in shards])
    return Manifest(
        state="complete",
        fingerprint=fingerprint([settings.recorded(), identity, wish.tokenizer]),
        settings=settings,
        teacher=TeacherInfo(
            name=meta.teacher,
            identity=f"{IMPORTED_AS}{identity}",
            vocab_size=meta.vocab_size,
            max_positions=None,
            dtype="unknown",
        ),
        tokenizer=wish.tokenizer,
        has_tail=False,
        negatives=shape.negatives,
        shards=shards,
    )


# `qat cache import`: a cache of the reference system as ours, with its tokenizer's hash.


def import_cache(source: Path, config: ImportConfig, out: Path) -> Manifest:
    """Write the cache of the reference system at `source` as ours to `out`, whole or not at all.

    The tokenizer is that of `config.teacher`, or of the model that its `meta.json` names: students
    must have the same.

    Raises:
        ConfigError: `out` is not empty.
        CacheError: `source` is no such cache or damaged, or its tokenizer cannot be opened.
        CheckpointError: `out` cannot be written.
    """
    check_free(out)
    root = cache_root(source)
    meta = read_meta(root)
    name = config.teacher or meta.tokenizer
    try:
        tokenizer = tokenizer_hash(load_tokenizer(name))
    except (CheckpointError, HubError) as error:
        raise CacheError(
            f"the tokenizer that made the tokens of {root} cannot be opened ({str(error)[:200]}), "
            "and students must have the same; add --teacher MODEL, a model with that tokenizer"
        ) from None
    _check_vocabulary(name, meta.vocab_size, root)
    wish = Wish(meta, tokenizer, config.held_out, config.keep_negatives)
    with atomic_directory(out) as partial:
        return write_cache(root, wish, partial)


def _check_vocabulary(name: str, vocab_size: int, root: Path) -> None:
    """Refuse a model of another vocabulary than that of the teacher whose words were kept."""
    has = load_config(name).get_text_config().vocab_size
    if has != vocab_size:
        raise CacheError(
            f"teacher={name} has {has} words, but the teacher of {root} had {vocab_size}; expected "
            "the same vocabulary: add --teacher MODEL, the model that made the cache"
        )
