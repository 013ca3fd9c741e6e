"""What tensors of one linear of the reference system must be before anything is computed with them.

Shapes: O out_features, I in_features, P in_features padded, L entries of the LUT, R rank, r rank of
a LoRA.
"""

import torch

from qat.anemll.state import Parts, Version
from qat.errors import CheckpointError

LEAST_LEVELS, MOST_LEVELS = 2, 256
LEARNED_LEVELS = 16
"""Entries of a LUT that learns: eight gaps, mirrored."""


def check_finite(name: str, parts: Parts) -> None:
    """Refuse values that are no numbers.

    Raises:
        CheckpointError: naming the first tensor with NaN or infinity.
    """
    for part, tensor in parts.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{name}.{part} holds NaN or infinity, expected finite values; go back to an "
                "earlier checkpoint"
            )


def check_shapes(name: str, parts: Parts, version: Version, shape: tuple[int, int]) -> None:
    """Refuse tensors that do not make up an `(O, I)` linear.

    Raises:
        CheckpointError: the first one of another shape, dtype or number of values.
    """
    O, I = shape
    L, R, r = parts["lut"].numel(), _side(parts, "scale_A", 1), _side(parts, "lora_A", 0)
    # version 1 pads its input features to whole groups
    P = max(_side(parts, "scale_B", 1), I) if version == 1 else I
    wanted = {
        "weight": (O, I),
        "_Q": (O, I),
        "_indices": (O, I),
        "lut": (L,),
        "scale_A": (O, R),
        "scale_B": (R, P),
        "full_scales": (O, max(_side(parts, "full_scales", 1), I)),
        "rank_magnitude": (R,),
        "_lut_raw_deltas": (LEARNED_LEVELS // 2,),
        "lora_A": (r, I),
        "lora_B": (O, r),
    }
    for part, expected in wanted.items():
        if part not in parts:
            continue
        found = tuple(parts[part].shape)
        if found != expected or 0 in found:
            raise CheckpointError(
                f"{name}.{part} has shape {found}, expected {expected} in a {O} x {I} linear; the "
                "file is damaged, or of another model than --base"
            )
    _check_levels(name, parts)


def _side(parts: Parts, part: str, dim: int) -> int:
    """The size of a matrix in one direction; 0 where there is no such matrix."""
    tensor = parts.get(part)
    return 0 if tensor is None or tensor.dim() != 2 else tensor.shape[dim]


def _check_levels(name: str, parts: Parts) -> None:
    L = parts["lut"].numel()
    if not LEAST_LEVELS <= L <= MOST_LEVELS:
        raise CheckpointError(
            f"{name}.lut has {L} entries, expected {LEAST_LEVELS} to {MOST_LEVELS}; the file is "
            "damaged: copy it anew"
        )
    if "_lut_raw_deltas" in parts and L != LEARNED_LEVELS:
        raise CheckpointError(
            f"{name} has a learned LUT of {L} entries, expected {LEARNED_LEVELS}: the reference "
            "system trains no others; copy the file anew"
        )
    flag = parts.get("_scales_baked_flag")
    if flag is not None and flag.numel() != 1:
        raise CheckpointError(
            f"{name}._scales_baked_flag has {flag.numel()} values, expected one; the file is "
            "damaged: copy it anew"
        )
    for part in parts.keys() - {"_indices", "_scales_baked_flag"}:
        if not parts[part].is_floating_point():
            raise CheckpointError(
                f"{name}.{part} is {parts[part].dtype}, expected floating point; the file is "
                "damaged: copy it anew"
            )
