"""Reads the reference system's caches (`qwen_kd_topk_cache_v1`): meta.json and pickled shards.

A shard holds packed sequences and, at every position but the last, the teacher's K largest logits.
Facts: Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5.

Shapes: N sequences, S positions, K teacher tokens kept, R random tokens.
"""

import json
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from qat.anemll.pickles import check_sums, check_tensors, read_pickle
from qat.data.config import DataFormat, Thinking
from qat.errors import CacheError

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
"""Its names of what a row holds, and ours."""
SHARD_DIMS = {
    "input_ids": 2,
    "attention_mask": 2,
    "topk_idx": 3,
    "topk_logits": 3,
    "rand_idx": 3,
    "rand_logits": 3,
}
"""Dimensions of a shard's tensors; a file of one sequence may lack the first."""


class Meta(NamedTuple):
    """What `meta.json` says and we need."""

    teacher: str
    """Of the model, as its builder called it."""
    tokenizer: str
    """The model whose tokenizer made the tokens."""
    vocab_size: int
    data: str
    format: DataFormat
    thinking: Thinking


class ForeignShard(NamedTuple):
    """The tensors of one file, checked."""

    input_ids: Tensor
    """`(N, S)`, integers below the vocabulary's size."""
    attention: Tensor
    """`(N, S)` bool: no padding, which comes last."""
    ids: Tensor
    """`(N, S - 1, K)`."""
    logits: Tensor
    """`(N, S - 1, K)`, finite."""
    random_ids: Tensor | None
    """`(N, S - 1, R)`; None without any."""
    random_logits: Tensor | None


class CacheShape(NamedTuple):
    """What all shards of a cache have in common, and their sequences."""

    sequences: list[int]
    length: int
    top_k: int
    negatives: int


def cache_root(source: Path) -> Path:
    """The directory with `meta.json`: `source`, or the only one in it that has some.

    Raises:
        CacheError: there is none.
    """
    if not source.is_dir():
        raise CacheError(
            f"{source} is no directory, expected a cache of the reference system; check the path"
        )
    inner = (
        [source]
        if (source / META).is_file()
        else sorted(p.parent for p in source.glob(f"*/{META}"))
    )
    if len(inner) != 1:
        raise CacheError(
            f"{source} holds no {META}, expected a cache of the reference system; name the "
            f"directory with {META} and {SHARDS}"
        )
    return inner[0]


def read_meta(root: Path) -> Meta:
    """What its `meta.json` says.

    Raises:
        CacheError: it is no JSON, of another format, or says nothing of the vocabulary.
    """
    path = root / META
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
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


def shard_files(root: Path) -> list[Path]:
    """The shard files of a cache, in order.

    Raises:
        CacheError: there is none.
    """
    files = sorted(root.glob(SHARDS))
    if not files:
        raise CacheError(
            f"{root} holds no {SHARDS}, expected the shards of a cache; copy them anew"
        )
    return files


def common_shape(files: list[Path], meta: Meta) -> CacheShape:
    """The shape that all shards share; each is mapped, not read.

    Raises:
        CacheError: one is no shard, or the shapes differ.
    """
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
    """The tensors of a file with their shapes checked, nothing else."""
    found = read_pickle(file, CacheError)
    missing = [k for k in ("input_ids", "topk_idx", "topk_logits") if found.get(k) is None]
    if missing:
        raise CacheError(f"{file} has no {missing[0]}, expected a shard of a cache; copy it anew")
    known = {name: found[name] for name in SHARD_DIMS if found.get(name) is not None}
    check_tensors(file, known, CacheError)
    known = {n: t[None] if t.dim() == SHARD_DIMS[n] - 1 else t for n, t in known.items()}
    N, S = (
        known["input_ids"].shape if known["input_ids"].dim() == SHARD_DIMS["input_ids"] else (0, 0)
    )
    if N < 1 or S < 2:
        raise _misshapen(file, "input_ids", known["input_ids"], "(N, S), S at least 2")
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
        known["input_ids"],
        known.get("attention_mask", torch.ones(N, S, dtype=torch.bool)),
        known["topk_idx"],
        known["topk_logits"],
        known["rand_idx"] if has_random else None,
        known["rand_logits"] if has_random else None,
    )


def read_shard(file: Path, vocab_size: int) -> ForeignShard:
    """The tensors of a file, their values checked.

    Raises:
        CacheError: ids beyond the vocabulary, logits that are not finite, a token named twice.
    """
    check_sums(file, CacheError)
    shard = _open_shard(file)
    for name, ids in (
        ("input_ids", shard.input_ids),
        ("topk_idx", shard.ids),
        ("rand_idx", shard.random_ids),
    ):
        if ids is not None and (
            ids.is_floating_point() or ids.min() < 0 or ids.max() >= vocab_size
        ):
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
