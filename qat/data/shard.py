"""Turn a block of sequences into the bytes of its shard: device part first, then host part.

Shapes: N sequences of a block, B of a batch, S positions, V vocabulary, n draws.
"""

import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from qat.backend.device import on
from qat.data.cache import MOST_NATS, SPLITS, Manifest, Shard, shard_problem
from qat.data.codec import (
    Request,
    Signals,
    Teacher,
    TopK,
    ask,
    encode_draws,
    id_bits,
    pack_bits,
    pack_top_k,
    round_top_k,
    stream,
)
from qat.data.config import CacheSettings
from qat.data.packing import position_ids
from qat.data.shard_file import shard_content
from qat.data.stream import ShardBlock
from qat.data.text import check_vocabulary
from qat.errors import CacheError, ConfigError
from qat.process import is_out_of_memory


class AskPlan(NamedTuple):
    """Settings for running the teacher, the same for every shard of a cache."""

    teacher: Teacher
    settings: CacheSettings
    vocab_size: int
    batch_size: int
    chunk: int
    """Number of tokens whose logits exist at once."""
    fills_up: bool
    """True if a smaller last batch is padded with copies, because each new shape costs a
    compilation."""


class Answer(NamedTuple):
    """The teacher's targets for one batch, in flight to the host."""

    tensors: dict[str, Tensor]
    """Rows before their bits are packed, and the check of the logits; valid after `wait`."""
    wait: Callable[[], None]


