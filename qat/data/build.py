"""Build a teacher cache: documents -> packed sequences -> teacher -> shards.

Shards are independent: each is computed from its own sequences alone and written atomically. A
build that was killed at any point resumes after its last shard and ends with the same bytes.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from transformers import PreTrainedTokenizerBase

from qat.backend.device import on
from qat.data.cache import (
    MANIFEST,
    Manifest,
    Shard,
    TeacherInfo,
    check_place,
    is_temporary,
    new_manifest,
    read_manifest,
    shard_problem,
    write_atomic,
)
from qat.data.codec import Teacher
from qat.data.config import CacheConfig, CacheSettings
from qat.data.packing import PackedRows
from qat.data.pipeline import BackgroundFold, prefetched
from qat.data.shard import (
    Answer,
    examine,
    in_order,
    make_plan,
    merged,
    note_shard,
    remove_logs,
    shard_bytes,
)
from qat.data.sources import DataSource, open_source
from qat.data.stream import ShardBlock
from qat.data.text import tokenizer_hash
from qat.errors import CacheError, ConfigError, QatError
from qat.files import held
from qat.logs import Ticker, progress
from qat.ranks import ALONE, Ranks

# Blocks of a cache spread over several ranks: the first rank reads and tokenises, and every rank
# receives its own blocks.
#
# Shapes: N sequences of a block, L positions.


def open_shared(config: CacheConfig, ranks: Ranks) -> DataSource:
    """Open the data on the first rank; the other ranks receive only its name and format.

    Raises:
        DataError: see `open_source`.
    """

    def opened() -> DataSource | None:
        if not ranks.is_first:
            return None
        return open_source(config.data, config.format, config.text_field)

    source = ranks.sync_errors(opened)
    described = "" if source is None else f"{source.format}\n{source.name}"
    data_format, name = ranks.texts(described)[0].split("\n")
    return source or DataSource((), data_format, name)


class SharedBlocks:
    """The blocks that this rank has to compute, taken from `found`.

    Only the first rank reads `found`. Block `n` belongs to rank `n % size`, so the assignment does
    not depend on how often the build was interrupted.

    Blocks are exchanged on a separate thread, in rounds of one block per rank. A rank that fails
    reports it in the next round, and all ranks stop.
    """

    def __init__(self, found: Iterator[ShardBlock], ranks: Ranks) -> None:
        self._found = found
        self._ranks = ranks.apart()
        self._failure: QatError | OSError | None = None
        self._is_over = False
        """True if all ranks received the failure."""
        self.total = 0
        """Number of blocks of all ranks so far."""

    def __iter__(self) -> Iterator[ShardBlock]:
        size, rank = self._ranks.size, self._ranks.rank
        if size == 1:
            yield from self._found
            return
        while True:
            blocks = self._round()
            self.total += len(blocks)
            if rank < len(blocks):
                yield blocks[rank]
            if len(blocks) < size:
                return

    def fail(self, error: QatError | OSError, left: Iterable[ShardBlock]) -> None:
        """Raise `error` on all ranks in their next round; return if no round is left.

        Args:
            left: blocks of this rank that were not consumed; they are discarded.
        """
        if self._is_over or self._ranks.size == 1:
            raise error
        self._failure = error
        for _ in left:
            pass

    def _round(self) -> list[ShardBlock]:
        """Return the blocks of one round, on every rank; fewer than `size` in the last round."""

        def take() -> list[ShardBlock]:
            if self._failure is not None:
                raise self._failure
            return list(islice(self._found, self._ranks.size)) if self._ranks.is_first else []

        try:
            blocks = self._ranks.sync_errors(take)
        except QatError:
            self._is_over = True
            raise
        mine = [
            (*each[:3], each.source, each.packed.num_tokens, each.packed.tokens.shape)
            for each in blocks
        ]
        found = []
        for number, head in enumerate(json.loads(self._ranks.texts(json.dumps(mine))[0])):
            split, index, first_sequence, source, num_tokens, shape = head
            # tokens, starts and mask, (3, N, L)
            rows = (
                np.stack(blocks[number].packed[:3]) if blocks else np.zeros((3, *shape), np.int32)
            )
            tokens, starts, mask = self._ranks.copy_from_first(torch.from_numpy(rows)).numpy()
            packed = PackedRows(tokens, starts.astype(bool), mask.astype(bool), num_tokens)
            found.append(ShardBlock(split, index, first_sequence, packed, source))
        return found


logger = logging.getLogger(__name__)

BLOCKS_AHEAD = 32  # so that the teacher does not wait while a long document is tokenised
NEAR_UNIFORM = 10
"""Factor below a uniform guess: warn if the teacher's perplexity exceeds vocabulary size / this."""
MERGE_EVERY = 64
"""Number of shards that the first of several ranks builds between two updates of the manifest."""


