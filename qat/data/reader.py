"""Reads a teacher cache: memory-mapped shards, decoded a batch at a time.

Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws (padded).
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from qat.data.batch import Batch
from qat.data.bits import unpack_bits, unpack_flags
from qat.data.cache import Manifest, Shard, Split, raise_if_damaged, read_manifest
from qat.data.codec import TOP_K_ROWS, decode_draws, decode_top_k, id_bits
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
        place = self._place(indices, split)
        S, V = self.sequence_length, self.manifest.teacher.vocab_size
        rows = place.rows(["tokens", "starts", "mask"])
        input_ids = unpack_bits(rows["tokens"], id_bits(V), S).long()
        starts, mask = unpack_flags(rows["starts"], S), unpack_flags(rows["mask"], S)
        topk_ids, topk_logprobs, tail_logprob = self._top_k(place, "topk" in targets)
        sample_ids, sample_counts = self._draws(place, "draws" in targets)
        return Batch(
            input_ids=input_ids,
            position_ids=position_ids(starts),
            mask=mask,
            labels=labels(input_ids, starts, mask),
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            tail_logprob=tail_logprob,
            sample_ids=sample_ids,
            sample_counts=sample_counts,
        )

    def log_sum_exp(self, indices: Sequence[int] | np.ndarray, split: Split = "train") -> Tensor:
        """`(B, S)` float32 log-sum-exp of the teacher's logits: logit = log-prob + this."""
        return self._place(indices, split).rows(["log_sum_exp"])["log_sum_exp"]

    def negatives(
        self, indices: Sequence[int] | np.ndarray, split: Split = "train"
    ) -> tuple[Tensor, Tensor]:
        """Random tokens of an imported cache, `(B, S - 1, R)` int64, and their logits, float16.

        They are uniform, with repetition, and may be among the top K. R is 0 if none were kept.
        """
        R, S = self.manifest.negatives, self.sequence_length
        if R == 0:
            nothing = torch.zeros(len(indices), S - 1, 0)
            return nothing.long(), nothing.half()
        rows = self._place(indices, split).rows(["negative_ids", "negative_logits"])
        bits = id_bits(self.manifest.teacher.vocab_size)
        ids = unpack_bits(rows["negative_ids"], bits, (S - 1) * R).long()
        return ids.view(-1, S - 1, R), rows["negative_logits"]

    def _top_k(self, place: "_Place", is_wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
        settings, N, S = self.manifest.settings, len(place.owners), self.sequence_length
        if settings.top_k == 0 or not is_wanted:
            nothing = torch.zeros(N, S, 0)
            return nothing.long(), nothing, torch.zeros(N, S)
        rows, V = place.rows(TOP_K_ROWS), self.manifest.teacher.vocab_size
        ids, logprobs = decode_top_k(rows, length=S, k=settings.top_k, vocab_size=V)
        tail = rows["tail_logprob"]
        return ids, logprobs, tail if self.manifest.has_tail else torch.full_like(tail, torch.nan)

    def _draws(self, place: "_Place", is_wanted: bool) -> tuple[Tensor, Tensor]:
        settings, N, S = self.manifest.settings, len(place.owners), self.sequence_length
        if settings.draws == 0 or not is_wanted:
            nothing = torch.zeros(N, S, 0)
            return nothing.long(), nothing
        return decode_draws(
            place.rows(["sample_marks"])["sample_marks"],
            place.sample_ids(),
            length=S,
            num_draws=settings.draws,
            vocab_size=self.manifest.teacher.vocab_size,
        )

    def _place(self, indices: Sequence[int] | np.ndarray, split: Split) -> "_Place":
        """Where the sequences `indices` of a split are."""
        indices_B, total = np.asarray(indices, dtype=np.int64), self.num_sequences(split)
        if len(indices_B) and not (0 <= indices_B.min() and indices_B.max() < total):
            raise IndexError(
                f"indices {indices_B.tolist()} reach outside {total} {split} sequences"
            )
        ends = self._ends[split]
        owners_B = np.searchsorted(ends, indices_B, side="right")
        firsts = np.concatenate([[0], ends])
        return _Place(self._files[split], owners_B, indices_B - firsts[owners_B])


class _ShardFile:
    """One shard, proven by its hash and mapped into memory when first read."""

    def __init__(self, directory: Path, shard: Shard) -> None:
        self._directory = directory
        self._shard = shard

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All that the shard holds."""
        raise_if_damaged(self._directory, self._shard, deep=True)
        with safe_open(self._directory / self._shard.file, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}

    @cached_property
    def _sample_ends(self) -> np.ndarray:
        return self.tensors["sample_lengths"].numpy().cumsum(dtype=np.int64)

    @cached_property
    def _sample_ids(self) -> np.ndarray:
        return self.tensors["sample_ids"].numpy()

    def sample_ids(self, row: int) -> np.ndarray:
        """The bytes of a sequence's drawn ids."""
        first = self._sample_ends[row - 1] if row else 0
        return self._sample_ids[first : self._sample_ends[row]]


class _Place(NamedTuple):
    """Where sequences are: in which of the files, and in which row of it."""

    files: list[_ShardFile]
    owners: np.ndarray
    row_numbers: np.ndarray

    def rows(self, names: Collection[str]) -> dict[str, Tensor]:
        """Encoded rows, each file read once."""
        parts = []
        for owner in np.unique(self.owners):
            tensors = self.files[owner].tensors
            at = torch.from_numpy(self.row_numbers[self.owners == owner])
            parts.append([tensors[name].index_select(0, at) for name in names])
        back = torch.from_numpy(np.argsort(np.argsort(self.owners, kind="stable")))
        joined = (torch.cat(of_name).index_select(0, back) for of_name in zip(*parts, strict=True))
        return dict(zip(names, joined, strict=True))

    def sample_ids(self) -> list[np.ndarray]:
        """The bytes of each sequence's drawn ids."""
        numbers = zip(self.owners.tolist(), self.row_numbers.tolist(), strict=True)
        return [self.files[owner].sample_ids(row) for owner, row in numbers]
