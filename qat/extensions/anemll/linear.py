"""Conversion of one quantized linear of the reference system, equal up to float32 rounding.

Version 1: `W = lut[idx] * max(A B, 1e-8)`. Version 2: `W = q * (A' diag(g) B')`, where A' has unit
columns and B' has unit rows, or both are as stored if the scales are baked. Both versions add
`lora_B lora_A * alpha / r`. The indices are stored, or follow from `_Q`, or from `weight / S`.

Shapes: O out_features, I in_features, P in_features padded, L entries of the LUT, R rank, r rank of
a LoRA, S the scale `(O, I)`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.errors import CheckpointError
from qat.extensions.anemll.state import (
    MOST_LEVELS,
    LegacySettings,
    LegacyState,
    Parts,
    check_finite,
    check_shapes,
)
from qat.nn.swap import ascending
from qat.quant.fit import balance
from qat.quant.lora import Lora
from qat.quant.spec import LutSpec
from qat.quant.weight import WIDE, QuantizedWeight, Scales, round_scales

NORM_FLOOR = 1e-6
"""Lower bound of the norm of a column or row that version 2 divides by."""
SCALE_FLOOR = 1e-8
"""Lower bound of a scale in version 1."""
LEAST_GAP = 1e-4  # between two entries of a learned LUT (`learned_levels`)


class Imported(NamedTuple):
    """A converted linear."""

    quantized: QuantizedWeight
    spec: LutSpec
    lora: Lora | None
    num_floored: int
    """Weights whose scale version 1 raises to 1e-8: they get a level of their own, zero."""


def import_linear(name: str, parts: Parts, legacy: LegacyState, shape: tuple[int, int]) -> Imported:
    """Convert the `(O, I)` linear called `name` of the state dict `legacy`.

    Raises:
        CheckpointError: its tensors do not fit together, are not finite, or cannot be represented.
    """
    version, settings = legacy.version, legacy.settings
    check_finite(name, parts)
    check_shapes(name, parts, version, shape)
    wide = {part: t.float() if t.is_floating_point() else t for part, t in parts.items()}
    if version == 1:
        quantized, num_floored = _from_first(name, wide, settings, shape[1])
    else:
        quantized, num_floored = _from_second(name, wide, settings), 0
    lut = quantized.codebook.float()  # padded to `2**bits` levels: the largest is repeated
    missing = 2 ** _bits_for(lut.numel()) - lut.numel()
    lut = torch.cat([lut, lut.max().expand(missing)])
    quantized = ascending(quantized._replace(codebook=lut))
    scales, form = quantized.scales, {"bits": _bits_for(lut.numel())}
    if scales.scales is None:
        form |= {"scale": "low_rank", "rank": scales.rank_gain.numel()}
    else:
        form |= {"group_size": shape[1] // scales.scales.shape[1]}
    spec = LutSpec(scale_bits=scales.bits, **form)
    return Imported(quantized, spec, _adapter(name, wide, settings, shape), num_floored)


def learned_levels(raw_deltas: Tensor, max_abs: float) -> Tensor:
    """Return the LUT `(16,)` of eight learned logits, rounded to float16.

    `gaps = d + (M - 8 d) softmax(raw)`; their cumulative sum is the upper half, mirrored for the
    lower. `d = max(2 ulp(M), 1e-4)` with `ulp(M) = 2**(ceil(log2 M) - 10)`.
    """
    least = max(2.0 * 2.0 ** (math.ceil(math.log2(max(max_abs, 1e-6))) - 10), LEAST_GAP)
    half = raw_deltas.numel()
    upper = torch.cumsum(least + (max_abs - half * least) * F.softmax(raw_deltas, dim=0), dim=0)
    return torch.cat([-upper.flip(0), upper]).half().float()


def second_scales(parts: Parts, settings: LegacySettings) -> Scales:
    """Return the scale of version 2: normalised factors with gains, or the factors as baked."""
    A, B, g = parts["scale_A"], parts["scale_B"], parts["rank_magnitude"]
    flag = parts.get("_scales_baked_flag")
    # older files have no flag: gains of one say it
    is_baked = torch.allclose(g, torch.ones_like(g), atol=1e-5) if flag is None else flag.item()
    if not is_baked:
        if settings.is_positive:
            A, B = A.abs(), B.abs()
        A = A / A.norm(dim=0, keepdim=True).clamp(min=NORM_FLOOR)
        B = B / B.norm(dim=1, keepdim=True).clamp(min=NORM_FLOOR)
        if settings.magnitude != "identity":
            g = F.softplus(g) if settings.magnitude == "softplus" else g.abs()
        g = g + settings.magnitude_eps
    return _as_narrow_as_exact(Scales(None, A, g, B))


def nearest_entries(values: Tensor, lut: Tensor) -> Tensor:
    """Return the index of the entry nearest to each value, ties to the first: `(O, I)` uint8.

    Values are first clamped to the range of the LUT; NaN gets index 0.
    """
    values = values.clamp(lut.min(), lut.max())
    best = torch.zeros(values.shape, dtype=torch.uint8)
    least = (values - lut[0]).abs()
    for place in range(1, lut.numel()):
        distance = (values - lut[place]).abs()
        is_nearer = distance < least
        best.masked_fill_(is_nearer, place)
        least = torch.where(is_nearer, distance, least)
    return best


def uniform_indices(scaled: Tensor, num_entries: int, *, has_zero: bool) -> Tensor:
    """Return version 1's index of `weight / S`: uniform on [-1, 1], independent of the LUT."""
    x = scaled.clamp(-1.0, 1.0)
    if not has_zero or num_entries % 2 == 1:
        place = (x + 1.0) / (2.0 / (num_entries - 1))
    else:
        half = num_entries // 2
        upper = x / (1.0 / max(1, half - 1)) + half
        place = torch.where(x < 0, (x + 1.0) / (1.0 / half), upper)
    return place.round().clamp(0, num_entries - 1).to(torch.uint8)


