"""Reads a teacher cache: memory-mapped shards, decoded a batch at a time.

Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws (padded).
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from qat.data.batch import Batch
from qat.data.bits import unpack_bits
from qat.data.cache import Manifest, Shard, Split, raise_if_damaged, read_manifest
from qat.data.codec import decode_draws, decode_top_k, id_bits
from qat.data.packing import labels, position_ids
from qat.errors import CacheError


class TeacherCache:
    """A finished cache: sequences with the teacher's targets, found by split and index."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._files: dict[str, list[_ShardFile]] = {}
        self._ends: dict[str, np.ndarray] = {}
        for split in ("train", "held_out"):
            shards = manifest.of_split(split)
            self._files[split] = [_ShardFile(directory, shard) for shard in shards]
            self._ends[split] = np.cumsum([shard.sequences for shard in shards], dtype=np.int64)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """The cache in `directory`, its manifest proven and its shards of the right size.

        Raises:
            CacheError: it is missing, foreign, unfinished or damaged.
        """
        manifest = read_manifest(directory)
        if manifest.state != "complete":
            raise CacheError(
                f"{directory} is an unfinished cache of {manifest.total('sequences')} sequences; "
                "run the same 'qat cache' command again to finish it"
            )
        for shard in manifest.shards:
            raise_if_damaged(directory, shard, deep=False)
        return cls(directory, manifest)

    @property
    def sequence_length(self) -> int:
        """Positions in a sequence."""
        return self.manifest.settings.sequence_length

    def num_sequences(self, split: Split) -> int:
        """Sequences in a split."""
        ends = self._ends[split]
        return int(ends[-1]) if len(ends) else 0

    def check_student(
        self, tokenizer_hash: str, vocab_size: int, max_positions: int | None
    ) -> None:
        """Make sure that a student can learn from this cache.

        Raises:
            CacheError: its tokenizer or vocabulary differ, or it cannot read so long sequences.
        """
        teacher = self.manifest.teacher
        if tokenizer_hash != self.manifest.tokenizer:
            raise CacheError(
                f"{self.directory} was tokenised with tokenizer {self.manifest.tokenizer}, the "
                f"student has {tokenizer_hash}; rebuild the cache with the student's tokenizer"
            )
        if vocab_size != teacher.vocab_size:
            raise CacheError(
                f"{self.directory} is over a vocabulary of {teacher.vocab_size}, the student's "
                f"has {vocab_size}; rebuild the cache with a teacher of the student's vocabulary"
            )
        if max_positions is not None and self.sequence_length > max_positions:
            raise CacheError(
                f"{self.directory} holds sequences of {self.sequence_length} tokens, the student "
                f"reads at most {max_positions}; rebuild it with a lower --sequence-length"
            )

    def batch(
        self,
        indices: Sequence[int] | np.ndarray,
        split: Split = "train",
        *,
        targets: Collection[str] = ("topk", "draws"),
    ) -> Batch:
        """The sequences `indices` of a split, in that order, on the CPU.

        Of what the teacher said only `targets` are unpacked; the rest is as if it were not there.

        Raises:
            IndexError: an index outside the split.
        """
        rows = self._rows(np.asarray(indices, dtype=np.int64), split)
        S, V = self.sequence_length, self.manifest.teacher.vocab_size
        input_ids = unpack_bits(rows["tokens"], id_bits(V), S)
        starts, mask = unpack_bits(rows["starts"], 1, S).bool(), unpack_bits(rows["mask"], 1, S)
        topk_ids, topk_logprobs, tail_logprob = self._top_k(rows, "topk" in targets)
        sample_ids, sample_counts = self._draws(rows, "draws" in targets)
        return Batch(
            input_ids=input_ids,
            position_ids=position_ids(starts),
            mask=mask.bool(),
            labels=labels(input_ids, starts, mask.bool()),
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            tail_logprob=tail_logprob,
            sample_ids=sample_ids,
            sample_counts=sample_counts,
        )

    def log_sum_exp(self, indices: Sequence[int] | np.ndarray, split: Split = "train") -> Tensor:
        """`(B, S)` float32 log-sum-exp of the teacher's logits: logit = log-prob + this."""
        return self._rows(np.asarray(indices, dtype=np.int64), split)["log_sum_exp"]

    def _top_k(self, rows: dict[str, Tensor], is_wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
        settings, N = self.manifest.settings, len(rows["tokens"])
        S, K = settings.sequence_length, settings.top_k
        if K == 0 or not is_wanted:
            nothing = torch.zeros(N, S, 0)
            return nothing.long(), nothing, torch.zeros(N, S)
        ids, logprobs = decode_top_k(
            rows, length=S, k=K, vocab_size=self.manifest.teacher.vocab_size
        )
        return ids, logprobs, rows["tail_logprob"]

    def _draws(self, rows: dict[str, Tensor], is_wanted: bool) -> tuple[Tensor, Tensor]:
        settings, N = self.manifest.settings, len(rows["tokens"])
        S, n = settings.sequence_length, settings.draws
        if n == 0 or not is_wanted:
            nothing = torch.zeros(N, S, 0)
            return nothing.long(), nothing
        id_rows = list(rows["sample_ids"].split(rows["sample_lengths"].tolist()))
        return decode_draws(
            rows["sample_marks"],
            id_rows,
            length=S,
            num_draws=n,
            vocab_size=self.manifest.teacher.vocab_size,
        )

    def _rows(self, indices: np.ndarray, split: Split) -> dict[str, Tensor]:
        """The encoded rows of some sequences, each shard read once."""
        total = self.num_sequences(split)
        if len(indices) and not (0 <= indices.min() and indices.max() < total):
            raise IndexError(f"indices {indices.tolist()} reach outside {total} {split} sequences")
        ends = self._ends[split]
        owners = np.searchsorted(ends, indices, side="right")
        order = np.argsort(owners, kind="stable")
        parts = []
        for owner in np.unique(owners):
            first = int(ends[owner - 1]) if owner else 0
            parts.append(self._files[split][owner].rows(indices[owners == owner] - first))
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        return _reordered(parts, back)


class _ShardFile:
    """One shard, proven by its hash and mapped into memory when first read."""

    def __init__(self, directory: Path, shard: Shard) -> None:
        self._directory = directory
        self._shard = shard

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        raise_if_damaged(self._directory, self._shard, deep=True)
        with safe_open(self._directory / self._shard.file, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}

    @cached_property
    def _sample_ends(self) -> Tensor:
        return self._tensors["sample_lengths"].long().cumsum(0)

    def rows(self, places: np.ndarray) -> dict[str, Tensor]:
        """The encoded rows at `places`; ids of draws one after the other."""
        at = torch.from_numpy(places)
        rows = {name: t[at] for name, t in self._tensors.items() if name != "sample_ids"}
        if "sample_ids" in self._tensors:
            ends = self._sample_ends[at]
            firsts = (ends - rows["sample_lengths"]).tolist()
            spans = zip(firsts, ends.tolist(), strict=True)
            rows["sample_ids"] = torch.cat([self._tensors["sample_ids"][a:b] for a, b in spans])
        return rows


def _reordered(parts: list[dict[str, Tensor]], back: Tensor) -> dict[str, Tensor]:
    """Rows of several shards laid together and put into the order asked for."""
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    ids = rows.pop("sample_ids", None)
    if ids is not None:
        spans = ids.split(rows["sample_lengths"].tolist())
        ids = torch.cat([spans[i] for i in back.tolist()])
    rows = {name: tensor[back] for name, tensor in rows.items()}
    return rows if ids is None else {**rows, "sample_ids": ids}
