"""Builds a teacher cache: documents -> packed sequences -> teacher -> shards.

A shard is the unit of everything: it is computed from its own sequences alone and written whole,
so a build that was killed at any instant goes on after its last shard and ends in the same bytes.

Shapes: N sequences, S positions, T tokens of a chunk, V vocabulary.
"""

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.data.bits import pack_bits
from qat.data.cache import (
    MANIFEST,
    SPLITS,
    TEMPORARY,
    Manifest,
    Shard,
    TeacherInfo,
    new_manifest,
    read_manifest,
    remove_temporary,
    shard_problem,
    write_atomic,
)
from qat.data.chat import Document
from qat.data.codec import encode_draws, encode_top_k, id_bits
from qat.data.config import CacheSettings
from qat.data.packing import Packed, position_ids
from qat.data.signals import Request, ask
from qat.data.stream import Block, blocks
from qat.data.teacher import Teacher
from qat.data.text import tokenizer_hash
from qat.errors import CacheError, ConfigError
from qat.logs import progress

logger = logging.getLogger(__name__)

CHUNK_LOGITS = 2**24  # logits formed at once: 64 MiB in float32


def build_cache(
    settings: CacheSettings,
    *,
    tokenizer: PreTrainedTokenizerBase,
    teacher: Teacher,
    info: TeacherInfo,
    documents: Iterable[Document],
    out: Path,
) -> Manifest:
    """Run the teacher over the documents and keep its word in `out`; goes on where it stopped.

    The logits of a whole batch never exist at once. A finished cache is left as it is.

    Raises:
        ConfigError: K above the vocabulary, or sequences longer than the teacher can read.
        DataError: the documents hold no text.
        CacheError: `out` holds something else, or was built from other settings or data.
    """
    _check_limits(settings, info)
    fresh = new_manifest(settings, info, tokenizer_hash(tokenizer))
    manifest = _resume(fresh, out)
    if manifest.state == "complete" and not _has_gaps(manifest, out):
        logger.info("%s is complete already: nothing to do", out)
        return manifest
    total = settings.num_sequences or None
    with progress("teacher", total, "training sequences") as ticker:
        for block in blocks(documents, tokenizer, settings):
            manifest = _add_block(block, manifest, teacher, out)
            ticker.advance(len(block.packed.tokens) if block.split == "train" else 0)
    manifest = manifest.model_copy(update={"state": "complete"})
    write_atomic(out / MANIFEST, manifest.to_bytes())
    _warn_if_empty(manifest)
    return manifest


def _check_limits(settings: CacheSettings, info: TeacherInfo) -> None:
    if settings.top_k > info.vocab_size:
        raise ConfigError(
            f"top_k={settings.top_k} is more than the teacher's vocabulary of {info.vocab_size}; "
            "lower --top-k"
        )
    if info.max_positions is not None and settings.sequence_length > info.max_positions:
        raise ConfigError(
            f"sequence_length={settings.sequence_length}, but {info.name} reads at most "
            f"{info.max_positions} positions; lower --sequence-length"
        )


def _resume(fresh: Manifest, out: Path) -> Manifest:
    """The manifest to go on from: that of `out` if it was made the same way, else `fresh`."""
    if not out.exists():
        return fresh
    if not out.is_dir():
        raise CacheError(f"{out} is a file, expected a directory to build in; choose another --out")
    if not (out / MANIFEST).exists():
        if any(path.suffix != TEMPORARY for path in out.iterdir()):
            raise CacheError(
                f"{out} is not empty and holds no teacher cache; choose another --out or empty it"
            )
        return fresh
    old = read_manifest(out)
    differences = _differences(old, fresh)
    if differences:
        raise CacheError(
            f"{out} was built with {'; '.join(differences)}; "
            "choose another --out or delete the directory"
        )
    remove_temporary(out)
    return old


def _differences(old: Manifest, new: Manifest) -> list[str]:
    pairs = [
        (name, getattr(old.settings, name), getattr(new.settings, name))
        for name in CacheSettings.model_fields
    ]
    pairs += [
        ("teacher", old.teacher.identity, new.teacher.identity),
        ("dtype", old.teacher.dtype, new.teacher.dtype),
        ("tokenizer", old.tokenizer, new.tokenizer),
    ]
    return [f"{name}={a}, now asked for {name}={b}" for name, a, b in pairs if a != b]