@runtime_checkable
class RemoteTeacher(Protocol):
    """A teacher that runs elsewhere and is asked for the targets of blocks."""

    def check_same(self, manifest: Manifest, out: Path) -> None:
        """Check that it still is the model that built the shards in `out`, if any.

        Raises:
            CacheError: it is another one.
        """

    def asked(
        self, manifest: Manifest, out: Path
    ) -> AbstractContextManager[Callable[[ShardBlock, Callable[[int], None]], list[Answer]]]:
        """Return a context manager that yields a function like `qat.data.shard.examine`."""


def build_cache(
    settings: CacheSettings,
    *,
    tokenizer: PreTrainedTokenizerBase,
    teacher: Teacher | RemoteTeacher,
    info: TeacherInfo,
    found: Iterator[ShardBlock],
    out: Path,
    batch_size: int = 0,
    ranks: Ranks = ALONE,
) -> Manifest:
    """Run the teacher over the blocks and store its targets in `out`.

    An interrupted build resumes after its last shard; a finished cache is left unchanged. The
    logits of a whole batch never exist at once.

    Args:
        found: the blocks of the documents (`qat.data.stream.blocks`).
        batch_size: maximum number of sequences in one forward; 0 takes as many as keep the
            teacher's device busy. It may change the last bits of the teacher's log-probs, not the
            inputs.
        ranks: processes that build together, one shard each in turn, into one `out` on a shared
            file system; only the first rank reads `found`. The bytes are those of a single
            process.

    Raises:
        ConfigError: K exceeds the vocabulary, or sequences are longer than the teacher can read.
        DataError: the documents hold no text, or a split gets no document.
        CacheError: `out` holds something else, or was built from other settings or data.
    """
    _check_limits(settings, info)
    fresh = new_manifest(settings, info, tokenizer_hash(tokenizer))
    ranks.check_same(cache=fresh.fingerprint)
    with ExitStack() as stack:
        lock = held(out) if ranks.is_first else nullcontext()
        ranks.sync_errors(lambda: stack.enter_context(lock))
        manifest = _shared_manifest(fresh, out, ranks)
        if manifest.state == "complete":
            logger.info("%s is complete already: nothing to do", out)
            _log_summary(manifest)
            return manifest
        examiner = _examiner(teacher, manifest, out, batch_size=batch_size, ranks=ranks)
        expected = round(settings.num_sequences / (1 - settings.held_out)) or None
        known = {shard.file: shard for shard in manifest.shards}
        failure: QatError | OSError | None = None

        def ended() -> Manifest:
            if failure is not None:
                raise failure
            return writer.state()

        # while the teacher runs on one block, one thread tokenises the next blocks and another
        # writes the previous shard: shards and manifests reach the disk in the order of the blocks
        with (
            progress("asking the teacher", expected, "sequences") as ticker,
            BackgroundFold(partial(_write_shard, out=out, ranks=ranks), manifest) as writer,
            examiner as examine_block,
        ):
            shared = SharedBlocks(_with_manifest(found, manifest, out, ticker), ranks)
            with closing(prefetched(shared, BLOCKS_AHEAD)) as ahead:
                try:
                    for block in ahead:
                        if _exists(block, known, out):
                            ticker.skip(ranks.size * len(block.packed.tokens))
                            continue
                        answers = examine_block(block, lambda n: ticker.advance(ranks.size * n))
                        writer.push((block, answers))
                except (QatError, OSError) as error:
                    shared.fail(error, ahead)
                    failure = error
                manifest = ranks.sync_errors(ended)
        # all ranks end together, and raise the first rank's error if it has one
        return ranks.sync_errors(lambda: _finished(manifest, shared.total, out=out, ranks=ranks))


