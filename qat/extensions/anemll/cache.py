"""Import of the reference system's teacher caches: K targets per position without a tail.

Its shards hold no log-sum-exp over the vocabulary, so the teacher's mass on the K tokens is
unknown: log-probabilities are normalised over these tokens.

Shapes: N sequences, S positions, K teacher tokens kept, R random tokens.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import torch
import xxhash
from torch import Tensor

from qat.config import fingerprint
from qat.data.cache import IMPORTED_AS, MANIFEST, Manifest, Shard, Split, TeacherInfo, write_atomic
from qat.data.codec import TopK, encode_top_k, id_bits, pack_bits
from qat.data.config import CacheSettings, DataFormat, ImportConfig, Thinking
from qat.data.shard_file import shard_content
from qat.data.text import tokenizer_hash
from qat.errors import CacheError, CheckpointError, HubError
from qat.extensions.anemll.pickles import check_sums, check_tensors, read_pickle
from qat.files import check_free, parse_json
from qat.logs import progress
from qat.models.directory import atomic_directory
from qat.models.load import load_config, load_tokenizer

# Facts: Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5. A shard holds packed sequences and, at
# every position but the last, the teacher's K largest logits.

FOREIGN_FORMAT = "qwen_kd_topk_cache_v1"
META = "meta.json"
SHARDS = "shard_*.pt"
FORMATS: dict[str, DataFormat] = {
    "plain": "plain",
    "alpaca": "alpaca",
    "alpaca_chat": "alpaca",
    "openhermes": "sharegpt",
    "sharegpt": "sharegpt",
}
"""Our name of each row format that it has a name for."""
SHARD_DIMS = {
    "input_ids": 2,
    "attention_mask": 2,
    "topk_idx": 3,
    "topk_logits": 3,
    "rand_idx": 3,
    "rand_logits": 3,
}
"""Number of dimensions of a shard's tensors; in a file of one sequence the first may be missing."""


class Meta(NamedTuple):
    """The part of `meta.json` that the import needs."""

    teacher: str
    """The model's name, as the builder of the cache gave it."""
    tokenizer: str
    """The model whose tokenizer produced the tokens."""
    vocab_size: int
    data: str
    format: DataFormat
    thinking: Thinking


class ForeignShard(NamedTuple):
    """The checked tensors of one shard file."""

    input_ids: Tensor
    """`(N, S)`, integers below the vocabulary's size."""
    attention: Tensor
    """`(N, S)` bool: false at padding, which is at the end."""
    ids: Tensor
    """Token IDs `(N, S - 1, K)`."""
    logits: Tensor
    """`(N, S - 1, K)`, finite once `read_shard` has checked them."""
    random_ids: Tensor | None
    """`(N, S - 1, R)`; None without random tokens."""
    random_logits: Tensor | None


class CacheShape(NamedTuple):
    """The shape that all shards of a cache share, and the number of sequences in each."""

    sequences: list[int]
    length: int
    top_k: int
    negatives: int


def cache_root(source: Path) -> Path:
    """Return the directory with `meta.json`: `source`, or its only subdirectory that has one.

    Raises:
        CacheError: there is none, or several subdirectories have one.
    """
    if not source.is_dir():
        raise CacheError(
            f"{source} is no directory, expected a cache of the reference system; check the path"
        )
    inner = [source]
    if not (source / META).is_file():
        inner = [path.parent for path in source.glob(f"*/{META}")]
    if len(inner) != 1:
        raise CacheError(
            f"{source} holds no {META}, expected a cache of the reference system; name the "
            f"directory with {META} and {SHARDS}"
        )
    return inner[0]


def read_meta(root: Path) -> Meta:
    """Read and check `meta.json`.

    Raises:
        CacheError: it is not JSON, of another format, or lacks the size of the vocabulary.
    """
    path = root / META
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CacheError(
            f"{path} is not JSON ({error}), expected a description; copy it anew"
        ) from None
    found = values.get("format") if isinstance(values, dict) else None
    if found != FOREIGN_FORMAT:
        raise CacheError(
            f"{path} says format={str(found)[:60]!r}, expected {FOREIGN_FORMAT!r}; name a cache of "
            "the reference system"
        )
    vocab_size = values.get("vocab_size")
    if type(vocab_size) is not int or not 0 < vocab_size < 2**31:
        raise CacheError(
            f"{path} says vocab_size={str(vocab_size)[:60]}, expected the width of the teacher's "
            "logits; write it there"
        )
    teacher = _text(values, "teacher_model", "unknown")
    thinking = _text(values, "chat_thinking", "none")
    return Meta(
        teacher=teacher,
        tokenizer=_text(values, "tokenizer", teacher),
        vocab_size=vocab_size,
        data=_text(values, "dataset_name", "unknown"),
        format=FORMATS.get(_text(values, "dataset_format", ""), "auto"),
        thinking=thinking if thinking in get_args(Thinking) else "none",
    )


