"""The teacher's signals as bytes: what a cache stores for a token, and how well.

A top-K record keeps ids in `id_bits(V)` bits, each distance below the most likely token in 9 bits,
the range of the distances in one byte, log-sum-exp and log tail mass in float32.

Accuracy of a log-probability. A distance d is stored as `code = round(M * sqrt(d / R))`, M = 510,
where the range R is at most 3.6 % above the token's largest distance: |error of d| is at most
`sqrt(d * R) / M + R / (4 * M**2)`. The most likely log-prob is not stored: it is what makes the
probabilities sum to `1 - tail`, so its error is the mean error of the others and at most
`sqrt(R * ln K) / M + R / (4 * M**2)`. `max_error` adds the two: 0.057 nats at R = 20, K = 64, for
the least likely of the K. KL(exact || decoded) is about `R * E[d] / (6 * M**2)`: below 1e-4 nats.

Shapes: N sequences, S positions, K teacher tokens kept, n draws, D distinct draws (padded).
"""

from collections.abc import Iterable, Iterator
from functools import cache
from math import gcd, log, sqrt
from typing import NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad

from qat.backend.device import on
from qat.errors import CacheError
from qat.kernels.draw import draw_tokens
from qat.kernels.topk import (
    Selection,
    log_sum_exp,
    summarize,
    top_k_of_blocks,
    top_k_of_logits,
)

# The teacher as the cache builder sees it: two functions, whatever is behind them.


class Teacher(Protocol):
    """A model split into body and head (`qat.models.language_model.LanguageModel` is one)."""

    @property
    def device(self) -> torch.device:
        """Where the input ids go."""

    def hidden_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """The last hidden state, `(B, S, D)`, of each batch of ids and positions in turn."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`(..., D)` to `(..., V)`."""


