"""Quantized weights as ONNX Runtime stores them: codes of 2, 4 or 8 bits, scales, zero points.

Shapes: O out_features, I in_features, G blocks per row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qat.extensions.targets.shared import affine, exact
from qat.nn.lut_embedding import QuantTable
from qat.nn.quant_weight import QuantWeight
from qat.quant.spec import LutSpec
from qat.quant.weight import pack

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Numbers of weights that may share a scale in ONNX Runtime; a larger or odd group repeats its
scale."""
STORED_BITS = (2, 4, 8)


class Codes(NamedTuple):
    """A quantized weight as ONNX Runtime stores it: `W = scale * (code - zero)`."""

    bits: int
    """Bits per code."""
    block: int
    """Weights that share a scale."""
    packed: Tensor
    """`(O, I * bits / 8)` uint8."""
    scales: Tensor
    """`(O, G)` float32."""
    zero: float
    """Half of the codes, which is not stored, or 1.5."""

    @property
    def has_half(self) -> bool:
        """True if the zero point is 1.5."""
        return self.zero % 1 != 0


def codes_of(name: str, module: QuantWeight) -> Codes:
    """Return the codes and scales of a module called `name`, without loss.

    Raises:
        ExportError: a scale is no float32 number.
    """
    weight, spec, is_table = affine(module), module.spec, isinstance(module, QuantTable)
    bits, block = stored_bits(spec, is_table=is_table), block_size(spec)
    is_half = has_half(spec, is_table=is_table)
    parts = 2 if spec.codebook == "seq" and not is_half else 1
    zero = 2 ** (bits - 1) - is_half / 2
    lowest, second = module.codebook.double().tolist()[:2]
    first = round(lowest / (second - lowest) * parts + zero)
    scales = exact(f"{name}.scales", weight.scale / parts, torch.float32)
    scales = scales.repeat_interleave(spec.group_size // block, 1)
    return Codes(bits, block, pack(weight.codes.int() * parts + first, bits), scales, zero)


def has_half(spec: LutSpec, *, is_table: bool) -> bool:
    """Return whether the zero point of a weight is 1.5, which no table may have."""
    return (spec.codebook, spec.bits) == ("seq", 2) and not is_table


def stored_bits(spec: LutSpec, *, is_table: bool = False) -> int | None:
    """Return the bits of the codes that hold the levels; None if there are none.

    Levels without a zero are the odd multiples of half a step, which take one more bit.
    """
    is_odd = spec.codebook == "seq" and not has_half(spec, is_table=is_table)
    return next((bits for bits in STORED_BITS if spec.bits + is_odd <= bits), None)


def block_size(spec: LutSpec) -> int:
    """Return the largest block that divides the groups of a weight."""
    return math.gcd(spec.group_size, BLOCK_SIZES[-1])
