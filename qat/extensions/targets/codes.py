"""Quantized weights as codes of 2, 4 or 8 bits, scales and a zero point, for several engines.

Shapes: O out_features, I in_features, G blocks per row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qat.extensions.targets.shared import EVEN_GRIDS, affine, exact, lost_by_grid
from qat.nn.quant_weight import QuantWeight
from qat.quant.spec import LutSpec
from qat.quant.weight import pack

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Numbers of weights that may share a scale; a larger or odd group repeats its scale."""
STORED_BITS = (2, 4, 8)


class Codes(NamedTuple):
    """A quantized weight as engines store it: `W = scale * (code - zero)`."""

    bits: int
    """Bits per code."""
    block: int
    """Weights that share a scale."""
    packed: Tensor
    """`(O, I * bits / 8)` uint8."""
    scales: Tensor
    """`(O, G)` float32."""
    zero: float
    """Half of the codes, or a half less."""

    @property
    def has_half(self) -> bool:
        """True if the zero point is no integer."""
        return self.zero % 1 != 0


def to_codes(name: str, module: QuantWeight, *, is_half: bool) -> Codes:
    """Return the codes and scales of a module called `name`, without loss.

    `is_half`: the zero point lies between two codes. Else levels without a zero, the odd multiples
    of half a step, take one more bit.

    Raises:
        ExportError: a scale is no float32 number.
    """
    weight, spec = affine(module), module.spec
    parts = 2 if spec.codebook == "seq" and not is_half else 1
    bits, block = stored_bits(spec.bits + parts - 1), block_size(spec)
    zero = 2 ** (bits - 1) - is_half / 2
    lowest, second = module.codebook.double().tolist()[:2]
    first = round(lowest / (second - lowest) * parts + zero)
    scales = exact(f"{name}.scales", weight.scale / parts, torch.float32)
    scales = scales.repeat_interleave(spec.group_size // block, 1)
    return Codes(bits, block, pack(weight.codes.int() * parts + first, bits), scales, zero)


def stored_bits(bits: int) -> int | None:
    """Return the bits of the codes that hold indices of `bits`; None if there are none."""
    return next((stored for stored in STORED_BITS if bits <= stored), None)


def is_coded(spec: LutSpec) -> bool:
    """Return whether codes hold a weight with group scales: even levels in blocks wide enough."""
    return spec.codebook in EVEN_GRIDS and block_size(spec) >= BLOCK_SIZES[0]


def block_size(spec: LutSpec) -> int:
    """Return the largest block that divides the groups of a weight."""
    return math.gcd(spec.group_size, BLOCK_SIZES[-1])


def lost_by_blocks(spec: LutSpec, bits: int | None, smallest: int) -> str | None:
    """Return why codes of `bits` cannot hold a weight in blocks of `smallest` or more; None if not.

    `bits` is None for a weight that needs more than 8.
    """
    reason = lost_by_grid(spec, EVEN_GRIDS)
    if reason is None and (bits is None or block_size(spec) < smallest):
        reason = (
            f"{spec.codebook} of {spec.bits} bits in groups of {spec.group_size}, expected at most "
            f"8 bits (7 of seq) in groups of a multiple of {smallest}"
        )
    return reason


def blocks_bits(shape: tuple[int, int], bits: int, block: int) -> int:
    """Return the bits of an `(O, I)` weight in the files, with 16-bit scales."""
    return math.prod(shape) * (bits * block + 16) // block
