"""Blocks of columns in the middle of a sweep, for the tests of its kernels.

Shapes: O rows, C codebook entries, B columns of a block, d weights of a vector, G rows of scales.
"""

from dataclasses import replace

import torch

from qat.quant.error_feedback import Columns
from qat.quant.weight import index_dtype


def block(B: int, O: int, C: int, G: int) -> tuple[Columns, torch.Tensor, torch.Tensor]:
    """A block in the middle of a sweep, its targets, and a coupling with zeros on its diagonal."""
    levels = torch.randn(C, O).sort(0).values
    scales = (torch.rand(G, O) + 0.1).half().float()
    chosen = levels.gather(0, torch.randint(C, (B, O)))
    weight = torch.randn(B, O)
    S = scales.repeat_interleave(B // G, 0)
    columns = Columns(weight, weight - chosen * S, chosen, scales, levels)
    coupling = 0.3 * torch.randn(B, B)
    return columns, weight + 0.3 * torch.randn(B, O), coupling.fill_diagonal_(0.0)


def block_of_vectors(
    B: int, O: int, C: int, d: int, G: int
) -> tuple[Columns, torch.Tensor, torch.Tensor]:
    """Return a `block` with a codebook `(C, d)` and a metric of positive definite blocks."""
    scales = (torch.rand(G, O) + 0.1).half().float()
    if G == B:
        scales[0, :5] = 0.0  # a low-rank scale may be zero, or negative
        scales[1] *= -1.0
    codebook, weight = torch.randn(C, d), torch.randn(B, O)
    indices = torch.randint(C, (B // d, O))
    factor = torch.randn(B // d, d, d)
    metric = (factor @ factor.mT + 0.1 * torch.eye(d)).flatten(0, 1)
    columns = Columns(
        weight, weight, values(codebook, indices), scales, codebook,
        indices=indices.to(index_dtype(C)), metric=metric,
    )  # fmt: skip
    columns.residual = weight - columns.chosen * scales.repeat_interleave(B // G, 0)
    coupling = 0.1 * torch.randn(B, B)
    coupling.view(B // d, d, B // d, d).diagonal(dim1=0, dim2=2).zero_()
    return columns, weight + 0.3 * torch.randn(B, O), coupling


def values(codebook: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return codebook[indices.int()].permute(0, 2, 1).flatten(0, 1).contiguous()


def copied(columns: Columns, dtype: torch.dtype = torch.float32) -> Columns:
    held = {n: t for n, t in vars(columns).items() if isinstance(t, torch.Tensor)}
    tensors = {n: t.clone() if n == "indices" else t.clone().to(dtype) for n, t in held.items()}
    return replace(columns, **tensors)
