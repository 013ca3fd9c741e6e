"""The representation of a quantized weight, `W = codebook[indices] * S`, and its stored form.

An entry of the codebook is one level, or a codeword of d neighbouring weights of a row.

Shapes: O out_features, I in_features, G groups per row, C codebook entries, T codebooks, R rank, d
weights that an index names.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qat.backend.device import on
from qat.quant.spec import LutSpec

# E5M3: non-negative floats of 5 exponent and 3 mantissa bits, the upper byte of a float16.
#
# Without its sign a float16 has 15 bits; a byte holds the upper 8 of them, from 2**-17 (subnormal
# below 2**-14) to 61440. Of powers of two (E5M0), 2**-14 to 2**15, the lower 3 bits are zeros.

SMALLEST = 2.0**-17  # the smallest positive value of E5M3
INFINITY = 0x7C00  # the bits of a float16 infinity
CUT = 7  # bits of a float16 that a byte does not hold


def round_to_byte(value: Tensor, bits: int = 8) -> Tensor:
    """Return `value` in float32, rounded to float16 and then to E5M3, or to E5M0 if `bits` is 5.

    Both round to nearest even, E5M0 at a tie between two powers to the larger one. Negative values
    become 0. Finite float16 values above the largest (61440 or 32768) become that. Infinity, values
    that float16 rounds to infinity (from 65520 on) and NaN are returned as infinity and NaN; they
    have no byte. Values that are already rounded do not change.
    """
    half, cut = value.clamp_min(0).half(), 15 - bits
    if on(value.device).is_traced:
        rounded = _rounded_by_comparing(half.float(), mantissa=bits - 5)
        return torch.where(half.isfinite(), rounded, half.float())
    pattern = half.view(torch.int16).int() & 0x7FFF  # clear the sign of a negative zero
    odd = pattern >> cut & 1 if bits > 5 else (pattern >> cut).clamp_max(1)
    pattern = (pattern + (2 ** (cut - 1) - 1) + odd) >> cut << cut
    rounded = pattern.clamp_max(INFINITY - 2**cut).to(torch.int16).view(torch.float16)
    return torch.where(half.isfinite(), rounded, half).float()


def _rounded_by_comparing(value: Tensor, mantissa: int) -> Tensor:
    """Do what `round_to_byte` does for float16 values in float32, without access to their bits.

    Divides by powers of two, which is exact, until so many bits of `mantissa` are left.
    """
    smallest, largest = SMALLEST * 2.0 ** (3 - mantissa), 2.0**16 - 2.0 ** (15 - mantissa)
    units, unit = value * (1 / smallest), torch.full_like(value, smallest)
    for octaves in (16, 8, 4, 2, 1):
        is_above = units >= 2.0 ** (mantissa + octaves)
        units = torch.where(is_above, units * 2.0**-octaves, units)
        unit = torch.where(is_above, unit * 2.0**octaves, unit)
    return (units.round() * unit).clamp(0.0, largest).abs()


def encode(value: Tensor) -> Tensor:
    """Return the bytes (uint8) of finite values that `round_to_byte` has rounded."""
    return (value.half().view(torch.int16) >> CUT).to(torch.uint8)


def decode(octets: Tensor) -> Tensor:
    """Return the float32 values of E5M3 bytes (uint8)."""
    return (octets.to(torch.int16) << CUT).view(torch.float16).float()


STORED_DTYPES = {
    "codebook": torch.float32,
    "scales": torch.float16,
    "scale_out": torch.float16,
    "rank_gain": torch.float32,
    "scale_in": torch.float16,
    "lora_out": torch.float16,
    "lora_in": torch.float16,
}
"""The dtype of each tensor in a checkpoint; training computes with the same rounded values.

