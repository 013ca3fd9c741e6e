"""Encode the teacher's targets as bytes: the format of a token in a cache, and its accuracy.

A top-K record keeps ids in `id_bits(V)` bits, each distance below the most likely token in 9 bits,
the range of the distances in one byte, log-sum-exp and log tail mass in float32.

Accuracy of a log-probability. A distance d is stored as `code = round(M * sqrt(d / R))`, M = 510,
where the range R is at most 3.6 % above the token's largest distance: |error of d| is at most
`sqrt(d * R) / M + R / (4 * M**2)`. The most likely log-prob is not stored: it follows from the
probabilities' sum `1 - tail`, so its error is the mean error of the others and at most
`sqrt(R * ln K) / M + R / (4 * M**2)`. Together that is 0.057 nats at R = 20, K = 64, for the least
likely of the K. KL(exact || decoded) is about `R * E[d] / (6 * M**2)`: below 1e-4 nats.

Shapes: N sequences, S positions, K teacher tokens kept, n draws, D distinct draws (padded).
"""

from collections.abc import Iterable, Iterator
from functools import cache
from math import gcd
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

# The interface of a teacher that runs on a device.


class Teacher(Protocol):
    """A model split into body and head (`qat.models.language_model.LanguageModel` is one)."""

    @property
    def device(self) -> torch.device:
        """The device for the input ids."""

    def hidden_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield the last hidden state, `(B, S, D)`, of each batch of ids and positions."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states: `(..., D)` to `(..., V)`."""


# Integers of any width up to 31 bits, packed into bytes row by row, least significant bit first.
#
# Shapes: N rows, I integers a row, G groups of integers that fill whole bytes.


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes that a row of `count` integers of `bits` bits takes."""
    return -(-count * bits // 8)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack `(N, I)` integers in `0 .. 2**bits - 1` into `(N, ceil(I * bits / 8))` uint8.

    Integer i of a row takes the bits `i * bits ... (i + 1) * bits - 1`; the last byte is padded
    with zeros. The smallest group of integers that fills whole bytes is packed at once.
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
    """Return the `(N, count)` integers that `pack_bits` packed, as int16, int32 or int64.

    A group is viewed as overlapping words at equal distances, one per integer; each word is then
    shifted right until its integer starts at bit 0.
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
    """Return the `(N, count)` bool that `pack_bits` packed as 1-bit integers."""
    flags = np.unpackbits(packed.numpy(), axis=1, count=count, bitorder="little")
    return torch.from_numpy(flags.view(bool))


def _group(bits: int) -> tuple[int, int]:
    """Return the smallest number of integers that fill whole bytes, and the number of bytes."""
    return 8 // gcd(8, bits), bits // gcd(8, bits)


class _Words(NamedTuple):
    """The view of a group in which word i contains integer i, equal for all groups."""

    lead: int
    """Bytes by which the first word starts before the group."""
    step: int
    """Bytes from one word to the next."""
    shifts: Tensor
    """Right shift of each word that moves its integer to bit 0, in the words' dtype."""
    dtype: np.dtype


@cache
def _words(bits: int) -> _Words:
    per_group, _ = _group(bits)
    step = round(bits / 8)
    drift = bits - 8 * step  # change of the shift from one word to the next
    lead = max(0, -drift * (per_group - 1) + 7) // 8  # keeps all shifts nonnegative
    shifts = 8 * lead + drift * np.arange(per_group)
    size = next(size for size in (2, 4, 8) if bits + shifts.max() < 8 * size)
    dtype = np.dtype(f"<i{size}")
    return _Words(lead, step, torch.from_numpy(shifts.astype(dtype)), dtype)


# The kept part of the teacher's logits: its top K, and systematic draws.
#
# Shapes: T tokens, V vocabulary, K teacher tokens kept, N draws.


class TopK(NamedTuple):
    """The K most likely tokens, most likely first, and the mass of the rest of the vocabulary."""

    ids: Tensor
    """Token ids, `(T, K)` int64; equally likely ones in ascending order."""
    distances: Tensor
    """Log-probability of the most likely token minus that of this one, `(T, K)` float64, nats."""
    log_sum_exp: Tensor
    """Log-sum-exp of all logits, `(T,)` float32: logit = log-prob + log_sum_exp."""
    tail_logprob: Tensor
    """Log of the mass outside the K tokens, `(T,)` float32; -inf when K = V."""