# Integers of any width up to 31 bits, packed into bytes row by row, least significant bit first.
#
# Shapes: N rows, I integers a row, G groups of integers that fill whole bytes.


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that a row of `count` integers of `bits` bits takes."""
    return -(-count * bits // 8)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """`(N, I)` integers in `0 .. 2**bits - 1` as `(N, ceil(I * bits / 8))` uint8.

    Integer i of a row takes its bits `i * bits ... (i + 1) * bits - 1`; the last byte is filled
    up with zeros. The smallest group of integers that fills whole bytes is packed at once.
    """
    N, I = values.shape
    per_group, group_bytes = _group(bits)
    word = torch.int32 if bits <= 24 else torch.int64  # holds an integer shifted by up to 7 bits
    values_NGI = pad(values.to(word), (0, -I % per_group)).view(N, -1, per_group)
    octets = values_NGI.new_zeros(N, values_NGI.shape[1], group_bytes, dtype=torch.uint8)
    for i in range(per_group):
        first, shift = divmod(i * bits, 8)
        word_NG = values_NGI[..., i] << shift
        for k in range(packed_bytes(1, shift + bits)):
            octets[..., first + k] |= ((word_NG >> (8 * k)) & 255).to(torch.uint8)
    return octets.view(N, -1)[:, : packed_bytes(I, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `(N, count)` integers that `pack_bits` packed, as int16, int32 or int64.

    A group is looked at as overlapping words, one for each of its integers, equally far apart; each
    is then shifted until its integer comes first.
    """
    N, width = packed.shape
    per_group, group_bytes = _group(bits)
    words, G = _words(bits), -(-width // group_bytes)
    octets = np.zeros(words.lead + N * G * group_bytes + 8, np.uint8)
    octets[words.lead : -8].reshape(N, -1)[:, :width] = packed.numpy()
    shape, strides = (N * G, per_group), (group_bytes, words.step)
    seen = np.ndarray(shape, words.dtype, octets, strides=strides)
    values_NI = torch.from_numpy(seen.copy()).view(N, G * per_group)
    values_NI >>= words.shifts.repeat(G)
    values_NI &= 2**bits - 1
    return values_NI[:, :count]


def unpack_flags(packed: Tensor, count: int) -> Tensor:
    """The `(N, count)` bool that `pack_bits` packed as integers of one bit."""
    flags = np.unpackbits(packed.numpy(), axis=1, count=count, bitorder="little")
    return torch.from_numpy(flags.view(bool))


def _group(bits: int) -> tuple[int, int]:
    """The fewest integers that fill whole bytes, and how many bytes."""
    return 8 // gcd(8, bits), bits // gcd(8, bits)


class _Words(NamedTuple):
    """How to look at a group so that word i holds integer i, the same for all groups."""

    lead: int
    """Bytes before the group where the first word begins."""
    step: int
    """Bytes from one word to the next."""
    shifts: Tensor
    """Bits below each word's integer, in the words' dtype."""
    dtype: np.dtype


@cache
def _words(bits: int) -> _Words:
    per_group, _ = _group(bits)
    step = round(bits / 8)
    drift = bits - 8 * step  # by which the shift grows from word to word
    lead = max(0, -drift * (per_group - 1) + 7) // 8  # so that no shift is negative
    shifts = 8 * lead + drift * np.arange(per_group)
    size = next(size for size in (2, 4, 8) if bits + shifts.max() < 8 * size)
    dtype = np.dtype(f"<i{size}")
    return _Words(lead, step, torch.from_numpy(shifts.astype(dtype)), dtype)


# What is kept of the teacher's logits: its top K, and systematic draws.
#
# Shapes: T tokens, V vocabulary, K teacher tokens kept, N draws.


class TopK(NamedTuple):
    """The K most likely tokens, most likely first, and how the rest of the vocabulary weighs."""

    ids: Tensor
    """`(T, K)` int64; equally likely ones in ascending order."""
    distances: Tensor
    """`(T, K)` float64, nats: log-probability of the first token minus that of this one."""
    log_sum_exp: Tensor
    """`(T,)` float32: of all logits, so that logit = log-prob + log_sum_exp."""
    tail_logprob: Tensor
    """`(T,)` float32: log of the mass outside the K tokens; -inf when K = V."""


def top_k(logits: Tensor, k: int) -> TopK:
    """The teacher's top `k` of `(T, V)` logits.

    The mass outside is summed over the other V - k logits: `1 - sum(top)` would lose a small tail.
    """
    return _distances(top_k_of_logits(logits, k))


def _distances(selection: Selection) -> TopK:
    values_TK, ids_TK, log_sum_exp_T, tail_T = selection
    distances_TK = (values_TK[:, :1] - values_TK).double()
    return TopK(ids_TK, distances_TK, log_sum_exp_T, tail_T)


def draw(logits: Tensor, uniforms: Tensor, count: int) -> Tensor:
    """`(T, count)` int64 systematic draws from `(T, V)` logits, ascending.

    `uniforms` `(T,)`, float64 in [0, 1), decides which.
    """
    return draw_tokens(logits, summarize(logits), uniforms, count)


class Request(NamedTuple):
    """What to ask the teacher for, and how many tokens at a time."""

    top_k: int
    draws: int
    chunk: int
    stream: int
    """Of random numbers (`qat.data.codec`), for the draws."""


class Signals(NamedTuple):
    """What the teacher said about every token of a batch; None for what was not asked."""

    next_logprob: Tensor
    """`(T,)` float32, nats: of the token that follows in the sequence; at its end, of its first."""

    top: TopK | None
    draws: Tensor | None
    """`(T, N)` int64, ascending."""
    is_sound: Tensor
    """`()` bool: no logit is NaN or +inf, and no token has only -inf."""


@torch.no_grad()
def ask(
    teacher: Teacher, hidden: Tensor, tokens: Tensor, *, request: Request, first_place: int
) -> Signals:
    """The teacher's signals for `(B, S)` tokens on the host, flattened; never waits for the device.

    `hidden` is the teacher's last hidden state of them. Logits exist for `request.chunk` tokens at
    a time. The draws of the i-th token depend on its logits, the request's stream and
    `first_place + i`, on nothing that ran before.
    """
    backend = on(teacher.device)
    next_ids = backend.divided(backend.to_device(tokens.roll(-1, dims=1)))
    # not as a number: XLA takes equal numbers for one, which makes another graph
    first = backend.to_device(torch.tensor([first_place]))
    tops, draws, is_sound, next_logprobs, place = [], [], [], [], 0
    chunks = (each.flatten(0, 1).split(request.chunk) for each in (hidden, next_ids))
    for hidden_TD, next_T in zip(*chunks, strict=True):
        logits = teacher.logits(hidden_TD)
        blocks = summarize(logits)
        if request.top_k:
            tops.append(_distances(top_k_of_blocks(logits, request.top_k, blocks)))
        total_T = tops[-1].log_sum_exp if request.top_k else log_sum_exp(blocks)
        is_sound.append(total_T.isfinite().all())
        next_logprobs.append(logits.gather(-1, next_T[:, None])[:, 0].float() - total_T)
        if request.draws:
            places_T = torch.arange(place, place + len(logits), device=logits.device) + first
            numbers_T = uniforms(request.stream, places_T, 1)[:, 0]
            draws.append(draw_tokens(logits, blocks, numbers_T, request.draws))
        place += len(logits)
    return Signals(
        next_logprob=torch.cat(next_logprobs),
        top=TopK(*map(torch.cat, zip(*tops, strict=True))) if tops else None,
        draws=torch.cat(draws) if draws else None,
        is_sound=torch.stack(is_sound).all(),
    )


CODE_BITS = 9
M = 2**CODE_BITS - 2
FAR = M + 1  # the code of a token beyond MAX_DISTANCE, so that it does not stretch the range
MAX_DISTANCE = 104.0  # nats; exp(-104) is 0 in float32, so what lies further below says nothing
STEPS_PER_OCTAVE = 20
TOP_K_ROWS = ("topk_ids", "topk_codes", "topk_range", "tail_logprob")
BLOCK = 2**18
"""Log-probs decoded at once: few enough that what comes up in between fits a core's cache."""
SHARES = (torch.arange(FAR + 1) / M).square()
"""The distance that a code stands for, as a share of the range."""
SHARES[FAR] = torch.inf


def id_bits(vocab_size: int) -> int:
    """Bits of one token id."""
    return max(1, (vocab_size - 1).bit_length())


def max_error(value_range: float, k: int) -> float:
    """Largest error in nats of a decoded log-prob whose token has distances up to `value_range`.

    `value_range` is the range as stored, up to 3.6 % above the largest distance. Log-probs more
    than 104 nats below the most likely (probability 0 in float32) decode as 104 nats below.
    """
    rounding = value_range / (2 * M**2)
    return value_range / M + sqrt(value_range * log(k)) / M + rounding


def encode_top_k(top: TopK, num_sequences: int, vocab_size: int) -> dict[str, Tensor]:
    """Rows of `num_sequences` sequences, from the `TopK` of all their tokens in order."""
    is_far_TK = top.distances > MAX_DISTANCE
    near_TK = top.distances.masked_fill(is_far_TK, 0.0)
    # of the smallest range that can be stored and reaches all distances
    octaves_T = torch.log2(near_TK.amax(-1) / MAX_DISTANCE)
    range_code_T = (255 + STEPS_PER_OCTAVE * octaves_T).ceil().clamp(0, 255)
    ratio_TK = near_TK / _decode_range(range_code_T)[:, None]
    codes_TK = (M * ratio_TK.sqrt()).round().long().masked_fill(is_far_TK, FAR)[:, 1:]
    per_row = codes_TK.numel() // num_sequences  # may be 0, where -1 says nothing
    rows = (num_sequences, -1)
    return {
        "topk_ids": pack_bits(top.ids.reshape(rows), id_bits(vocab_size)),
        "topk_codes": pack_bits(codes_TK.reshape(num_sequences, per_row), CODE_BITS),
        "topk_range": range_code_T.to(torch.uint8).view(rows),
        "log_sum_exp": top.log_sum_exp.view(rows),
        "tail_logprob": top.tail_logprob.view(rows),
    }


def decode_top_k(
    rows: dict[str, Tensor], *, length: int, k: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Ids `(N, S, K)` int64 and log-probs `(N, S, K)` float32, most likely first."""
    N, bits = len(rows["topk_range"]), id_bits(vocab_size)
    ids, logprobs = _empty(N, length, k, np.int64), _empty(N, length, k, np.float32)
    range_NS1 = _decode_range(rows["topk_range"].double()).float()[..., None]
    step = max(1, BLOCK // (length * k))
    for block in (slice(first, first + step) for first in range(0, N, step)):
        ids_NI = unpack_bits(rows["topk_ids"][block], bits, length * k)
        ids[block] = ids_NI.view_as(ids[block])
        codes_NI = unpack_bits(rows["topk_codes"][block], CODE_BITS, length * (k - 1))
        ratios = logprobs[block]  # to the most likely one, then of themselves
        ratios[..., 0] = 0.0
        shares = SHARES.index_select(0, codes_NI.flatten()).view_as(ratios[..., 1:])
        torch.mul(shares, -range_NS1[block], out=ratios[..., 1:]).clamp_(min=-MAX_DISTANCE)
        # probabilities sum to 1 - tail, which fixes the most likely one
        head_NS = torch.log(-torch.expm1(rows["tail_logprob"][block]))
        ratios += (head_NS - ratios.exp().sum(-1).log())[..., None]
    return ids, logprobs


def encode_draws(draws: Tensor, mask: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Rows of `(N, S, n)` ascending draws, kept where `mask` `(N, S)` is true.

    `sample_marks` has one bit a draw: it differs from the draw before it. So a token's bits tell
    how many distinct ids it has and, in unary, how often each was drawn. `sample_ids` holds the
    distinct ids of all sequences one after the other, `sample_lengths` bytes each.
    """
    bits = id_bits(vocab_size)
    marks = torch.ones_like(draws, dtype=torch.bool)
    marks[..., 1:] = draws[..., 1:] != draws[..., :-1]
    marks &= mask[..., None]
    marks_NX = marks.flatten(1)
    counts_N1 = marks_NX.sum(1, keepdim=True)
    most = int(counts_N1.max())
    ids_NI = draws.new_zeros(len(draws), most)
    ids_NI[torch.arange(most) < counts_N1] = draws[marks]
    packed = pack_bits(ids_NI, bits)
    lengths_N1 = (counts_N1 * bits + 7) // 8
    return {
        "sample_marks": pack_bits(marks_NX, 1),
        "sample_ids": packed[torch.arange(packed.shape[1]) < lengths_N1],
        "sample_lengths": lengths_N1[:, 0].int(),
    }


def decode_draws(
    marks: Tensor, id_rows: list[np.ndarray], *, length: int, num_draws: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Distinct ids `(N, S, D)` int64 and counts `(N, S, D)` float32; padded with id 0, count 0.

    Args:
        marks: `(N, ceil(S * n / 8))` uint8 rows of `sample_marks`.
        id_rows: for each sequence its bytes of `sample_ids`.
    """
    N, T, n = len(marks), len(marks) * length, num_draws
    is_new_Tn = unpack_flags(marks, length * n).numpy().reshape(T, n)
    is_kept_T = is_new_Tn[:, 0].copy()
    is_new_Tn[:, 0] = True  # the last draws of a token end where the next token begins
    num_T = is_new_Tn.sum(-1, dtype=np.int32)
    # in sixteens, so that most batches have one shape and a recorded step fits them
    D = min(n, -(-int(num_T.max()) // 16) * 16)
    ids, counts = np.zeros((T, D), np.int64), np.zeros((T, D), np.float32)
    is_used_TD = np.arange(D, dtype=np.int32) < num_T[:, None]
    counts[is_used_TD] = np.diff(np.flatnonzero(is_new_Tn), append=T * n)
    is_used_TD[~is_kept_T], counts[~is_kept_T] = False, 0.0
    num_N = (num_T * is_kept_T).reshape(N, length).sum(1)
    ids[is_used_TD] = _decode_ids(id_rows, num_N.tolist(), id_bits(vocab_size))
    return tuple(torch.from_numpy(found).view(N, length, D) for found in (ids, counts))


def _decode_ids(id_rows: list[np.ndarray], counts: list[int], bits: int) -> np.ndarray:
    """The distinct ids of all sequences one after the other, `counts` of them."""
    for octets, count in zip(id_rows, counts, strict=True):
        expected = packed_bytes(count, bits)
        if len(octets) != expected:
            raise CacheError(
                f"a sequence's {count} drawn ids take {len(octets)} bytes, expected {expected}; "
                "rebuild the cache, or ask whoever made it"
            )
    padded = np.zeros((len(id_rows), max(map(len, id_rows))), np.uint8)
    for row, octets in zip(padded, id_rows, strict=True):
        row[: len(octets)] = octets
    ids_NI = unpack_bits(torch.from_numpy(padded), bits, max(counts)).numpy()
    return np.concatenate([row[:count] for row, count in zip(ids_NI, counts, strict=True)])


def _empty(N: int, S: int, K: int, dtype: type) -> Tensor:
    """Memory from NumPy, which asks for huge pages: a new page costs more than filling it."""
    return torch.from_numpy(np.empty((N, S, K), dtype))


def _decode_range(code: Tensor) -> Tensor:
    octaves = (code - 255) / STEPS_PER_OCTAVE
    lacks_exp2 = on(code.device).compares()
    return MAX_DISTANCE * (torch.pow(2.0, octaves) if lacks_exp2 else torch.exp2(octaves))


# Random numbers that are a function of where they are used, not of what was drawn before.
#
# Shapes: T tokens, n numbers of a token.

GOLDEN = 0x9E3779B97F4A7C15
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def stream(*names: object) -> int:
    """A 64-bit stream of numbers for whatever the names name."""
    return _signed(xxhash.xxh3_64_intdigest("/".join(map(str, names)).encode()))


def uniforms(stream: int, places: Tensor, count: int) -> Tensor:
    """`(T, count)` float64 in [0, 1) for `(T,)` int64 places of a stream, equal on every device.

    The numbers of place p are outputs `p * count` to `(p + 1) * count - 1` of splitmix64 seeded
    with the stream (Steele, Lea and Flood, OOPSLA 2014), whose n-th output needs no other.
    """
    numbers = places[:, None] * count + torch.arange(1, count + 1, device=places.device)
    bits = stream + numbers * _signed(GOLDEN)
    for shift, multiplier in MIXERS:
        bits = (bits ^ _shift(bits, shift)) * _signed(multiplier)
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 11).double() * 2.0**-53


def _shift(bits: Tensor, count: int) -> Tensor:
    """A right shift that fills with zeros.

    The sign goes by itself: XLA's shift of a negative number divides, and rounds up.
    """
    return (bits & (2**63 - 1)) >> count | (bits < 0) * 2 ** (63 - count)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