Group scales of 8 and 5 bits are bytes instead, and scales of 32 bits are float32.
"""

WIDE = 32  # the `scale_bits` of float32 scales
CODEWORD_STEPS = 64  # steps of an 8-bit codeword entry between 0 and 1

ROWS_IN_CACHE = 256  # rows of a low-rank product that a CPU sums at a time


class Scales(NamedTuple):
    """The scales of a weight in one of two forms; the fields of the other form are None."""

    scales: Tensor | None = None  # `(O, G)`, the group form
    scale_out: Tensor | None = None  # `A` of the low-rank form, `(O, R)`
    rank_gain: Tensor | None = None  # `g` of the low-rank form, `(R,)`
    scale_in: Tensor | None = None  # `B` of the low-rank form, `(R, I)`
    bits: int = 16  # bits of a stored scale: 32, 16, or, for group scales only, 8 or 5

    def present(self) -> dict[str, Tensor]:
        """Return the tensors of the form in use, by name."""
        named = ((name, getattr(self, name)) for name in SCALE_NAMES)
        return {name: tensor for name, tensor in named if tensor is not None}

    def low_rank(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return `A`, `g` and `B` of the low-rank form."""
        return cast(tuple[Tensor, Tensor, Tensor], (self.scale_out, self.rank_gain, self.scale_in))

    def by_group(self) -> Tensor:
        """Return the `(O, G)` scales of the group form."""
        return cast(Tensor, self.scales)

    def of_rows(self, which: slice | Tensor) -> "Scales":
        """Return the scales of some rows of the weight, a slice or ids."""
        return self.replaced({n: t[which] for n, t in self.present().items() if n in BY_ROW})

    def replaced(self, parts: dict[str, Tensor]) -> "Scales":
        """Return a copy with the tensors in `parts` in place of those of the same name."""
        return self._replace(**cast(dict[str, Any], parts))


SCALE_NAMES = ("scales", "scale_out", "rank_gain", "scale_in")  # the tensors of `Scales`
BY_ROW = ("scales", "scale_out")  # those with one row per row of the weight


class QuantizedWeight(NamedTuple):
    """A weight as indices, levels or codewords, and scales."""

    indices: Tensor  # `(O, I / d)`, in the dtype that `index_dtype` returns
    codebook: Tensor
    """`(C,)` float32, ascending; `(C, d)`, codewords in any order; or `(T, C, 1)`, levels in any
    order, of T codebooks for O / T rows each."""
    scales: Scales

    @property
    def shape(self) -> torch.Size:
        """The shape `(O, I)` of the weight."""
        O, count = self.indices.shape
        return torch.Size((O, count * vector_size(self.codebook)))


def vector_size(codebook: Tensor) -> int:
    """Return d, the number of weights that an entry of the codebook covers."""
    return 1 if codebook.dim() == 1 else codebook.shape[-1]


def index_dtype(num_levels: int) -> torch.dtype:
    """Return the smallest dtype that holds every index of `num_levels` levels or codewords."""
    return torch.uint8 if num_levels <= 256 else torch.int16