def what_counts(manifest: Manifest) -> str:
    """Describe which tokens of a cache count, their share of the positions, and the padding."""
    settings = manifest.settings
    positions = max(1, manifest.total("sequences")) * settings.sequence_length
    whose = "all tokens count"
    if settings.format != "plain":
        whose += ", also those of prompts, system and users"
    if settings.targets == "assistant":
        whose = "what assistants say counts, prompts, system and users do not"
    counted, padding = manifest.total("counted"), positions - manifest.total("tokens")
    return (
        f"{whose}: {counted:,} of {positions:,} positions ({counted / positions:.0%}); "
        f"{padding / positions:.1%} are padding"
    )


def _log_summary(manifest: Manifest) -> None:
    """Log which tokens of a finished cache count; warn if the perplexity is near uniform."""
    ppl, vocab_size = manifest.teacher_ppl, manifest.teacher.vocab_size
    known = "" if ppl is None else f"; the teacher's perplexity on what counts is {ppl:.4g}"
    if (held_out := manifest.held_out_ppl) is not None:
        known += f" ({held_out:.4g} on the held-out text)"
    logger.info("%s%s", what_counts(manifest), known)
    if ppl is not None and ppl > vocab_size / NEAR_UNIFORM:
        logger.warning(
            "the teacher's perplexity on what counts is %.4g, and guessing among the %d words of "
            "its vocabulary has %d: it does not know such text, and students would learn noise; "
            "look at the chat template, --thinking and --format, or take other data",
            ppl,
            vocab_size,
            vocab_size,
        )


def _examiner(
    teacher: Teacher | RemoteTeacher,
    manifest: Manifest,
    out: Path,
    *,
    batch_size: int,
    ranks: Ranks,
) -> AbstractContextManager[Callable[[ShardBlock, Callable[[int], None]], list[Answer]]]:
    """Return a context manager that yields the function which runs the teacher on one block."""
    if isinstance(teacher, RemoteTeacher):
        ranks.sync_errors(partial(teacher.check_same, manifest, out))
        return teacher.asked(manifest, out)
    info, settings = manifest.teacher, manifest.settings
    plan = make_plan(teacher, settings, info.vocab_size, batch_size)
    kept = [f"the {settings.top_k} most likely tokens"] if settings.top_k else []
    kept += [f"{settings.draws} draws"] if settings.draws else []
    logger.info(
        "caching %s in %s on %s: %s at each of %d positions, batches of %d sequences, into %s",
        *(info.name, info.dtype, on(teacher.device).name(), " and ".join(kept)),
        *(settings.sequence_length, plan.batch_size, out),
    )
    return nullcontext(partial(examine, plan=plan))


def _shared_manifest(fresh: Manifest, out: Path, ranks: Ranks) -> Manifest:
    """Return the manifest to resume from, as the first rank finds it, on all ranks.

    Its state is `complete` if the cache is finished and all shards have their size.
    """

    def find() -> str:
        if not ranks.is_first:
            return ""
        manifest = _resume(fresh, out)
        if any(shard_problem(out, shard, deep=False) for shard in manifest.shards):
            manifest = manifest.model_copy(update={"state": "building"})
        return manifest.model_dump_json()

    return Manifest.model_validate_json(ranks.texts(ranks.sync_errors(find))[0])