def lora_as_stored(lora: Lora) -> Lora:
    """Return the product with factors exact in float16, at up to three times the rank.

    With `out = h + l`, both float16, and `in = h' + l'`, the product is `h h' + l h' + h l'` except
    for `l l'`, a fraction of 2**-22.
    """
    if not lora.lora_out.any() or not lora.lora_in.any():
        return Lora(*(factor.half().float() for factor in lora))
    if all(torch.equal(factor.half().float(), factor) for factor in lora):
        return lora
    # powers of two keep the product exact while they balance the factors of each rank
    tiny = torch.finfo(torch.float32).tiny
    out_size = lora.lora_out.abs().amax(0).clamp_min(tiny)
    in_size = lora.lora_in.abs().amax(1).clamp_min(tiny)
    shift = torch.exp2(((in_size.log2() - out_size.log2()) / 2).round().clamp(-60, 60))
    out, inner = lora.lora_out * shift, lora.lora_in / shift[:, None]
    (out_high, out_low), (in_high, in_low) = _halves(out), _halves(inner)
    outs, ins = [out_high], [in_high]
    if out_low.any():
        outs.append(out_low)
        ins.append(in_high)
    if in_low.any():
        outs.append(out_high)
        ins.append(in_low)
    return Lora(torch.cat(outs, 1), torch.cat(ins, 0))


def _from_second(name: str, parts: Parts, settings: LegacySettings) -> QuantizedWeight:
    scales = second_scales(parts, settings)
    lut = parts["lut"]
    if "_indices" in parts:
        indices, most = parts["_indices"], lut.numel() - 1
        if indices.is_floating_point() or indices.min() < 0 or indices.max() > most:
            raise CheckpointError(
                f"{name}._indices holds {indices.dtype} from {indices.min().item()} to "
                f"{indices.max().item()}, expected integers from 0 to {most}; the file is damaged: "
                "copy it anew"
            )
        indices = indices.to(torch.uint8)
    elif "_Q" in parts:
        indices = nearest_entries(parts["_Q"], lut)
        if not torch.equal(lut[indices.int()], parts["_Q"]) and "_lut_raw_deltas" not in parts:
            lut, indices = _entries_of(name, parts["_Q"], lut.numel())
    else:
        S = (scales.scale_out * scales.rank_gain) @ scales.scale_in
        indices = nearest_entries(parts["weight"] / S, lut)
    if "_lut_raw_deltas" in parts:
        max_abs = settings.lut_max_abs or lut.abs().max().item()
        lut = learned_levels(parts["_lut_raw_deltas"], max_abs)
    return QuantizedWeight(indices, lut, scales)


def _from_first(
    name: str, parts: Parts, settings: LegacySettings, in_features: int
) -> tuple[QuantizedWeight, int]:
    lut, weight = parts["lut"], parts["weight"]
    is_full = "full_scales" in parts
    raw = parts["full_scales"] if is_full else parts["scale_A"] @ parts["scale_B"]
    raw = raw[:, :in_features]
    S = raw.clamp(min=SCALE_FLOOR)
    if settings.snapped == "lut":
        lut, indices = _entries_of(name, weight, lut.numel())
    else:
        has_zero = settings.lut_include_zero
        if has_zero is None:
            has_zero = bool((lut == 0).any())
        indices = uniform_indices(weight / S, lut.numel(), has_zero=has_zero)
    if settings.snapped == "baked":
        # the sum of magnitudes of each entry of `raw`, which bounds its rounding error
        sizes = raw.abs() if is_full else parts["scale_A"].abs() @ parts["scale_B"].abs()
        num_terms = 1 if is_full else parts["scale_A"].shape[1]
        levels = lut[indices.int()]
        rounding = levels.abs() * sizes[:, :in_features].clamp(min=SCALE_FLOOR) * (num_terms + 2)
        _check_baked(name, weight, levels * S, 2 * torch.finfo(torch.float32).eps * rounding)
    if is_full:
        return QuantizedWeight(indices, lut, _group_scales(S)), 0
    scales = balance(parts["scale_A"], parts["scale_B"][:, :in_features])
    is_floored = raw < SCALE_FLOOR
    quantized = QuantizedWeight(indices, lut, _as_narrow_as_exact(scales))
    return _with_zero(name, quantized, is_floored), int(is_floored.sum())


