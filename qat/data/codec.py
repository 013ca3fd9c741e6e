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

from math import log, sqrt

import numpy as np
import torch
from torch import Tensor

from qat.backend.device import on
from qat.data.bits import pack_bits, packed_bytes, unpack_bits, unpack_flags
from qat.data.signals import TopK
from qat.errors import CacheError

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
    range_code_T = _encode_range(near_TK.amax(-1))
    ratio_TK = near_TK / _decode_range(range_code_T)[:, None]
    codes_TK = (M * ratio_TK.sqrt()).round().long().masked_fill(is_far_TK, FAR)
    rows = (num_sequences, -1)
    return {
        "topk_ids": pack_bits(top.ids.reshape(rows), id_bits(vocab_size)),
        "topk_codes": _pack_codes(codes_TK[:, 1:], num_sequences),
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


def _pack_codes(codes_TK: Tensor, num_sequences: int) -> Tensor:
    per_row = codes_TK.numel() // num_sequences
    return pack_bits(codes_TK.reshape(num_sequences, per_row), CODE_BITS)


def _encode_range(distances: Tensor) -> Tensor:
    """The code of the smallest stored range that reaches `distances`, float64 in 0..255."""
    octaves = torch.log2(distances / MAX_DISTANCE)
    return (255 + STEPS_PER_OCTAVE * octaves).ceil().clamp(0, 255)


def _decode_range(code: Tensor) -> Tensor:
    octaves = (code - 255) / STEPS_PER_OCTAVE
    lacks_exp2 = on(code.device).compares()
    return MAX_DISTANCE * (torch.pow(2.0, octaves) if lacks_exp2 else torch.exp2(octaves))