def top_k(logits: Tensor, k: int) -> TopK:
    """Return the teacher's top `k` of `(T, V)` logits.

    The mass outside is summed over the other V - k logits: `1 - sum(top)` would lose a small tail.
    """
    return _distances(top_k_of_logits(logits, k))


def _distances(selection: Selection) -> TopK:
    values_TK, ids_TK, log_sum_exp_T, tail_T = selection
    distances_TK = (values_TK[:, :1] - values_TK).double()
    return TopK(ids_TK, distances_TK, log_sum_exp_T, tail_T)


def draw(logits: Tensor, uniforms: Tensor, count: int) -> Tensor:
    """Return `(T, count)` int64 systematic draws from `(T, V)` logits, ascending.

    `uniforms` are `(T,)` float64 in [0, 1), one offset per token; equal offsets give equal draws.
    """
    return draw_tokens(logits, summarize(logits), uniforms, count)


class Request(NamedTuple):
    """The targets to compute from the teacher's logits, and the chunk size."""

    top_k: int
    draws: int
    chunk: int
    stream: int
    """Random stream for the draws (`qat.data.codec.stream`)."""


class Signals(NamedTuple):
    """The teacher's targets for every token of a batch; None for those that were not requested."""

    next_logprob: Tensor
    """Log-probability of the next token in the sequence, `(T,)` float32, nats. At the last position
    of a sequence it is that of the sequence's first token."""

    top: TopK | None
    draws: Tensor | None
    """Token ids of the draws, `(T, N)` int64, ascending."""
    is_sound: Tensor
    """Scalar bool: true if no logit is NaN or +inf, and no token has only -inf."""


@torch.no_grad()
def ask(
    teacher: Teacher, hidden: Tensor, tokens: Tensor, *, request: Request, first_place: int
) -> Signals:
    """Compute the teacher's targets for `(B, S)` tokens, flattened, without a device sync.

    `tokens` are on the host, `hidden` is the teacher's last hidden state of them. Logits exist for
    `request.chunk` tokens at a time. The draws of the i-th token depend only on its logits, the
    request's stream and `first_place + i`, so they are reproducible.
    """
    backend = on(teacher.device)
    next_ids = backend.tracing.divided(backend.to_device(tokens.roll(-1, dims=1)))
    # a tensor, not a number: XLA merges equal constants, which would give another graph
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
M = 2**CODE_BITS - 2  # the largest code of a distance
FAR = M + 1  # the code of a token beyond MAX_DISTANCE, so that it does not stretch the range
MAX_DISTANCE = 104.0  # nats; exp(-104) is 0 in float32, so larger distances carry no information
STEPS_PER_OCTAVE = 20  # a stored range is rounded up by at most a factor 2**(1/20)
# the fields that a decoded top K needs
TOP_K_ROWS = ("topk_ids", "topk_codes", "topk_range", "tail_logprob")
BLOCK = 2**18
"""Number of log-probs decoded at once, so that temporaries stay in a core's cache."""
SHARES = (torch.arange(FAR + 1) / M).square()
"""Distance of each code as a fraction of the range, `(FAR + 1,)`."""
SHARES[FAR] = torch.inf  # clamped to MAX_DISTANCE when decoded


def id_bits(vocab_size: int) -> int:
    """Return the number of bits of one token id."""
    return max(1, (vocab_size - 1).bit_length())


def encode_top_k(top: TopK, num_sequences: int, vocab_size: int) -> dict[str, Tensor]:
    """Encode the `TopK` of all tokens, in order, as rows of `num_sequences` sequences."""
    return pack_top_k(round_top_k(top, num_sequences), vocab_size)


