"""What a linear should be so that, on the student's inputs, it gives what the teacher's gives.

Quantized layers hand wrong inputs on. A linear fitted to its own weight passes that error through;
one that is aimed first takes back what its inputs can tell of it. Minimising the mean of
`|W x_f + s_f - W' x - s|^2` over the tokens gives

    W' = W + (W mean((x_f - x) x^T) + mean((s_f - s) x^T)) H^-1,    H = mean(x x^T),

where x and x_f are what the student's and the teacher's linear read, and s and s_f the residual
streams that the output is added to (left out where it is not). The first term is that of QEP
(arXiv:2504.09629), whose aim GPTAQ shares (asymmetric calibration, arXiv:2504.02692); the second
carries it on to the sum that the next block reads.

Shapes: O out_features, I in_features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qat.quant.error_feedback import damped

SHRINK = 0.5
"""How much of the correction is taken. All of it fits the calibration tokens, not the text: on a
model of 15 M weights and 512 x 64 tokens one half was better than a quarter and than the whole."""


def aim_all(
    weights: Sequence[Tensor],
    hessian: Tensor,
    input_gap: Tensor,
    stream_gap: Tensor | None = None,
    *,
    shrink: float = SHRINK,
) -> list[Tensor]:
    """`W + shrink (W' - W)` of each of `weights` `(O_n, I)`, which share their inputs.

    `H` is damped as for the fit, and solved in float64. A weight whose aim is not finite stays as
    it is. Nothing waits for the device.

    Args:
        hessian: `mean(x x^T)`, `(I, I)`.
        input_gap: `mean((x_f - x) x^T)`, `(I, I)`.
        stream_gap: `mean((s_f - s) x^T)`, `(O, I)`, the same for all weights.
    """
    weights = [weight.detach().float() for weight in weights]
    gaps = [weight @ input_gap for weight in weights]
    if stream_gap is not None:
        gaps = [gap + stream_gap for gap in gaps]
    factor, failed = torch.linalg.cholesky_ex(damped(hessian.float()).double())
    moves = torch.cholesky_solve(torch.cat(gaps).T.double(), factor).T.float()
    parts = moves.split([len(weight) for weight in weights])
    return [
        torch.where((failed == 0) & part.isfinite().all(), weight + shrink * part, weight)
        for weight, part in zip(weights, parts, strict=True)
    ]
