"""Read a teacher cache: load the rows of a batch from the shards and decode them.

Only the manifest and the headers of recently used shards stay in memory.

Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws (padded).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from qat.data.cache import SPLITS, Manifest, Shard, Split, raise_if_damaged, read_manifest
from qat.data.codec import (
    TOP_K_ROWS,
    decode_draws,
    decode_top_k,
    id_bits,
    over_words,
    unpack_bits,
    unpack_flags,
)
from qat.data.packing import Batch, labels, position_ids
from qat.data.sampler import sequence_indices
from qat.data.shard_file import (
    OPEN_SHARDS,
    Layout,
    OpenShard,
    promised_layout,
    reads,
    shard_opener,
)
from qat.errors import CacheError

ROWS = {"topk": TOP_K_ROWS, "draws": ("sample_marks",)}
"""Fields of a row by the teacher's targets that they hold."""


def read_rows(
    shards: dict[int, OpenShard],
    owners_B: np.ndarray,
    rows_B: np.ndarray,
    layout: Layout,
    *,
    names: Sequence[str],
    has_ids: bool,
) -> tuple[dict[str, Tensor], list[np.ndarray]]:
    """Read sequences from any number of shards; all reads are announced to the kernel beforehand.

    Args:
        shards: open shards by number.
        owners_B: the number of each sequence's shard.
        rows_B: the row of each sequence in its shard.

    Returns:
        The encoded fields `names`, and, if `has_ids`, the bytes of each sequence's drawn ids.
    """
    is_next = (np.diff(owners_B) == 0) & (np.diff(rows_B) == 1)
    cuts = [0, *(np.flatnonzero(~is_next) + 1).tolist(), len(rows_B)]
    runs: list[tuple[OpenShard, range]] = []  # sequences that are consecutive rows of one shard
    begins_B: list[int] = []
    lengths_B: list[int] = []
    for first, end in pairwise(cuts) if len(rows_B) else ():
        shard, row = shards[int(owners_B[first])], int(rows_B[first])
        begins = shard.begins[row : row + end - first + 1]
        runs.append((shard, range(first, end)))
        begins_B += begins[:-1].tolist()
        lengths_B += np.diff(begins).tolist()
    fields = {name: layout.fields[name] for name in names}
    found = {n: np.empty((len(rows_B), *each.shape), each.dtype) for n, each in fields.items()}
    outs = sorted(
        (layout.offsets[name], field.stride, memoryview(found[name].reshape(-1)).cast("B"))
        for name, field in fields.items()
        if field.stride and len(rows_B)
    )
    ids: list[np.ndarray] = []
    if has_ids:
        ends = list(accumulate((length - layout.width for length in lengths_B), initial=0))
        room = np.empty(ends[-1], np.uint8)
        ids = [room[first:end] for first, end in pairwise(ends)]

    def pieces(places: range) -> Iterator[tuple[int, memoryview]]:
        for place in places:
            for offset, stride, out in outs:
                yield begins_B[place] + offset, out[place * stride : (place + 1) * stride]
            if has_ids:
                yield begins_B[place] + layout.width, memoryview(ids[place])

    wanted = [(shard, read) for shard, places in runs for read in reads(pieces(places))]
    for shard, read in wanted:
        shard.prefetch(read)
    for shard, read in wanted:
        shard.fill(read)
    return {name: torch.from_numpy(array) for name, array in found.items()}, ids