def _has_gaps(manifest: Manifest, out: Path) -> bool:
    return any(shard_problem(out, shard, deep=False) for shard in manifest.shards)


def _add_block(block: Block, manifest: Manifest, teacher: Teacher, out: Path) -> Manifest:
    """The manifest with the block's shard in it, built unless it is there already."""
    content = _content_hash(block.packed)
    known = {shard.file: shard for shard in manifest.shards}.get(block.file)
    if known is not None:
        if known.content != content:
            raise CacheError(
                f"{out / block.file} was built from other text than the data now gives; "
                "restore the data or choose another --out"
            )
        if shard_problem(out, known, deep=False) is None:
            return manifest
    if known is None and not manifest.shards:
        _start(manifest, out)
    raw = save(_shard_tensors(block, manifest, teacher))
    write_atomic(out / block.file, raw)
    shard = _describe(block, raw, content)
    others = [entry for entry in manifest.shards if entry.file != block.file]
    shards = sorted([*others, shard], key=lambda s: (SPLITS.index(s.split), s.file))
    manifest = manifest.model_copy(update={"shards": shards})
    write_atomic(out / MANIFEST, manifest.to_bytes())
    return manifest


def _start(manifest: Manifest, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / MANIFEST, manifest.to_bytes())


def _content_hash(packed: Packed) -> str:
    return xxhash.xxh3_64_hexdigest(packed.tokens.tobytes() + packed.starts.tobytes())


def _describe(block: Block, raw: bytes, content: str) -> Shard:
    return Shard(
        file=block.file,
        split=block.split,
        sequences=len(block.packed.tokens),
        tokens=block.packed.num_tokens,
        counted=int(block.packed.mask.sum()),
        bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
        content=content,
    )


def _shard_tensors(block: Block, manifest: Manifest, teacher: Teacher) -> dict[str, Tensor]:
    """All tensors of a shard, from its sequences batch by batch."""
    size = manifest.settings.batch_size
    batches = []
    for first in range(0, len(block.packed.tokens), size):
        rows = slice(first, first + size)
        batches.append(_batch_tensors(block, rows, manifest, teacher))
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _batch_tensors(
    block: Block, rows: slice, manifest: Manifest, teacher: Teacher
) -> dict[str, Tensor]:
    packed, settings, V = block.packed, manifest.settings, manifest.teacher.vocab_size
    tokens = torch.from_numpy(packed.tokens[rows]).long()
    starts, mask = torch.from_numpy(packed.starts[rows]), torch.from_numpy(packed.mask[rows])
    _check_tokens(tokens, V)
    signals = ask(
        teacher,
        tokens,
        position_ids(starts),
        request=Request(settings.top_k, settings.draws, max(1, CHUNK_LOGITS // V)),
        seed=_batch_seed(settings.seed, block, rows.start),
    )
    tensors = {
        "tokens": pack_bits(tokens, id_bits(V)),
        "starts": pack_bits(starts, 1),
        "mask": pack_bits(mask, 1),
    }
    if signals.top is not None:
        tensors |= encode_top_k(signals.top, len(tokens), V)
    if signals.draws is not None:
        tensors |= encode_draws(signals.draws.cpu().view(*tokens.shape, -1), mask, V)
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _batch_seed(seed: int, block: Block, row: int) -> int:
    """The seed of a batch's draws: of the user's seed and the batch's place, of nothing else."""
    place = f"{seed}/{block.split}/{block.first_sequence + row}"
    return xxhash.xxh3_64_intdigest(place.encode()) >> 1


def _check_tokens(tokens: Tensor, vocab_size: int) -> None:
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer gave token {largest}, but the teacher's vocabulary has {vocab_size}; "
            "use the teacher's own tokenizer"
        )


def _warn_if_empty(manifest: Manifest) -> None:
    for split in SPLITS:
        if not manifest.of_split(split) and (split == "train" or manifest.settings.held_out):
            logger.warning(
                "no document fell into the %s split; --held-out is %g",
                split,
                manifest.settings.held_out,
            )
