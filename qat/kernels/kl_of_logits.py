"""KL divergence between the softmax of two models' logits, and its gradient, in two passes.

Shapes: T tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton, use_triton

BLOCK, WARPS = 2048, 8
"""Words that a program reads at a time, a power of two, and its warps."""


class Divergence(NamedTuple):
    """The divergence of each token, and the gradient of their weighted sum."""

    kl: Tensor
    """`(T,)`, in the dtype of the student's logits; 0 where a token does not count."""
    slope: Tensor | None
    """`(T, V)`: the gradient with respect to the student's logits; None if not wanted."""


class Scale(NamedTuple):
    """Factors of a divergence and of its gradient."""

    temperature: float = 1.0
    weight: float = 1.0
    """Factor of the gradient alone."""
    softcap: float | None = None
    """The soft cap that the student's logits have passed; the gradient is of those before it."""


def kl_of_logits(
    teacher: Tensor, student: Tensor, mask: Tensor, scale: Scale, *, slope: torch.dtype | None
) -> Divergence:
    """Return `t^2 KL(p || q)` of each token, and the gradient of `weight` times their sum.

    With `p = softmax(teacher / t)` and `q = softmax(student / t)` at the temperature `t`, the
    gradient is `weight * t * (q - p)`, times `1 - (student / softcap)^2` behind a soft cap. On a
    GPU the logits are read once for the values and once more for the gradient, and both are
    computed in float32.

    Args:
        teacher: `(T, V)` float32 or float64, as is `student`; both finite.
        student: `(T, V)`.
        mask: `(T,)` bool: true where a token counts.
        scale: temperature, weight and soft cap.
        slope: dtype of the gradient; None to compute none.
    """
    if use_triton(student, __name__) and student.dtype != torch.float64:
        return _by_kernel(teacher, student, mask, scale, slope)
    t = scale.temperature
    log_p, log_q = (teacher / t).log_softmax(1), (student / t).log_softmax(1)
    p = log_p.exp()
    kl = t**2 * (p * (log_p - log_q)).sum(1)
    kl = kl.masked_fill(~mask, 0.0)
    if slope is None:
        return Divergence(kl, None)
    g = (scale.weight * t) * (log_q.exp() - p)
    if scale.softcap is not None:
        g *= 1 - (student / scale.softcap).square()
    return Divergence(kl, g.masked_fill_(~mask[:, None], 0.0).to(slope))


def _by_kernel(
    teacher: Tensor, student: Tensor, mask: Tensor, scale: Scale, slope: torch.dtype | None
) -> Divergence:
    teacher, student = teacher.contiguous(), student.contiguous()
    T, V = student.shape
    kl = student.new_empty(T)
    gradient = None if slope is None else student.new_empty(T, V, dtype=slope)
    if T:
        with torch.cuda.device_of(student):
            _kl_kernel[(T,)](
                teacher, student, mask, kl, gradient, 1 / scale.temperature, scale.weight,
                scale.softcap or 1.0, V, HAS_SLOPE=slope is not None,
                HAS_CAP=scale.softcap is not None, BLOCK=min(BLOCK, triton.next_power_of_2(V)),
                num_warps=WARPS,
            )  # fmt: skip
    return Divergence(kl, gradient)


@triton.jit
def _kl_kernel(
    teacher_ptr,
    student_ptr,
    mask_ptr,
    kl_ptr,
    slope_ptr,
    rate,
    weight,
    softcap,
    V,
    HAS_SLOPE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the divergence of a token, and its gradient in a second pass over the logits.

    In the first, every place of a block has sums of its own, relative to its largest logit so far:
    no program waits for a sum over its threads before the end.
    """
    token = tl.program_id(0).to(tl.int64)  # offsets may exceed 2**31
    teacher_ptr += token * V
    student_ptr += token * V
    counts = tl.load(mask_ptr + token).to(tl.int1)
    words = tl.arange(0, BLOCK)
    peak_p = tl.full((BLOCK,), -1e30, tl.float32)  # finite, so that no difference is NaN
    peak_q = tl.full((BLOCK,), -1e30, tl.float32)
    total_p = tl.zeros((BLOCK,), tl.float32)
    total_q = tl.zeros((BLOCK,), tl.float32)
    apart = tl.zeros((BLOCK,), tl.float32)
    stop = tl.where(counts, V, 0)
    for start in range(0, stop, BLOCK):
        v = start + words
        inside = v < V
        p = tl.load(teacher_ptr + v, mask=inside, other=-1e30) * rate
        q = tl.load(student_ptr + v, mask=inside, other=-1e30) * rate
        higher_p = tl.maximum(peak_p, p)
        higher_q = tl.maximum(peak_q, q)
        scale_p = tl.exp(peak_p - higher_p)
        share = tl.exp(p - higher_p)
        total_p = total_p * scale_p + share
        apart = apart * scale_p + share * (p - q)
        total_q = total_q * tl.exp(peak_q - higher_q) + tl.exp(q - higher_q)
        peak_p = higher_p
        peak_q = higher_q
    most_p = tl.max(peak_p, 0)
    most_q = tl.max(peak_q, 0)
    scale_p = tl.exp(peak_p - most_p)
    sum_p = tl.where(counts, tl.sum(total_p * scale_p, 0), 1.0)
    sum_q = tl.where(counts, tl.sum(total_q * tl.exp(peak_q - most_q), 0), 1.0)
    most_p = tl.where(counts, most_p, 0.0)
    most_q = tl.where(counts, most_q, 0.0)
    # differences first: the largest logits may be far from zero
    kl = tl.sum(apart * scale_p, 0) / sum_p - (most_p - most_q) - tl.log(sum_p / sum_q)
    tl.store(kl_ptr + token, tl.where(counts, kl / (rate * rate), 0.0))
    if HAS_SLOPE:
        slope_ptr += token * V
        factor = weight / rate
        one_p = 1.0 / sum_p
        one_q = 1.0 / sum_q
        for start in range(0, V, BLOCK):
            v = start + words
            inside = v < V
            live = inside & counts
            p = tl.load(teacher_ptr + v, mask=live, other=-1e30) * rate
            q = tl.load(student_ptr + v, mask=live, other=-1e30)
            g = factor * (tl.exp(q * rate - most_q) * one_q - tl.exp(p - most_p) * one_p)
            if HAS_CAP:
                bounded = tl.where(live, q, 0.0) / softcap
                g *= 1.0 - bounded * bounded
            tl.store(slope_ptr + v, g.to(slope_ptr.dtype.element_ty), mask=inside)
