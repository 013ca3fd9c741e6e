"""The top K of a vocabulary's logits and the mass outside, reading the logits about once.

The vocabulary is cut into blocks of `BLOCK` columns, and one pass keeps each block's largest logit
and its sum of exponentials. The K blocks whose largest logits are highest hold the whole top K:
a token outside them is beaten by the largest of each. So only K * BLOCK candidates are looked at
again, and whatever is summed is summed over tokens outside the top K, never as `1 - sum`.

Tokens are ordered by logit, highest first, and among equal logits by id, lowest first, so that
bfloat16's many ties come out alike on every device.

Shapes: T tokens, V vocabulary, K tokens kept, N blocks, C blocks chosen.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat.backend.device import on
from qat.kernels.dispatch import use_triton

BLOCK = 64
LOW_BITS = 2**31 - 1


class Blocks(NamedTuple):
    """What one pass over `(T, V)` logits keeps of each block of `BLOCK` columns."""

    peaks: Tensor
    """`(T, N)` float32: the largest logit; -inf where no token is possible."""
    sums: Tensor
    """`(T, N)` float32: sum of exp(logit - peak); NaN if a logit is NaN or +inf."""


class Selection(NamedTuple):
    """The K largest logits and how the vocabulary weighs."""

    values: Tensor
    """`(T, K)` float32, descending."""
    ids: Tensor
    """`(T, K)` int64; ascending among equal values."""
    log_sum_exp: Tensor
    """`(T,)` float32, of all logits; not finite if one is NaN or +inf, or all are -inf."""
    tail_logprob: Tensor
    """`(T,)` float32: log of the mass outside the K; -inf when K = V."""


def top_k_of_logits(logits: Tensor, k: int) -> Selection:
    """The `k` largest of `(T, V)` logits: `torch.topk`, with ties by ascending id, and the tail.

    Log-sum-exp and log tail mass are within 2e-6 of float64's (relative where above 1). Mass
    further than e^-87 below the most likely token may count as zero.
    """
    return top_k_of_blocks(logits, k, summarize(logits))


def summarize(logits: Tensor) -> Blocks:
    """Peak and sum of exponentials of each block of `(T, V)` logits; the last may be narrower."""
    if use_triton(logits):
        from qat.kernels import topk_triton

        return topk_triton.summarize_by_kernel(logits)
    width = logits.shape[1]
    blocks_TNB = pad(logits, (0, -width % BLOCK), value=-torch.inf).unflatten(1, (-1, BLOCK))
    peaks_TN = blocks_TNB.amax(-1).float()
    zero_TN = peaks_TN.masked_fill(peaks_TN == -torch.inf, 0.0)
    weights_TNB = (blocks_TNB.float() - zero_TN[..., None]).exp_()
    return Blocks(peaks_TN, weights_TNB.sum(-1))


def top_k_of_blocks(logits: Tensor, k: int, blocks: Blocks) -> Selection:
    """`top_k_of_logits` for whoever has the blocks of these logits already."""
    if use_triton(logits):
        from qat.kernels import topk_triton

        if topk_triton.can_select(k, blocks):
            return topk_triton.select_by_kernel(logits, k, blocks)
    if on(logits.device).compares():
        return _sorted(logits, k)
    return _select(logits, k, blocks)


def masses(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Each block's mass relative to the row's largest logit, `(T, N)` float64, and that logit."""
    peak_T1 = blocks.peaks.amax(-1, keepdim=True)
    return blocks.sums.double() * (blocks.peaks - peak_T1).double().exp(), peak_T1


def log_sum_exp(blocks: Blocks) -> Tensor:
    """`(T,)` float32 log-sum-exp of all logits; not finite where a logit spoils the row."""
    mass_TN, peak_T1 = masses(blocks)
    return (mass_TN.sum(-1).log() + peak_T1[:, 0]).float()


def candidates(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of `(T, C)` chosen blocks and their ids, `(T, C, BLOCK)`; -inf beyond V."""
    V = logits.shape[1]
    columns_B = torch.arange(BLOCK, device=logits.device)
    ids_TCB = chosen[..., None] * BLOCK + columns_B
    flat = ids_TCB.clamp(max=V - 1).flatten(1)
    values_TCB = logits.gather(1, flat).view(ids_TCB.shape).float()
    return values_TCB.masked_fill(ids_TCB >= V, -torch.inf), ids_TCB


def _sorted(logits: Tensor, k: int) -> Selection:
    """All of it by one stable sort."""
    values_TV, ids_TV = (logits.float() + 0.0).sort(dim=1, descending=True, stable=True)
    weights_TV = (values_TV - values_TV[:, :1]).exp().double()
    total_T = weights_TV.sum(-1).log()
    return Selection(
        values=values_TV[:, :k],
        ids=ids_TV[:, :k],
        log_sum_exp=(total_T + values_TV[:, 0]).float(),
        tail_logprob=(weights_TV[:, k:].sum(-1).log() - total_T).float(),
    )


def _select(logits: Tensor, k: int, blocks: Blocks) -> Selection:
    mass_TN, peak_T1 = masses(blocks)
    N = mass_TN.shape[1]
    if 2 * k < N:  # else gathering most of the vocabulary costs more than taking all of it
        block_keys_TN = _keys(blocks.peaks, torch.arange(N, device=logits.device))
        best_TC = block_keys_TN.topk(k).values
        outside_T = mass_TN.masked_fill(block_keys_TN >= best_TC[:, -1:], 0.0).sum(-1)
        values_TX, ids_TX = (x.flatten(1) for x in candidates(logits, unpack_keys(best_TC)[1]))
    else:
        outside_T = mass_TN.new_zeros(())
        values_TX, ids_TX = logits.float(), torch.arange(logits.shape[1], device=logits.device)
    keys_TX = _keys(values_TX, ids_TX)
    best_TK = keys_TX.topk(k).values
    weights_TX = (values_TX - peak_T1).exp_().masked_fill_(keys_TX >= best_TK[:, -1:], 0.0)
    rest_T = outside_T + weights_TX.sum(-1).double()
    total_T = mass_TN.sum(-1).log()
    values_TK, ids_TK = unpack_keys(best_TK)
    return Selection(
        values=values_TK,
        ids=ids_TK,
        log_sum_exp=(total_T + peak_T1[:, 0]).float(),
        tail_logprob=(rest_T.log() - total_T).float(),
    )


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 that order as (value descending, id ascending) when sorted in descending order.

    The upper half is the float's bits with those of negative numbers turned over, which orders as
    the floats do; the lower half is the id, counted from above.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    ordered = bits ^ ((bits >> 31) & LOW_BITS)
    return ordered.long().mul_(2**32).add_(LOW_BITS - ids)


def unpack_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The float32 values and int64 ids of keys."""
    ordered = (keys >> 32).int()
    values = (ordered ^ ((ordered >> 31) & LOW_BITS)).view(torch.float32)
    return values, LOW_BITS - (keys & LOW_BITS)