def _with_zero(name: str, quantized: QuantizedWeight, is_floored: Tensor) -> QuantizedWeight:
    """Return the weight with zero where the scale is 1e-8, which low-rank scales cannot hold.

    This moves a weight by 1e-8 times a LUT entry; zero becomes an entry of the LUT.
    """
    if not is_floored.any():
        return quantized
    indices, lut = quantized.indices.clone(), quantized.codebook
    is_zero = lut == 0
    if not is_zero.any():
        if lut.numel() == MOST_LEVELS:
            raise CheckpointError(
                f"{name}: {int(is_floored.sum())} of its scales are below {SCALE_FLOOR}, where its "
                f"weights vanish, and its LUT has {MOST_LEVELS} entries, none of them zero; such "
                "a weight cannot be held exactly: train it further, or as version 2"
            )
        lut = torch.cat([lut, lut.new_zeros(1)])
        is_zero = lut == 0
    indices[is_floored] = int(is_zero.int().argmax())
    return quantized._replace(indices=indices, codebook=lut)


def _group_scales(S: Tensor) -> Scales:
    """Return `S` `(O, I)` as group scales of the largest group size in which it is constant."""
    I = S.shape[1]
    for size in (size for size in range(I, 0, -1) if I % size == 0):
        groups = S.view(S.shape[0], I // size, size)
        if (groups == groups[..., :1]).all():
            return _as_narrow_as_exact(Scales(groups[..., 0].contiguous()))
    raise AssertionError("groups of one are always constant")


def _as_narrow_as_exact(scales: Scales) -> Scales:
    """Return the scales in 16 bits if that is exact, else in 32."""
    narrow, wide = scales._replace(bits=16), scales._replace(bits=WIDE)
    rounded, exact = round_scales(narrow).present(), scales.present()
    is_exact = all(torch.equal(rounded[name], exact[name]) for name in exact)
    return narrow if is_exact else wide


def _entries_of(name: str, values: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """Return the distinct values of a table of LUT entries, ascending, and the index of each."""
    lut, indices = values.unique(return_inverse=True)
    if lut.numel() > num_entries:
        raise CheckpointError(
            f"{name} holds {lut.numel()} distinct values where its LUT has {num_entries} entries, "
            "expected entries of the LUT alone; name a checkpoint whose codes are frozen"
        )
    return lut, indices.to(torch.uint8)


def _bits_for(num_levels: int) -> int:
    return max(1, (num_levels - 1).bit_length())


def _adapter(
    name: str, parts: Parts, settings: LegacySettings, shape: tuple[int, int]
) -> Lora | None:
    if "lora_A" not in parts:
        return None
    rank = parts["lora_A"].shape[0]
    alpha = settings.lora_alpha or float(rank)
    stored = lora_as_stored(Lora(parts["lora_B"] * (alpha / rank), parts["lora_A"]))
    if not all(torch.isfinite(factor).all() for factor in stored):
        raise CheckpointError(
            f"{name}: its LoRA has values beyond float16, expected such as training gives; merge "
            "it into the weight or leave it out"
        )
    if stored.lora_in.shape[0] > min(shape):
        raise CheckpointError(
            f"{name}: its LoRA of rank {rank} needs rank {stored.lora_in.shape[0]} in float16, "
            f"more than the sides {shape[0]} and {shape[1]} have; save the LoRA in float16"
        )
    return stored


def _halves(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a factor rounded to float16, and its remainder rounded to float16."""
    high = factor.half().float()
    return high, (factor - high).half().float()


def _check_baked(name: str, weight: Tensor, expected: Tensor, rounding: Tensor) -> None:
    difference = (weight - expected).abs()
    worst = difference.max()
    if not (difference <= rounding).all():
        raise CheckpointError(
            f"{name}: its baked weights are up to {worst.item():.3g} away from LUT times scale (as "
            "bfloat16 leaves them), expected float32; convert the checkpoint from before snapping"
        )