def round_top_k(top: TopK, num_sequences: int) -> dict[str, Tensor]:
    """Return the rows of `encode_top_k` with ids and codes as int32, for `pack_top_k` to pack."""
    is_far_TK = top.distances > MAX_DISTANCE
    near_TK = top.distances.masked_fill(is_far_TK, 0.0)
    # the smallest range that can be stored and covers all distances
    octaves_T = torch.log2(near_TK.amax(-1) / MAX_DISTANCE)
    range_code_T = (255 + STEPS_PER_OCTAVE * octaves_T).ceil().clamp(0, 255)
    ratio_TK = near_TK / _decode_range(range_code_T)[:, None]
    codes_TK = (M * ratio_TK.sqrt()).round().int().masked_fill(is_far_TK, FAR)[:, 1:]
    per_row = codes_TK.numel() // num_sequences  # may be 0, where -1 is ambiguous
    rows = (num_sequences, -1)
    return {
        "topk_ids": top.ids.int().reshape(rows),
        "topk_codes": codes_TK.reshape(num_sequences, per_row),
        "topk_range": range_code_T.to(torch.uint8).view(rows),
        "log_sum_exp": top.log_sum_exp.view(rows),
        "tail_logprob": top.tail_logprob.view(rows),
    }


def pack_top_k(rows: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Pack the ids and codes of `round_top_k`, if `rows` has them."""
    bits = {"topk_ids": id_bits(vocab_size), "topk_codes": CODE_BITS}
    return rows | {name: pack_bits(rows[name], bits[name]) for name in bits.keys() & rows}


def decode_top_k(
    rows: dict[str, Tensor], *, length: int, k: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return ids `(N, S, K)` int64 and log-probs `(N, S, K)` float32, most likely first."""
    N, bits = len(rows["topk_range"]), id_bits(vocab_size)
    ids, logprobs = _empty(N, length, k, np.int64), _empty(N, length, k, np.float32)
    range_NS1 = _decode_range(rows["topk_range"].double()).float()[..., None]
    step = max(1, BLOCK // (length * k))
    for block in (slice(first, first + step) for first in range(0, N, step)):
        ids_NI = unpack_bits(rows["topk_ids"][block], bits, length * k)
        ids[block] = ids_NI.view_as(ids[block])
        codes_NI = unpack_bits(rows["topk_codes"][block], CODE_BITS, length * (k - 1))
        ratios = logprobs[block]  # log p - log p_max; log p_max is added below
        ratios[..., 0] = 0.0
        shares = SHARES.index_select(0, codes_NI.flatten()).view_as(ratios[..., 1:])
        torch.mul(shares, -range_NS1[block], out=ratios[..., 1:]).clamp_(min=-MAX_DISTANCE)
        # probabilities sum to 1 - tail, which determines the most likely one
        head_NS = torch.log(-torch.expm1(rows["tail_logprob"][block]))
        ratios += (head_NS - ratios.exp().sum(-1).log())[..., None]
    return ids, logprobs


def over_words(
    ids: Tensor, logprobs: Tensor, tail: Tensor, num_words: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return top K and tail, `(..., K)` and `(...)`, renormalised over the first `num_words` words.

    Other words follow the rest with id -1 and log-prob -inf; what the tail holds of them cannot be
    told apart and stays in it. K becomes at most `num_words - 1`: some word is left to the tail.
    """
    is_beyond = ids >= num_words
    order = is_beyond.byte().argsort(dim=-1, stable=True)
    beyond = logprobs.masked_fill(~is_beyond, -torch.inf).logsumexp(-1)
    kept = torch.log1p(-beyond.exp())
    ids = ids.masked_fill(is_beyond, -1).gather(-1, order)
    logprobs = logprobs.masked_fill(is_beyond, -torch.inf).gather(-1, order) - kept[..., None]
    K = min(ids.shape[-1], num_words - 1)
    tail = torch.logaddexp(tail - kept, logprobs[..., K:].logsumexp(-1))
    return ids[..., :K], logprobs[..., :K], tail


def encode_draws(draws: Tensor, mask: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Encode `(N, S, n)` ascending draws as rows, for tokens where `mask` `(N, S)` is true.

    `sample_marks` has one bit per draw, set where it differs from the previous draw. The bits of a
    token therefore give its number of distinct ids and, in unary, how often each was drawn.
    `sample_ids` holds the distinct ids of all sequences concatenated, `sample_lengths` bytes each.
    """
    bits = id_bits(vocab_size)
    marks = torch.ones_like(draws, dtype=torch.bool)  # (N, S, n)
    marks[..., 1:] = draws[..., 1:] != draws[..., :-1]
    marks &= mask[..., None]
    marks_NX = marks.flatten(1)  # X = S * n
    counts_N1 = marks_NX.sum(1, keepdim=True)  # distinct ids of each sequence
    most = int(counts_N1.max())
    ids_NI = draws.new_zeros(len(draws), most)
    ids_NI[torch.arange(most) < counts_N1] = draws[marks]
    packed = pack_bits(ids_NI, bits)  # padded to the sequence with most ids; cut below
    lengths_N1 = (counts_N1 * bits + 7) // 8
    return {
        "sample_marks": pack_bits(marks_NX, 1),
        "sample_ids": packed[torch.arange(packed.shape[1]) < lengths_N1],
        "sample_lengths": lengths_N1[:, 0].int(),
    }


def decode_draws(
    marks: Tensor, id_rows: list[np.ndarray], *, length: int, num_draws: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return distinct ids `(N, S, D)` int64 and counts `(N, S, D)` float32.

    D is padded with id 0 and count 0.

    Args:
        marks: `(N, ceil(S * n / 8))` uint8 rows of `sample_marks`.
        id_rows: bytes of `sample_ids` of each sequence.
    """
    N, T, n = len(marks), len(marks) * length, num_draws
    is_new_Tn = unpack_flags(marks, length * n).numpy().reshape(T, n)
    is_kept_T = is_new_Tn[:, 0].copy()
    is_new_Tn[:, 0] = True  # a set bit ends the run of the last draws of the previous token
    num_T = is_new_Tn.sum(-1, dtype=np.int32)  # distinct draws of each token
    # D is a multiple of 16, so that most batches share one shape and replay one captured graph
    D = min(n, -(-int(num_T.max()) // 16) * 16)
    ids, counts = np.zeros((T, D), np.int64), np.zeros((T, D), np.float32)
    is_used_TD = np.arange(D, dtype=np.int32) < num_T[:, None]
    # distances between set bits: how often each id was drawn
    counts[is_used_TD] = np.diff(np.flatnonzero(is_new_Tn), append=T * n)
    is_used_TD[~is_kept_T], counts[~is_kept_T] = False, 0.0
    num_N = (num_T * is_kept_T).reshape(N, length).sum(1)
    ids[is_used_TD] = _decode_ids(id_rows, num_N.tolist(), id_bits(vocab_size))
    return tuple(torch.from_numpy(found).view(N, length, D) for found in (ids, counts))


def _decode_ids(id_rows: list[np.ndarray], counts: list[int], bits: int) -> np.ndarray:
    """Return the distinct ids of all sequences concatenated, `counts` per sequence."""
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
    """Allocate with NumPy, which requests huge pages: page faults cost more than the copy."""
    return torch.from_numpy(np.empty((N, S, K), dtype))


def _decode_range(code: Tensor) -> Tensor:
    octaves = (code - 255) / STEPS_PER_OCTAVE
    lacks_exp2 = on(code.device).is_traced
    return MAX_DISTANCE * (torch.pow(2.0, octaves) if lacks_exp2 else torch.exp2(octaves))


# Counter-based random numbers: each is a function of its place, not of earlier draws.
#
# Shapes: T tokens, n numbers of a token.

GOLDEN = 0x9E3779B97F4A7C15  # constants of splitmix64
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def stream(*names: object) -> int:
    """Return the 64-bit seed of a random stream identified by the names."""
    return _signed(xxhash.xxh3_64_intdigest("/".join(map(str, names)).encode()))


def uniforms(stream: int, places: Tensor, count: int) -> Tensor:
    """Return `(T, count)` float64 in [0, 1) for `(T,)` int64 places of a stream.

    The numbers of place p are outputs `p * count` to `(p + 1) * count - 1` of splitmix64 seeded
    with the stream (Steele, Lea and Flood, OOPSLA 2014), whose n-th output can be computed
    directly. They are equal on every device.
    """
    numbers = places[:, None] * count + torch.arange(1, count + 1, device=places.device)
    bits = stream + numbers * _signed(GOLDEN)
    for shift, multiplier in MIXERS:
        bits = (bits ^ _shift(bits, shift)) * _signed(multiplier)
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 11).double() * 2.0**-53


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros.

    The sign bit is shifted separately: XLA's shift of a negative number divides and rounds up.
    """
    return (bits & (2**63 - 1)) >> count | (bits < 0) * 2 ** (63 - count)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