def common_shape(files: list[Path], meta: Meta) -> CacheShape:
    """Return the shape that all shards share; the files are mapped, not read."""
    sequences, others = [], set()
    for file in files:
        shard = _open_shard(file)
        N, S = shard.input_ids.shape
        R = 0 if shard.random_ids is None else shard.random_ids.shape[2]
        sequences.append(N)
        others.add((S, shard.ids.shape[2], R))
    if len(others) > 1:
        one, other = sorted(others)[:2]
        raise CacheError(
            f"{files[0].parent} mixes shards of (length, K, R)={one} and {other}, expected one "
            "shape; move the shards that do not belong to it"
        )
    S, K, R = others.pop()
    if K > meta.vocab_size:
        raise CacheError(
            f"{files[0]} keeps K={K} of a vocabulary of {meta.vocab_size}, expected fewer; mend "
            f"vocab_size in {META}"
        )
    return CacheShape(sequences, S, K, R)


def _open_shard(file: Path) -> ForeignShard:
    """Return the tensors of a file after checking their shapes, but not their values."""
    found = read_pickle(file, CacheError)
    missing = [k for k in ("input_ids", "topk_idx", "topk_logits") if found.get(k) is None]
    if missing:
        raise CacheError(f"{file} has no {missing[0]}, expected a shard of a cache; copy it anew")
    known = {name: found[name] for name in SHARD_DIMS if found.get(name) is not None}
    check_tensors(file, known, CacheError)
    known = {n: t[None] if t.dim() == SHARD_DIMS[n] - 1 else t for n, t in known.items()}
    ids = known["input_ids"]
    N, S = ids.shape if ids.dim() == SHARD_DIMS["input_ids"] else (0, 0)
    if N < 1 or S < 2:
        raise _misshapen(file, "input_ids", ids, "(N, S), S at least 2")
    K = known["topk_idx"].shape[-1] if known["topk_idx"].dim() else 0
    R = known["rand_idx"].shape[-1] if "rand_idx" in known and known["rand_idx"].dim() else 0
    wanted = {
        "attention_mask": (N, S),
        "topk_idx": (N, S - 1, max(K, 1)),
        "topk_logits": (N, S - 1, max(K, 1)),
        "rand_idx": (N, S - 1, max(R, 1)),
        "rand_logits": (N, S - 1, max(R, 1)),
    }
    for name, shape in wanted.items():
        if name in known and tuple(known[name].shape) != shape:
            raise _misshapen(file, name, known[name], str(shape))
    has_random = "rand_idx" in known and "rand_logits" in known
    return ForeignShard(
        ids,
        known.get("attention_mask", torch.ones(N, S, dtype=torch.bool)),
        known["topk_idx"],
        known["topk_logits"],
        known["rand_idx"] if has_random else None,
        known["rand_logits"] if has_random else None,
    )


def read_shard(file: Path, vocab_size: int) -> ForeignShard:
    """Return the tensors of a file after checking their shapes and values.

    Raises:
        CacheError: an ID is outside the vocabulary, a logit is not finite, a position has a token
            twice, or padding comes before tokens.
    """
    check_sums(file, CacheError)
    shard = _open_shard(file)
    found = {"input_ids": shard.input_ids, "topk_idx": shard.ids, "rand_idx": shard.random_ids}
    for name, ids in found.items():
        if ids is None:
            continue
        if ids.is_floating_point() or ids.min() < 0 or ids.max() >= vocab_size:
            raise CacheError(
                f"{file}: {name} has {ids.dtype} from {ids.min().item()} to {ids.max().item()}, "
                f"expected ids below vocab_size={vocab_size}; mend {META} or copy the shard anew"
            )
    for name, logits in (("topk_logits", shard.logits), ("rand_logits", shard.random_logits)):
        if logits is not None and not (logits.is_floating_point() and logits.isfinite().all()):
            raise CacheError(
                f"{file}: {name} holds NaN or infinity, expected finite logits; build the cache "
                "anew with a teacher whose logits float16 holds"
            )
    in_order = shard.ids.sort(-1).values
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise CacheError(
            f"{file}: topk_idx names a token twice at a position, expected K different ones; copy "
            "the shard anew"
        )
    attention = shard.attention != 0
    if (attention[:, 1:] & ~attention[:, :-1]).any():
        raise CacheError(
            f"{file}: attention_mask has padding before tokens, expected it behind them; build "
            "the cache anew"
        )
    return shard._replace(attention=attention)


def _misshapen(file: Path, name: str, tensor: Tensor, expected: str) -> CacheError:
    return CacheError(
        f"{file}: {name} has shape {tuple(tensor.shape)}, expected {expected}; copy the shard anew"
    )


def _text(values: dict[str, object], key: str, default: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) and value else default


PIECE = 2**21
"""Logits that are encoded at once, which bounds the memory of float64 copies."""