class TeacherCache:
    """A finished cache: sequences with the teacher's targets, indexed by split and number."""

    waits, waited_s = 0, 0.0  # how often and how long in all a batch was waited for

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        fetch: Callable[[Shard], None] = lambda shard: None,
        open_shards: int | None = None,
    ) -> None:
        """Prepare to read the cache; no shard is opened yet.

        Args:
            fetch: downloads a shard's file into `directory`, if it is not local.
            open_shards: maximum number of shards open at once; by default `OPEN_SHARDS`.
        """
        self.directory = directory
        self.manifest = manifest
        self.num_words = manifest.teacher.vocab_size
        """Number of leading words that targets are over: those of teacher and student."""
        self._layout = promised_layout(manifest)
        self._open = shard_opener(
            directory, manifest, fetch=fetch, limit=open_shards or OPEN_SHARDS
        )
        self._shards = {split: manifest.of_split(split) for split in SPLITS}
        self._ends = {
            split: np.cumsum([shard.sequences for shard in shards], dtype=np.int64)
            for split, shards in self._shards.items()
        }

    @classmethod
    def open(cls, directory: Path | str) -> Self:
        """Open the cache in `directory`; check its manifest's hash and its shards' sizes.

        Raises:
            CacheError: the cache is missing, foreign, unfinished or damaged.
        """
        directory = Path(directory)
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
        """Number of positions in a sequence."""
        return self.manifest.settings.sequence_length

    def num_sequences(self, split: Split) -> int:
        """Return the number of sequences in a split."""
        ends = self._ends[split]
        return int(ends[-1]) if len(ends) else 0

    def indices(self, seed: int, step: int, count: int) -> np.ndarray:
        """Return the `(count,)` training sequences of a step; see `sequence_indices`."""
        return sequence_indices(seed, step, count, self.num_sequences("train"))

    def check_student(self, tokenizer_hash: str, vocab_size: int, max_positions: int | None) -> int:
        """Check that a student can learn from this cache; return the number of words of both.

        Batches are then over these words: models of a family may pad a vocabulary differently.

        Raises:
            CacheError: the student's tokenizer differs, or it cannot read sequences this long.
        """
        if tokenizer_hash != self.manifest.tokenizer:
            raise CacheError(
                f"{self.directory} was tokenised with tokenizer {self.manifest.tokenizer}, the "
                f"student has {tokenizer_hash}, expected one; write its cache: qat cache realign "
                f"{self.directory} --tokenizer STUDENT"
            )
        if max_positions is not None and self.sequence_length > max_positions:
            raise CacheError(
                f"{self.directory} holds sequences of {self.sequence_length} tokens, the student "
                f"reads at most {max_positions}; rebuild it with a lower --sequence-length"
            )
        self.num_words = min(vocab_size, self.manifest.teacher.vocab_size)
        return self.num_words

    def batch(
        self,
        indices: Sequence[int] | np.ndarray,
        split: Split = "train",
        *,
        targets: Collection[str] = ("topk", "draws"),
    ) -> Batch:
        """Return the sequences `indices` of a split, in that order, on the CPU.

        Only the teacher's `targets` are decoded; others are returned with width 0.

        Raises:
            IndexError: an index is outside the split.
            CacheError: a shard is missing or damaged, or holds impossible values.
        """
        names = ["tokens", "starts", "mask"]
        names += [
            name for target in targets for name in ROWS[target] if name in self._layout.fields
        ]
        has_draws = "draws" in targets and self._layout.has_draws
        rows, drawn = self._read(indices, split, names, has_ids=has_draws)
        S, V = self.sequence_length, self.manifest.teacher.vocab_size
        input_ids = unpack_bits(rows["tokens"], id_bits(V), S).long()
        self._valid_ids(input_ids, self.num_words)
        starts, mask = unpack_flags(rows["starts"], S), unpack_flags(rows["mask"], S)
        topk_ids, topk_logprobs, tail_logprob = self._top_k(rows)
        sample_ids, sample_counts = self._draws(rows, drawn)
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

    def micro_batches(self, parts: np.ndarray, targets: Collection[str]) -> list[Batch]:
        """Return the training sequences of each of `parts`, the micro-batches of a step."""
        return [self.batch(part, targets=targets) for part in parts]

    def log_sum_exp(self, indices: Sequence[int] | np.ndarray, split: Split = "train") -> Tensor:
        """Return the teacher's log-sum-exp, `(B, S)` float32: logit = log-prob + log-sum-exp."""
        rows, _ = self._read(indices, split, ["log_sum_exp"])
        return self._finite(rows["log_sum_exp"], "log-sum-exp")

    def _top_k(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        N, S, V = len(rows["tokens"]), self.sequence_length, self.manifest.teacher.vocab_size
        if "topk_ids" not in rows:
            nothing = torch.zeros(N, S, 0)
            return nothing.long(), nothing, torch.zeros(N, S)
        ids, logprobs = decode_top_k(rows, length=S, k=self.manifest.settings.top_k, vocab_size=V)
        tail = rows["tail_logprob"]
        if not (tail < 0).all():  # 0 would leave no mass for the top K; NaN fails too
            raise self._invalid("a tail that is no probability")
        self._valid_ids(ids)
        if self.num_words < V:
            ids, logprobs, tail = over_words(ids, logprobs, tail, self.num_words)
            self._finite(tail, "tail beside words that the student has not")
        return ids, logprobs, tail if self.manifest.has_tail else torch.full_like(tail, torch.nan)

    def _draws(self, rows: dict[str, Tensor], drawn: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        S = self.sequence_length
        if "sample_marks" not in rows:
            nothing = torch.zeros(len(rows["tokens"]), S, 0)
            return nothing.long(), nothing
        ids, counts = decode_draws(
            rows["sample_marks"],
            drawn,
            length=S,
            num_draws=self.manifest.settings.draws,
            vocab_size=self.manifest.teacher.vocab_size,
        )
        is_beyond = self._valid_ids(ids) >= self.num_words
        return ids.masked_fill(is_beyond, 0), counts.masked_fill(is_beyond, 0.0)

    def _read(
        self,
        indices: Sequence[int] | np.ndarray,
        split: Split,
        names: Sequence[str],
        *,
        has_ids: bool = False,
    ) -> tuple[dict[str, Tensor], list[np.ndarray]]:
        """Return what `read_rows` reads of the sequences `indices`."""
        indices_B, total = np.asarray(indices, dtype=np.int64), self.num_sequences(split)
        if len(indices_B) and not (0 <= indices_B.min() and indices_B.max() < total):
            raise IndexError(
                f"indices {indices_B.tolist()} reach outside {total} {split} sequences"
            )
        ends = self._ends[split]
        owners_B = np.searchsorted(ends, indices_B, side="right")
        rows_B = indices_B - np.concatenate([[0], ends])[owners_B]
        shards = self._shards[split]
        opened = {owner: self._open(shards[owner]) for owner in np.unique(owners_B).tolist()}
        return read_rows(opened, owners_B, rows_B, self._layout, names=names, has_ids=has_ids)

    def _valid_ids(self, ids: Tensor, num_words: int | None = None) -> Tensor:
        """Return the ids after checking that all are below `num_words`, or the teacher's words."""
        if ids.numel() and int(ids.max()) >= (num_words or self.manifest.teacher.vocab_size):
            raise self._invalid(f"token {int(ids.max())}")
        return ids

    def _finite(self, values: Tensor, what: str) -> Tensor:
        """Return the values after checking that all are finite."""
        if not values.isfinite().all():
            raise self._invalid(f"a {what} that is NaN or infinite")
        return values

    def _invalid(self, what: str) -> CacheError:
        return CacheError(
            f"{self.directory} holds {what}, expected what a teacher can say to a student over "
            f"{self.num_words} words; rebuild the cache, or ask whoever made it"
        )
