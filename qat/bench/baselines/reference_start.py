"""Where the reference's student starts: low-rank scales, its 4-bit stage, and its converter.

Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5: the largest absolute weight of each group,
written out to the weight's full width, is cut to low rank by SVD; each weight then takes the
nearest value of an evenly spaced table times `S = A diag(g) B`, unit columns in A and unit rows
in B. The converter cuts the table of 16 to 4 by k-means over its own entries, adds ranks of noise
to the scale, and chooses all levels anew.

Shapes: O out_features, I in_features, R rank, L table entries.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.bench.baselines.uniform import check_groups

Q4_BITS, Q4_RANK = 4, 4
NEW_GAIN, NEW_STD = 0.01, 0.01
GAIN_FLOOR = 0.01
KMEANS_ROUNDS = 20
TINY = 1e-6


class LowRank(NamedTuple):
    """A scale for every weight, `normalize(A) diag(g) normalize(B)`."""

    A: Tensor
    """`(O, R)`."""
    g: Tensor
    """`(R,)`."""
    B: Tensor
    """`(R, I)`."""

    def unit(self) -> "LowRank":
        """The same scale with unit columns in A and unit rows in B."""
        A = self.A / self.A.norm(dim=0, keepdim=True).clamp_min(TINY)
        return LowRank(A, self.g, self.B / self.B.norm(dim=1, keepdim=True).clamp_min(TINY))

    def formed(self) -> Tensor:
        """`(O, I)`, of either sign."""
        A, g, B = self.unit()
        return (A * g) @ B


class Start(NamedTuple):
    """A linear before its scales train."""

    Q: Tensor
    """`(O, I)`: the table's entry that each weight takes."""
    scale: LowRank


def convert(
    weight: Tensor, bits: int, rank: int, group_size: int, *, generator: torch.Generator
) -> Start:
    """A weight by way of 4 bits and rank 4, then the converter to `bits` and `rank`."""
    scale = svd_scale(weight, min(Q4_RANK, rank), group_size)
    scale = more_ranks(scale, rank, generator)
    return Start(nearest_entries(weight, scale, converted_lut(bits)), scale)


def from_scratch(weight: Tensor, lut: Tensor, rank: int, group_size: int) -> Start:
    """A weight straight at the entries of `lut` and `rank`."""
    scale = svd_scale(weight, rank, group_size)
    return Start(nearest_entries(weight, scale, lut), scale)


def converted_lut(bits: int) -> Tensor:
    """The table of the 4-bit stage, cut to `2**bits` entries."""
    lut = even_lut(2**Q4_BITS)
    return lut if bits == Q4_BITS else fewer_entries(lut, 2**bits)


def svd_scale(weight: Tensor, rank: int, group_size: int) -> LowRank:
    """The best scale of `rank` for the largest absolute weight of each group.

    No gain is below a hundredth of the largest, nor below 0.01.

    Raises:
        ConfigError: the groups do not divide the rows.
    """
    check_groups(weight.shape[1], group_size)
    largest = weight.float().unflatten(1, (-1, group_size)).abs().amax(2)
    U, s, V = torch.linalg.svd(largest.repeat_interleave(group_size, 1), full_matrices=False)
    R = min(rank, len(s))
    floor = max(GAIN_FLOOR * s[0].item(), GAIN_FLOOR)
    return LowRank(U[:, :R].contiguous(), s[:R].clamp(min=floor), V[:R].contiguous())


def even_lut(entries: int) -> Tensor:
    """Evenly spaced values from -1 to 1, rounded to float16, `(L,)` float32."""
    return torch.linspace(-1, 1, entries, dtype=torch.float16).float()


def fewer_entries(lut: Tensor, entries: int) -> Tensor:
    """K-means over the entries of `lut`, started at its quantiles; ties go down."""
    L = len(lut)
    centres = lut[torch.arange(1, entries + 1) * L // (entries + 1)]
    for _ in range(KMEANS_ROUNDS):
        owner = (lut[:, None] - centres).abs().argmin(1)
        centres = torch.stack([lut[owner == c].mean() for c in range(entries)])
    return centres


def more_ranks(scale: LowRank, rank: int, generator: torch.Generator) -> LowRank:
    """The scale with further ranks of random direction and a gain of 0.01."""
    (O, R), I = scale.A.shape, scale.B.shape[1]
    here = {"generator": generator, "device": generator.device}
    A = NEW_STD * torch.randn(O, rank - R, **here).to(scale.A)
    B = NEW_STD * torch.randn(rank - R, I, **here).to(scale.B)
    g = scale.g.new_full((rank - R,), NEW_GAIN)
    return LowRank(torch.cat([scale.A, A], 1), torch.cat([scale.g, g]), torch.cat([scale.B, B]))


def nearest_entries(weight: Tensor, scale: LowRank, lut: Tensor) -> Tensor:
    """The entry of `lut` nearest to each weight over its scale, `(O, I)` float32."""
    S = scale.formed()
    lut = lut.to(weight.device)
    wished = torch.where(S == 0, 0.0, weight.float() / S)
    return lut[torch.bucketize(wished, (lut[1:] + lut[:-1]) / 2)]