def write_cache(
    root: Path, out: Path, *, meta: Meta, tokenizer: str, config: ImportConfig
) -> Manifest:
    """Convert the cache at `root` to our format in `out`, which exists and is empty.

    The last `held_out` of the sequences become the held-out split: they are in document order, so
    at most one document is in both splits. `tokenizer` is the hash of the one that made the tokens.

    Raises:
        CacheError: a shard is damaged or invalid, or the disk is full.
    """
    files = sorted(root.glob(SHARDS))
    if not files:
        raise CacheError(
            f"{root} holds no {SHARDS}, expected the shards of a cache; copy them anew"
        )
    shape = common_shape(files, meta)
    if not config.keep_negatives:
        shape = shape._replace(negatives=0)
    num_train = _num_train(sum(shape.sequences), config.held_out)
    shards: dict[Split, list[Shard]] = {"train": [], "held_out": []}
    first = 0
    with progress("importing", len(files), "shards") as ticker:
        for file in files:
            whole = read_shard(file, meta.vocab_size)
            if shape.negatives == 0:
                whole = whole._replace(random_ids=None, random_logits=None)
            for split, rows in _parts(first, len(whole.input_ids), num_train):
                part = ForeignShard(*(None if t is None else t[rows] for t in whole))
                path = out / f"{split}-{len(shards[split]):05d}.safetensors"
                shards[split].append(_write_shard(path, split, part, meta.vocab_size))
            first += len(whole.input_ids)
            ticker.advance()
    both = [*shards["train"], *shards["held_out"]]
    settings = CacheSettings(
        data=meta.data,
        format=meta.format,
        thinking=meta.thinking,
        sequence_length=shape.length,
        top_k=shape.top_k,
        held_out=config.held_out,
        shard_size=max(shape.sequences),
    )
    identity = fingerprint([shard.sha256 for shard in both])
    manifest = Manifest(
        state="complete",
        fingerprint=fingerprint([settings.recorded(), identity, tokenizer]),
        settings=settings,
        teacher=TeacherInfo(
            name=meta.teacher,
            identity=f"{IMPORTED_AS}{identity}",
            vocab_size=meta.vocab_size,
            max_positions=None,
            dtype="unknown",
        ),
        tokenizer=tokenizer,
        has_tail=False,
        negatives=shape.negatives,
        shards=both,
    )
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
    """Yield the rows of a shard for each split; `first` is the index of its first sequence."""
    cut = min(max(num_train - first, 0), count)
    if cut > 0:
        yield "train", slice(0, cut)
    if cut < count:
        yield "held_out", slice(cut, count)


def _write_shard(path: Path, split: Split, shard: ForeignShard, vocab_size: int) -> Shard:
    """Write a shard file in our format; each sequence is one document."""
    attention, tokens, bits = shard.attention, shard.input_ids.long(), id_bits(vocab_size)
    starts, mask = torch.zeros_like(attention), torch.zeros_like(attention)  # `(N, S)` bool
    starts[:, 0] = True
    starts[:, 1:] |= attention[:, :-1] & ~attention[:, 1:]  # padding is a document of its own
    mask[:, :-1] = attention[:, :-1] & attention[:, 1:]
    tensors = {
        "tokens": pack_bits(tokens, bits),
        "starts": pack_bits(starts, 1),
        "mask": pack_bits(mask, 1),
        **_encoded(shard, vocab_size),
    }
    if shard.random_ids is not None:
        tensors["negative_ids"] = pack_bits(shard.random_ids.flatten(1), bits)
        tensors["negative_logits"] = shard.random_logits.half().contiguous()
    raw = shard_content(tensors)
    write_atomic(path, raw)
    content = tokens.int().numpy().tobytes() + starts.numpy().tobytes()
    return Shard(
        file=path.name,
        split=split,
        sequences=len(tokens),
        tokens=int(attention.sum()),
        counted=int(mask.sum()),
        bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
        content=xxhash.xxh3_64_hexdigest(content),
    )


def _encoded(shard: ForeignShard, vocab_size: int) -> dict[str, Tensor]:
    """Encode the teacher's tokens, most likely first, normalised over the K tokens."""
    S, K = shard.input_ids.shape[1], shard.ids.shape[2]
    size = max(1, PIECE // (S * K))
    pieces = [
        _encode_piece(ids, logits, vocab_size)
        for ids, logits in zip(shard.ids.split(size), shard.logits.split(size), strict=True)
    ]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _encode_piece(ids: Tensor, logits: Tensor, vocab_size: int) -> dict[str, Tensor]:
    N = len(ids)
    # the last position has no target and is masked out: repeat the one before it
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


def import_cache(source: Path, config: ImportConfig, out: Path) -> Manifest:
    """Convert the cache of the reference system at `source` to `out`, completely or not at all.

    The tokenizer is that of `config.teacher`, or of the model named in `meta.json`: students must
    have the same one.

    Raises:
        ConfigError: `out` is not empty.
        CacheError: `source` is not such a cache or damaged, or its tokenizer cannot be opened.
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
    words = load_config(name).get_text_config().vocab_size
    if words != meta.vocab_size:
        raise CacheError(
            f"teacher={name} has {words} words, but the teacher of {root} had {meta.vocab_size}; "
            "expected the same vocabulary: add --teacher MODEL, the model that made the cache"
        )
    with atomic_directory(out) as partial:
        return write_cache(root, partial, meta=meta, tokenizer=tokenizer, config=config)