def expand_scales(scales: Scales, in_features: int) -> Tensor:
    """Return `S`, `(O, I)`: each group's scale repeated over its features, or `A diag(g) B`.

    The low-rank product is no matmul, because its order of summation depends on the device. It adds
    `(A[:, r] * g[r])[:, None] * B[r]` for r = 0, 1, ..., each product and sum rounded on its own,
    so that every device gives the same bits.
    """
    if scales.scales is not None:
        O, G = scales.scales.shape
        return scales.scales[..., None].expand(O, G, in_features // G).reshape(O, in_features)
    scale_out, rank_gain, scale_in = scales.low_rank()
    gained = scale_out * rank_gain
    pieces = []
    for rows in gained.split(ROWS_IN_CACHE):
        total = rows.new_zeros(len(rows), in_features)
        for column, row in zip(rows.T, scale_in, strict=True):
            total += column[:, None] * row
        pieces.append(total)
    return torch.cat(pieces)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return `codebook[indices] * S`, `(O, I)` in the codebook's dtype."""
    S = expand_scales(weight.scales, weight.shape[1])
    return chosen_levels(weight) * S


def chosen_levels(weight: QuantizedWeight) -> Tensor:
    """Return `codebook[indices]`, `(O, I)`."""
    indices, codebook = weight.indices.int(), weight.codebook
    if codebook.dim() == 3:
        T, C, _ = codebook.shape
        first = torch.arange(0, T * C, C, dtype=torch.int32, device=indices.device)
        indices, codebook = indices.view(T, -1) + first[:, None], codebook.flatten()
    return codebook.index_select(0, indices.flatten()).view(weight.shape)


def ternary_levels(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight of codewords of -1, 0 and 1 with an index of one of these for each weight."""
    indices = (chosen_levels(weight) + 1).to(torch.uint8)
    return weight._replace(indices=indices, codebook=weight.codebook.new_tensor([-1.0, 0.0, 1.0]))


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return the weight whose rows are those of `parts`, with a codebook of levels for each."""
    scales = torch.cat([part.scales.by_group() for part in parts])
    return QuantizedWeight(
        torch.cat([part.indices for part in parts]),
        torch.stack([part.codebook for part in parts])[..., None],
        parts[0].scales._replace(scales=scales),
    )


def dtype_as_stored(name: str, bits: int | None = None) -> torch.dtype:
    """Return the dtype of the tensor `name` in a checkpoint.

    `bits` is that of a format (`LutSpec.stored_bits`) if `name` is a codebook or a scale; by
    default levels have 32 and scales 16.
    """
    if bits is None or name not in (*SCALE_NAMES, "codebook"):
        return STORED_DTYPES[name]
    if name == "codebook":
        return {WIDE: torch.float32, 16: torch.float16, 8: torch.int8}[bits]
    if bits == WIDE:
        return torch.float32
    return torch.uint8 if _is_byte(name, bits) else STORED_DTYPES[name]


def round_as_stored(name: str, value: Tensor, bits: int | None = None) -> Tensor:
    """Return `value` in float32 after rounding to the dtype that a checkpoint stores `name` in."""
    if bits is not None and _is_byte(name, bits):
        return round_to_byte(value, bits)
    if name == "codebook" and bits is not None:
        return round_levels(value, bits)
    return value.to(dtype_as_stored(name, bits)).float()


def round_levels(codebook: Tensor, level_bits: int) -> Tensor:
    """Return levels in float32 rounded to `level_bits` bits; 8 means multiples of 1/64 below 2."""
    if level_bits == 8:
        return (codebook * CODEWORD_STEPS).round().clamp(-127, 127) / CODEWORD_STEPS
    return codebook if level_bits == 32 else codebook.half().float()


def to_stored(name: str, value: Tensor, bits: int | None = None) -> Tensor:
    """Return the checkpoint's tensor for `value`, which must be rounded as stored and finite."""
    if _is_byte(name, bits):
        return encode(value)
    dtype = dtype_as_stored(name, bits)
    return (value * CODEWORD_STEPS).to(dtype) if dtype == torch.int8 else value.to(dtype)


def from_stored(name: str, stored: Tensor, bits: int | None = None) -> Tensor:
    """Return the float32 values of the tensor that a checkpoint stores for `name`."""
    if stored.dtype == torch.int8:
        return stored.float() / CODEWORD_STEPS
    return decode(stored) if _is_byte(name, bits) else stored.float()


def _is_byte(name: str, bits: int | None) -> bool:
    return name == "scales" and bits in (8, 5)


def round_scales(scales: Scales) -> Scales:
    """Round each part of `scales` as stored; parts that are already rounded do not change."""
    rounded = {n: round_as_stored(n, t, scales.bits) for n, t in scales.present().items()}
    return scales.replaced(rounded)


def rms(tensor: Tensor) -> float:
    """Return the root mean square, summed in float64; at least 1e-8."""
    return max(tensor.detach().double().pow(2).mean().sqrt().item(), 1e-8)


def above_zero(scales: Scales) -> Scales:
    """Raise group scales of a byte, which must be positive, so that none rounds to zero."""
    if scales.bits > 8:
        return scales
    return scales._replace(scales=scales.by_group().clamp_min(SMALLEST * 2.0 ** (8 - scales.bits)))


def as_stored(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the weight after a round trip through a checkpoint's dtypes."""
    codebook = round_levels(weight.codebook, WIDE if weight.codebook.dim() == 1 else 16)
    return QuantizedWeight(weight.indices, codebook, round_scales(weight.scales))


# Indices of 1 to 12 bits, packed into bytes row by row, least significant bit first.


class PackedIndices(NamedTuple):
    """The packed indices of one weight, with the settings needed to unpack them."""

    octets: Tensor  # the packed bytes, `(O, packed_width)` uint8
    bits: int
    in_features: int
    vector_size: int = 1

    @property
    def shape(self) -> torch.Size:
        """`(O, I)`, the shape of the weight."""
        return torch.Size((self.octets.shape[0], self.in_features))

    def indices(self) -> Tensor:
        """Return the unpacked indices `(O, I / d)`, uint8 or int16."""
        count = self.in_features // self.vector_size
        return unpack(self.octets, self.bits, count)


def packed_width(count: int, bits: int) -> int:
    """Return the bytes of a row of `count` indices."""
    return -(-count * bits // 8)


def pack(indices: Tensor, bits: int) -> Tensor:
    """Pack `(O, n)` indices below `2**bits` into `(O, ceil(n * bits / 8))` uint8.

    Index i of a row occupies its bits `i * bits ... (i + 1) * bits - 1`; the last byte is padded
    with zeros. A row is packed in units of as many indices as fill whole bytes.
    """
    O, n = indices.shape
    if indices.is_meta:  # checkpoints are opened with an empty one per linear
        return indices.new_empty((O, packed_width(n, bits)), dtype=torch.uint8)
    if 8 % bits == 0:
        return _pack_bytes(indices.to(torch.uint8), bits)
    at_once, _ = _together(bits)
    padded = torch.nn.functional.pad(indices, (0, -n % at_once)).view(O, -1, at_once)
    shifts = _shifts(bits, indices.device)
    word = (padded.to(_word(bits)) << shifts).sum(-1, dtype=_word(bits))
    byte_shifts = torch.arange(0, at_once * bits, 8, device=indices.device)
    octets = (word[..., None] >> byte_shifts) & 255
    return octets.view(O, -1)[:, : packed_width(n, bits)].to(torch.uint8).contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the `(O, count)` indices that `pack` packed, in the dtype of `index_dtype`."""
    O, width = packed.shape
    if 8 % bits == 0:
        parts = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, -1).flatten(1)[:, :count].contiguous()
    at_once, size = _together(bits)
    octets = torch.nn.functional.pad(packed, (0, -width % size)).view(O, -1, size)
    byte_shifts = torch.arange(0, at_once * bits, 8, device=packed.device)
    word = (octets.to(_word(bits)) << byte_shifts).sum(-1, dtype=_word(bits))
    indices = (word[..., None] >> _shifts(bits, packed.device)) & (2**bits - 1)
    return indices.view(O, -1)[:, :count].to(index_dtype(2**bits)).contiguous()


def _pack_bytes(indices: Tensor, bits: int) -> Tensor:
    """Do what `pack` does without leaving uint8, where a byte holds a whole number of indices."""
    num = 8 // bits
    padded = torch.nn.functional.pad(indices, (0, -indices.shape[1] % num))
    octets = padded[:, ::num].clone()
    for place in range(1, num):
        octets |= padded[:, place::num] << place * bits
    return octets


def _together(bits: int) -> tuple[int, int]:
    """Return the smallest number of indices that fills whole bytes, and that number of bytes."""
    return 8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)


def _word(bits: int) -> torch.dtype:
    """Return the integer dtype that holds the indices packed at a time."""
    return torch.int32 if _together(bits)[1] < 4 else torch.int64


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, _together(bits)[0] * bits, bits, device=device)


def empty_weight(spec: LutSpec, out_features: int, in_features: int) -> QuantizedWeight:
    """Return the tensors of an `(O, I)` weight in that format, without values.

    They are on the default device.
    """
    O, I, R = out_features, in_features, spec.rank
    if spec.scale == "low_rank":
        scales = Scales(None, torch.empty(O, R), torch.empty(R), torch.empty(R, I))
    else:
        scales = Scales(torch.empty(O, I // spec.group_size), bits=spec.scale_bits)
    indices = torch.empty(O, I // spec.vector_size, dtype=index_dtype(spec.num_levels))
    rows = spec.table_rows
    shape = (O // rows, spec.num_levels, 1) if rows else spec.codebook_shape
    return QuantizedWeight(indices, torch.empty(shape), scales)