def _finished(manifest: Manifest, total: int, *, out: Path, ranks: Ranks) -> Manifest:
    """Write the final manifest with the shards of all ranks; only the first rank writes."""
    if not ranks.is_first:
        return manifest
    if ranks.size > 1:
        manifest = merged(manifest, out)
        if len(manifest.shards) < total:
            raise CacheError(
                f"{out} shows {len(manifest.shards)} of the {total} shards that {ranks.size} ranks "
                "wrote, expected one directory that all of them see; choose such an --out"
            )
    manifest = manifest.model_copy(update={"state": "complete"})
    write_atomic(out / MANIFEST, manifest.to_bytes())
    remove_logs(out)
    _log_summary(manifest)
    return manifest


def _with_manifest(
    found: Iterator[ShardBlock], manifest: Manifest, out: Path, ticker: Ticker
) -> Iterator[ShardBlock]:
    """Yield the blocks; write a new cache's manifest first, set the ticker's total at the end."""
    total = 0
    for number, block in enumerate(found):
        if number == 0 and not manifest.shards:
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(out / MANIFEST, manifest.to_bytes())
        total += len(block.packed.tokens)
        yield block
    if total:  # false on all ranks but the first, which alone reads
        ticker.total = total


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
    """Return the manifest of `out` if it was built with the same settings, otherwise `fresh`."""
    check_place(out)
    if not (out / MANIFEST).exists():
        return fresh
    old = read_manifest(out)
    differences = _differences(old, fresh)
    if differences:
        raise CacheError(
            f"{out} was built with {'; '.join(differences)}; "
            "choose another --out or delete the directory"
        )
    for path in filter(is_temporary, out.iterdir()):  # leftovers of a killed build
        path.unlink()
    manifest = merged(old, out)
    if manifest != old:
        write_atomic(out / MANIFEST, manifest.to_bytes())
    remove_logs(out)
    return manifest


def _differences(old: Manifest, new: Manifest) -> list[str]:
    pairs = [
        (name, getattr(old.settings, name), getattr(new.settings, name))
        for name in CacheSettings.model_fields
    ]
    pairs += [
        ("teacher", old.teacher.identity, new.teacher.identity),
        ("dtype", old.teacher.dtype, new.teacher.dtype),
        ("tokenizer", old.tokenizer, new.tokenizer),
        ("rows", old.rows, new.rows),
    ]
    return [f"{name}={a}, now asked for {name}={b}" for name, a, b in pairs if a != b]


def _exists(block: ShardBlock, known: dict[str, Shard], out: Path) -> bool:
    """Return whether the block's shard exists already and has the size of its manifest entry.

    Raises:
        CacheError: the shard was built from other text.
    """
    shard = known.get(block.file)
    if shard is None:
        return False
    if shard.content != _content_hash(block.packed):
        raise CacheError(
            f"{out / block.file} was built from other text than the data now gives; "
            "restore the data or choose another --out"
        )
    return shard_problem(out, shard, deep=False) is None


def _write_shard(
    manifest: Manifest, item: tuple[ShardBlock, list[Answer]], *, out: Path, ranks: Ranks
) -> Manifest:
    """Write a block's shard and record it in the manifest or in this rank's log."""
    block, answers = item
    raw, surprise = shard_bytes(block, answers, manifest.teacher.vocab_size)
    write_atomic(out / block.file, raw)
    shard = Shard(
        file=block.file,
        split=block.split,
        sequences=len(block.packed.tokens),
        tokens=block.packed.num_tokens,
        counted=int(block.packed.mask.sum()),
        bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
        content=_content_hash(block.packed),
        surprise=surprise,
        source=block.source or None,
    )
    if ranks.size == 1:
        others = [entry for entry in manifest.shards if entry.file != block.file]
        manifest = manifest.model_copy(update={"shards": in_order([*others, shard])})
    else:
        note_shard(out, ranks.rank, shard)
        if not ranks.is_first or block.index // ranks.size % MERGE_EVERY:
            return manifest
        manifest = merged(manifest, out)
    write_atomic(out / MANIFEST, manifest.to_bytes())
    return manifest


def _content_hash(packed: PackedRows) -> str:
    return xxhash.xxh3_64_hexdigest(packed.tokens.tobytes() + packed.starts.tobytes())
