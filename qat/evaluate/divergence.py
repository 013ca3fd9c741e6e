"""Divergence of a student from its teacher: against a cache, or exactly, with both models loaded.

Shapes: B sequences, S positions, D model width, V vocabulary, T valid tokens.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qat.backend.device import on
from qat.data.cache import Split
from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.errors import ConfigError, DataError
from qat.losses.formulas import NO_LABEL, Targets, loss_from_logits, to_targets
from qat.models.language_model import LanguageModel, judging

KD_TEMPERATURE = 2.0  # the temperature of the reference system's published KD numbers

CHUNK_TOKENS = 1024  # rows of logits at once: 0.6 GB in float32 at a vocabulary of 150,000


class Divergence(NamedTuple):
    """Means over valid tokens; None if the batches lack the targets for a metric."""

    num_tokens: int  # number of valid tokens
    kd_nats: float | None  # `candidates` at temperature 2: the reference system's KD number
    kl_tail_nats: float | None  # KL over the top K and one outcome for the rest: at most the KL
    sampled_ce_nats: float | None  # with the teacher's draws: in mean the KL plus its entropy
    top1_frac: float | None  # of tokens, where student and teacher have the same likeliest one
    ppl: float | None  # perplexity on the labels


BY_SOURCE = ("kl_tail_nats", "sampled_ce_nats")
"""Measures of each of several sources of text, as `kl_tail_nats/NAME`."""


class CachedTeacher(NamedTuple):
    """Bounds on the teacher's metrics from its cached top K and tail; means over valid tokens."""

    teacher_ppl_floor: float
    """Lower bound on its perplexity on the labels: a label outside the top K gets the mass of the
    whole tail."""
    teacher_entropy_floor_nats: float  # lower bound on its entropy: the tail counts as one outcome
    labels_outside_frac: float  # fraction of labels outside its top K; at 0 its perplexity is exact


class ExactDivergence(NamedTuple):
    """Means over valid tokens, computed over the whole vocabulary."""

    num_tokens: int  # number of valid tokens
    kl_nats: float  # KL(teacher || student)
    top1_frac: float  # fraction of tokens where student and teacher have the same most likely token
    ppl: float | None  # the student's perplexity on the labels; None without labels
    teacher_ppl: float | None  # the teacher's perplexity on the labels; None without labels


def cached_divergence(student: LanguageModel, batches: Iterable[Batch]) -> Divergence:
    """Evaluate a student on cached targets; metrics whose targets are missing are None.

    Logits are formed for valid tokens only, `CHUNK_TOKENS` at a time. Form the weights of a
    quantized student before (`qat.nn.step.form_weights`); otherwise each forward forms them again.

    Raises:
        DataError: the batches hold no valid token.
    """
    return divergence_by_source(student, {"": batches})[0]