def make_plan(
    teacher: Teacher, settings: CacheSettings, vocab_size: int, batch_size: int = 0
) -> AskPlan:
    """Plan batches of at most `batch_size` sequences, or as many as keep the device busy if 0.

    The batches of a shard have equal size up to rounding; with several devices each gets the same
    number of rows.
    """
    backend = on(teacher.device)
    limit = batch_size or max(1, backend.tokens_at_once // settings.sequence_length)
    num_batches = -(-settings.shard_size // limit)
    unit = backend.tracing.divisions()
    chunk = max(1, backend.logits_at_once() // vocab_size)
    return AskPlan(
        teacher=teacher,
        settings=settings,
        vocab_size=vocab_size,
        batch_size=-(-settings.shard_size // num_batches // unit) * unit,
        chunk=2 ** (chunk.bit_length() - 1),
        fills_up=backend.compiles or backend.is_traced,
    )


def examine(block: ShardBlock, advance: Callable[[int], None], *, plan: AskPlan) -> list[Answer]:
    """Run the teacher on a block, batch by batch, without waiting for the device.

    Args:
        block: sequences of one shard.
        advance: called with the number of sequences of each batch that was launched.
        plan: how the teacher is run.

    Raises:
        ConfigError: a token is outside the teacher's vocabulary, or a batch does not fit the
            device's memory.
    """
    tokens_NS = torch.from_numpy(block.packed.tokens).long()
    positions_NS = position_ids(torch.from_numpy(block.packed.starts))
    check_vocabulary(int(tokens_NS.max()), plan.vocab_size, "teacher")
    backend = on(plan.teacher.device)
    firsts = range(0, len(tokens_NS), plan.batch_size)
    rows = [_rows(first, len(tokens_NS), plan) for first in firsts]
    batches = (
        tuple(
            backend.tracing.divided(backend.to_device(each[some]))
            for each in (tokens_NS, positions_NS)
        )
        for some in rows
    )
    answers = []
    try:
        with torch.no_grad():
            states = plan.teacher.hidden_of(batches)
            for first, some, hidden in zip(firsts, rows, states, strict=True):
                asked = tokens_NS[some]
                answers.append(_examine_batch(block, asked, hidden, plan=plan, first=first))
                advance(min(plan.batch_size, len(tokens_NS) - first))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"batch_size={plan.batch_size} sequences of {tokens_NS.shape[1]} tokens are more than "
            "the memory holds; run the same command with a lower --batch-size"
        ) from error
    return answers


def _rows(first: int, num_rows: int, plan: AskPlan) -> Tensor:
    """Return the rows of the batch that begins at row `first`, `(B,)`, padded with copies."""
    count = plan.batch_size if plan.fills_up else min(plan.batch_size, num_rows - first)
    return torch.arange(first, first + count).clamp(max=num_rows - 1)


def _examine_batch(
    block: ShardBlock, tokens_BS: Tensor, hidden: Tensor, *, plan: AskPlan, first: int
) -> Answer:
    settings, (B, S) = plan.settings, tokens_BS.shape
    count = min(plan.batch_size, len(block.packed.tokens) - first)
    signals = ask(
        plan.teacher,
        hidden,
        tokens_BS,
        request=Request(
            settings.top_k, settings.draws, plan.chunk, stream(settings.seed, block.split)
        ),
        first_place=(block.first_sequence + first) * S,
    )
    backend = on(signals.is_sound.device)
    # keep the copies where removing them would change the shape
    kept = B if backend.is_traced else count
    on_host = backend.step_results(encode_signals(signals, kept, S))
    return Answer({k: rows[:count] for k, rows in on_host.items()}, backend.finished())


def encode_signals(signals: Signals, count: int, length: int) -> dict[str, Tensor]:
    """Encode the first `count` sequences of a batch for the transfer to the host.

    Bits are packed there: they take a hundred small operators, which keep a launching host busy for
    longer than they would shorten the copy.
    """
    tensors = {
        "is_sound": signals.is_sound[None],
        "next_logprob": signals.next_logprob[: count * length].view(count, length),
    }
    if signals.top is not None:
        top = TopK(*(tensor[: count * length] for tensor in signals.top))
        tensors |= round_top_k(top, count)
    if signals.draws is not None:
        tensors["draws"] = signals.draws[: count * length].int().view(count, length, -1)
    return tensors


def shard_bytes(
    block: ShardBlock, answers: list[Answer], vocab_size: int
) -> tuple[bytes, float | None]:
    """Return the content of a block's shard file, and the sum of the teacher's surprise in nats.

    The surprise is summed over counted tokens; it is None if a part of it is unknown. Waits for the
    answers.

    Raises:
        CacheError: a logit is NaN or +inf (-inf is allowed: an impossible token).
    """
    for answer in answers:
        answer.wait()
    # batch by batch: the temporaries of a whole shard would not stay in a core's cache
    batches = [pack_top_k(answer.tensors, vocab_size) for answer in answers]
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    if not joined.pop("is_sound").all():
        raise CacheError(
            "the teacher gave a logit that is NaN or infinite, expected finite ones; "
            "try --dtype fp32 or another teacher"
        )
    tokens, starts, mask = map(torch.from_numpy, block.packed[:3])
    surprise = -joined.pop("next_logprob")[mask].double().clamp(-MOST_NATS, 0).sum().item()
    tensors = {
        "tokens": pack_bits(tokens, id_bits(vocab_size)),
        "starts": pack_bits(starts, 1),
        "mask": pack_bits(mask, 1),
    }
    draws = joined.pop("draws", None)
    if draws is not None:
        tensors |= encode_draws(draws, mask, vocab_size)
    return shard_content(tensors | joined), None if math.isnan(surprise) else round(surprise, 3)


# The log of each rank: shards that it wrote and that are not in the manifest yet.

LOGS = ".shards-rank*.jsonl"


def note_shard(out: Path, rank: int, shard: Shard) -> None:
    """Append an entry for `shard` to this rank's log in `out`.

    Raises:
        CacheError: the file cannot be written.
    """
    path = out / LOGS.replace("*", str(rank))
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(shard.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CacheError(
            f"cannot write {path}: {error.strerror}; finished shards are kept: make room and run "
            "the same command again"
        ) from error


def merged(manifest: Manifest, out: Path) -> Manifest:
    """Return the manifest with all logged shards that exist; a truncated log line is skipped."""
    found = {shard.file: shard for shard in manifest.shards}
    for path in out.glob(LOGS):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            with suppress(ValidationError):
                shard = Shard.model_validate_json(line)
                if shard_problem(out, shard, deep=False) is None:
                    found[shard.file] = shard
    return manifest.model_copy(update={"shards": in_order(found.values())})


def remove_logs(out: Path) -> None:
    """Delete the ranks' logs, once the manifest lists all shards."""
    for path in out.glob(LOGS):
        path.unlink()


def in_order(shards: Iterable[Shard]) -> list[Shard]:
    """Return the shards in the order of a manifest."""
    return sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.file))