def sequences_by_source(cache: TeacherCache, split: Split, most: int = 0) -> dict[str, np.ndarray]:
    """Return the first `most` sequences of a split (0: all), by the source of their text.

    Each source has its share of them, at least one; text without sources has an empty name.
    """
    shards, total = cache.manifest.of_split(split), cache.num_sequences(split)
    names = np.array([s.source or "" for s in shards for _ in range(s.sequences)], dtype=str)
    found = {name: np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}
    kept = min(most or total, total)
    return {name: rows[: max(1, kept * len(rows) // total)] for name, rows in found.items()}


def divergence_by_source(
    student: LanguageModel, batches: Mapping[str, Iterable[Batch]]
) -> tuple[Divergence, dict[str, float]]:
    """Do what `cached_divergence` does with the batches of all sources together, and of each.

    Returns:
        The whole, and the measures of `BY_SOURCE` for each of several sources.
    """
    totals: dict[str, Counter[str]] = {name: Counter() for name in ("", *batches)}
    with judging(student):
        for name, batch in _of_one_shape(batches, student.device):
            targets, valid, has_tail = _valid_targets(batch, student.device)
            chunks = zip(_logits(student, batch, valid), _split(targets), strict=True)
            sums = [_sums_by_cache(logits, rows, has_tail) for logits, rows in chunks]
            _add([totals[each] for each in {"", name}], sums, student.device)
    found = {name: _divergence(each) for name, each in totals.items() if each["tokens"]}
    distances = {
        f"{key}/{name}": getattr(each, key)
        for name, each in found.items()
        for key in BY_SOURCE
        if name and len(batches) > 1 and getattr(each, key) is not None
    }
    return found.get("") or _divergence(totals[""]), distances


def _divergence(totals: Counter[str]) -> Divergence:
    num_tokens = _num_tokens(totals)

    def mean(name: str) -> float | None:
        return totals[name] / num_tokens if name in totals else None

    return Divergence(
        num_tokens=num_tokens,
        kd_nats=mean("kd"),
        kl_tail_nats=mean("kl_tail"),
        sampled_ce_nats=mean("sampled_ce"),
        top1_frac=mean("top1"),
        ppl=_perplexity(totals, "label_ce"),
    )


def cached_teacher(batches: Iterable[Batch]) -> CachedTeacher | None:
    """Evaluate the teacher on its cached log-probs; None without labels, a top K or its tail.

    Cached log-probabilities are off by a few thousandths of a nat.
    """
    totals: Counter[str] = Counter()
    for batch in batches:
        rows = to_targets(batch)
        rows = Targets(*(value[rows.mask] for value in rows))
        if rows.topk_ids.shape[1] == 0 or rows.tail_logprob.isnan().any():
            return None
        head, tail = rows.topk_logprobs.double(), rows.tail_logprob.double()
        totals["tokens"] += len(tail)
        everything = torch.cat([head, tail[:, None]], 1)
        totals["entropy"] -= torch.xlogy(everything.exp(), everything.exp()).sum().item()
        is_label = rows.topk_ids == rows.labels[:, None]
        is_inside, is_known = is_label.any(1), rows.labels != NO_LABEL
        found = torch.where(is_inside, head.masked_fill(~is_label, 0.0).sum(1), tail)[is_known]
        totals["labels"] += len(found)
        totals["outside"] += int((is_known & ~is_inside).sum())
        totals["label_ce"] -= found.sum().item()
    floor = _perplexity(totals, "label_ce")
    if floor is None:
        return None
    shares = totals["entropy"] / totals["tokens"], totals["outside"] / totals["labels"]
    return CachedTeacher(floor, *shares)


def exact_divergence(
    student: LanguageModel, teacher: LanguageModel, batches: Iterable[Batch]
) -> ExactDivergence:
    """Evaluate a student against the loaded teacher, over the whole vocabulary.

    Only tokens, masks and labels of the batches are used, not cached targets. Both models' logits
    exist for `CHUNK_TOKENS` valid tokens at a time.

    Raises:
        ConfigError: the two vocabularies differ in size.
        DataError: the batches hold no valid token.
    """
    totals: Counter[str] = Counter()
    with judging(student), judging(teacher):
        for _, batch in _of_one_shape({"": batches}, student.device):
            targets, valid, _ = _valid_targets(batch, student.device)
            sides = _logits(student, batch, valid), _logits(teacher, batch, valid)
            chunks = zip(*sides, _split(targets), strict=True)
            _add([totals], [_sums_by_teacher(*chunk) for chunk in chunks], student.device)
    num_tokens = _num_tokens(totals)
    return ExactDivergence(
        num_tokens=num_tokens,
        kl_nats=totals["kl"] / num_tokens,
        top1_frac=totals["top1"] / num_tokens,
        ppl=_perplexity(totals, "label_ce"),
        teacher_ppl=_perplexity(totals, "teacher_label_ce"),
    )


def _of_one_shape(
    batches: Mapping[str, Iterable[Batch]], device: torch.device
) -> Iterator[tuple[str, Batch]]:
    """Yield names and batches; where each shape costs a compilation, pad all to the first."""
    shape = None
    for name, batch in ((name, batch) for name, found in batches.items() for batch in found):
        shape = shape or tuple(batch.mask.shape)
        yield name, batch.filled(*shape) if on(device).is_traced else batch


def _sums_by_cache(logits: Tensor, rows: Targets, has_tail: bool) -> dict[str, Tensor]:
    sums = _label_sums(logits, rows, "label_ce")
    if rows.topk_ids.shape[1] > 0:
        sums["kd"] = _loss("candidates", logits, rows, KD_TEMPERATURE)
        if has_tail:
            sums["kl_tail"] = _loss("tail", logits, rows)
        sums["top1"] = ((logits.argmax(1) == rows.topk_ids[:, 0]) & rows.mask).sum()
    if rows.sample_ids.shape[1] > 0:
        sums["sampled_ce"] = _loss("sampled", logits, rows)
    return sums


def _sums_by_teacher(logits: Tensor, teacher_logits: Tensor, rows: Targets) -> dict[str, Tensor]:
    V, teacher_V = logits.shape[1], teacher_logits.shape[1]
    if V != teacher_V:
        raise ConfigError(
            f"the student's vocabulary has {V} words and the teacher's {teacher_V}; an exact KL "
            "needs the same one; give the teacher that this student came from"
        )
    log_q, log_p = logits.float().log_softmax(1), teacher_logits.float().log_softmax(1)
    return {
        **_label_sums(logits, rows, "label_ce"),
        **_label_sums(teacher_logits, rows, "teacher_label_ce"),
        "kl": (log_p.exp() * (log_p - log_q)).masked_fill(~rows.mask[:, None], 0.0).sum(),
        "top1": ((logits.argmax(1) == teacher_logits.argmax(1)) & rows.mask).sum(),
    }


def _label_sums(logits: Tensor, rows: Targets, name: str) -> dict[str, Tensor]:
    return {
        "tokens": rows.mask.sum(),
        "labels": ((rows.labels != NO_LABEL) & rows.mask).sum(),
        name: _loss("hard_ce", logits, rows),
    }


def _loss(name: str, logits: Tensor, rows: Targets, temperature: float = 1.0) -> Tensor:
    return loss_from_logits(logits, rows, {name: 1.0}, temperature=temperature)[name]


def _valid_targets(batch: Batch, device: torch.device) -> tuple[Targets, Tensor, bool]:
    """Return the valid tokens' targets, their `(T,)` places in `B * S`, and if all tails are known.

    The tensors are on `device`, but selected where the batch lies. Where shapes must not vary, the
    masked rows follow the valid ones.
    """
    targets = to_targets(batch)
    valid = targets.mask.nonzero()[:, 0]
    has_tail = not targets.tail_logprob[valid].isnan().any()
    if on(device).is_traced:
        valid = torch.cat([valid, (~targets.mask).nonzero()[:, 0]])
    chosen = Targets(*(value[valid].to(device) for value in targets))
    return chosen, valid.to(device), has_tail


def _logits(model: LanguageModel, batch: Batch, valid: Tensor) -> Iterator[Tensor]:
    """Yield logits of the valid rows in chunks of `CHUNK_TOKENS`, on the device of `valid`."""
    ids, positions = batch.input_ids.to(model.device), batch.position_ids.to(model.device)
    hidden = model.hidden(ids, positions).flatten(0, 1)
    for rows in hidden[valid.to(hidden.device)].split(CHUNK_TOKENS):
        yield model.logits(rows).to(valid.device)


def _split(targets: Targets) -> Iterator[Targets]:
    return map(Targets, *(value.split(CHUNK_TOKENS) for value in targets))


def _add(totals: list[Counter[str]], chunks: list[dict[str, Tensor]], device: torch.device) -> None:
    """Add sums from the device to all totals, in double precision on the host."""
    backend = on(device)
    backend.step_end()
    for sums in chunks:
        read = dict(zip(sums, backend.read([*sums.values()]), strict=True))
        for each in totals:
            each.update(read)


def _num_tokens(totals: Counter[str]) -> int:
    if totals["tokens"] == 0:
        raise DataError(
            "there is no valid token to judge by; expected sequences whose loss mask is true "
            "somewhere; choose another split or text"
        )
    return totals["tokens"]


def _perplexity(totals: Counter[str], name: str) -> float | None:
    if totals["labels"] == 0:
        return None
    nats = totals[name] / totals["labels"]
    return math.exp(nats) if nats < 700 else math.inf
