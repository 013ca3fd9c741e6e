"""The reference system's state dicts: the choice of file, the version, and the linears.

A quantized linear of version 1 (`AnemllQATLinear`) has `weight`, `lut` and `scale_A`, `scale_B` (or
`full_scales`); one of version 2 (`AnemllQATLinearV2`) also has `rank_magnitude` and perhaps `_Q`,
`_indices`, `_scales_baked_flag`, `_lut_raw_deltas`. Both may have `lora_A` and `lora_B`. Facts:
Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5.

Shapes: O out_features, I in_features, L entries of a LUT, R rank of the scale, r rank of a LoRA.
"""

from pathlib import Path
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from qat.errors import CheckpointError
from qat.extensions.anemll.pickles import check_sums, check_tensors, read_pickle
from qat.files import parse_json

Version = Literal[1, 2]
Parts = dict[str, Tensor]
"""The tensors of one linear by the last part of their key, such as `scale_A`."""

FIRST_CHOICE = ("best_state_dict.pt", "model_state_dict.pt")
"""Preferred files in a directory with several `.pt` files."""
NOT_A_STATE = ("indices.pt",)
"""Files written next to a state dict that add nothing to it."""
NESTED = ("model_state_dict", "state_dict")
"""Keys of the state dict in files that hold more than that."""
SCALE_PARTS = ("scale_A", "full_scales")
OWN_PARTS = (
    "lut",
    "scale_A",
    "scale_B",
    "full_scales",
    "rank_magnitude",
    "_Q",
    "_indices",
    "_scales_baked_flag",
    "_lut_raw_deltas",
    "_cached_weight_q",
    "lora_A",
    "lora_B",
    "A_lut",
    "B_lut",
    "_A_idx",
    "_B_idx",
)
"""Tensors that a quantized linear may have besides `weight` and `bias`."""
RANK_LUT_PARTS = ("A_lut", "B_lut", "_A_idx", "_B_idx")
OLDEST = ("._f_param", "._qat_nbits")
"""Suffixes of the keys of its oldest scheme, which has no lookup tables."""


class LegacySettings(NamedTuple):
    """Settings in `config.json` that the tensors do not show; all are optional."""

    model_id: str | None = None
    """The float model that the checkpoint was made from."""
    lora_alpha: float | None = None
    """A LoRA is multiplied by `lora_alpha / r`; None means by 1."""
    snapped: Literal["lut", "baked"] | None = None
    """The content of `weight` in version 1: LUT entries, or entries times the scale (baked)."""
    lut_include_zero: bool | None = None
    """True if a LUT of version 1 with an even size has a zero; None decides by its values."""
    lut_max_abs: float | None = None
    """The largest entry of a learned LUT; None takes that of the stored one."""
    is_positive: bool = False
    """True if the scale factors enter by magnitude (`force_positive_scales`)."""
    magnitude: Literal["identity", "abs", "softplus"] = "identity"
    """The function applied to the gains."""
    magnitude_eps: float = 0.0
    """A constant added to the gains."""

    @classmethod
    def read(cls, values: dict[str, object], where: str) -> Self:
        """Return typed settings from the `config.json` of either writer.

        Raises:
            CheckpointError: a value has the wrong type or is out of range.
        """
        snapped = values.get("snapped_mode")
        if snapped is None and values.get("snapped"):
            snapped = "baked" if values.get("snap_bake_scales") else "lut"
        alpha = values.get("lora_alpha") or values.get("recovery_alpha") or None
        found = {
            "model_id": _typed(values, "model_id", str, where),
            "lora_alpha": None if alpha is None else _number(alpha, "lora_alpha", where),
            "snapped": _one_of(snapped, "snapped_mode", ("lut", "baked"), where),
            "lut_include_zero": _typed(values, "lut_include_zero", bool, where),
            "is_positive": _typed(values, "force_positive_scales", bool, where),
            "magnitude": _one_of(
                values.get("magnitude_activation"),
                "magnitude_activation",
                ("identity", "abs", "softplus"),
                where,
            ),
        }
        for key in ("lut_max_abs", "magnitude_eps"):
            if values.get(key) is not None:
                found[key] = _number(values[key], key, where)
        return cls(**{key: value for key, value in found.items() if value is not None})


class LegacyState(NamedTuple):
    """A state dict, split into quantized linears and other tensors."""

    version: Version
    linears: dict[str, Parts]
    """Tensors of the quantized linears as stored, by the linear's name."""
    others: dict[str, Tensor]
    """All other tensors by key."""
    settings: LegacySettings


def state_file(source: Path) -> Path:
    """Return the `.pt` file of `source`, a file or a directory.

    Raises:
        CheckpointError: there is none, or there are several and none has a preferred name.
    """
    if source.is_file():
        return source
    if not source.is_dir():
        raise CheckpointError(
            f"{source} does not exist, expected a .pt file of the reference system or its "
            "directory; check the path"
        )
    files = sorted(path for path in source.glob("*.pt") if path.name not in NOT_A_STATE)
    preferred = [source / name for name in FIRST_CHOICE if source / name in files]
    if len(files) == 1 or preferred:
        return preferred[0] if preferred else files[0]
    names = ", ".join(path.name for path in files[:4]) or "none"
    raise CheckpointError(
        f"{source} holds {len(files)} .pt files ({names}), expected one; name the file itself"
    )


def read_state(path: Path) -> LegacyState:
    """Read the state dict in `path` and the settings in the `config.json` of its directory.

    Raises:
        CheckpointError: the file is unreadable or of neither version, or its config.json is
            damaged.
    """
    found = read_pickle(path, CheckpointError)
    check_sums(path, CheckpointError)
    inside = found.get("config")
    for key in NESTED:
        if isinstance(found.get(key), dict):
            found = found[key]
            break
    found = {str(key).removeprefix("module."): value for key, value in found.items()}
    settings = _read_settings(path.parent / "config.json", inside)
    check_tensors(path, found, CheckpointError)
    return _sort(path, found, settings)


def _read_settings(path: Path, inside: object) -> LegacySettings:
    if not path.is_file():
        return LegacySettings.read(inside if isinstance(inside, dict) else {}, "config")
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}), expected the settings of a checkpoint; mend it, or "
            "move it away and add --base MODEL"
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds no JSON object, expected the settings of a checkpoint; mend it, or "
            "move it away and add --base MODEL"
        )
    return LegacySettings.read(values, str(path))


def _sort(path: Path, state: dict[str, Tensor], settings: LegacySettings) -> LegacyState:
    names = {key.rpartition(".")[0] for key in state if key.rpartition(".")[2] in SCALE_PARTS}
    if not names:
        kind = f"{len(state)} tensors, none of them a scale_A"
        if any(key.endswith(OLDEST) for key in state):
            kind = (
                "a state dict of the reference system's oldest scheme (per-tensor scales, no LUT)"
            )
        elif state and all(".lora_" in key for key in state):
            kind = "LoRA factors alone"
        raise CheckpointError(
            f"{path} holds {kind}, expected a state dict of version 1 or 2 of the reference "
            "system; name a file with whole quantized linears"
        )
    linears: dict[str, Parts] = {name: {} for name in sorted(names)}
    others = {}
    for key, tensor in state.items():
        name, _, part = key.rpartition(".")
        if name in names and part != "bias":
            linears[name][part] = tensor
        else:
            others[key] = tensor
    strays = [key for key in others if key.rpartition(".")[2] in OWN_PARTS]
    if strays:
        raise CheckpointError(
            f"{path}: {strays[0]} belongs to a quantized linear that has no scale_A, expected all "
            "its tensors; the file is damaged: copy it anew"
        )
    return LegacyState(_version(path, linears), linears, others, settings)


def _version(path: Path, linears: dict[str, Parts]) -> Version:
    has_gain = {name: "rank_magnitude" in parts for name, parts in linears.items()}
    if len(set(has_gain.values())) > 1:
        second = next(name for name, has in has_gain.items() if has)
        first = next(name for name, has in has_gain.items() if not has)
        raise CheckpointError(
            f"{path} mixes versions: {second} has rank_magnitude and {first} has none; expected "
            "all linears of one version: copy the file anew"
        )
    version: Version = 2 if any(has_gain.values()) else 1
    for name, parts in linears.items():
        _check_parts(path, name, parts, version)
    return version


def _check_parts(path: Path, name: str, parts: Parts, version: Version) -> None:
    unknown = sorted(parts.keys() - {"weight", *OWN_PARTS})
    if unknown:
        raise CheckpointError(
            f"{path}: {name} has a tensor {unknown[0]}, which neither version knows; expected "
            f"weight, {', '.join(OWN_PARTS[:5])}, ...: copy the file anew"
        )
    needed = {"lut", "full_scales"} if "full_scales" in parts else {"lut", "scale_A", "scale_B"}
    if version == 1:
        needed |= {"weight"}
    missing = sorted(needed - parts.keys())
    if not missing and not parts.keys() & {"weight", "_Q", "_indices"}:
        missing = ["weight"]
    if missing or ("lora_A" in parts) != ("lora_B" in parts):
        lacking = missing[0] if missing else "the other LoRA factor"
        raise CheckpointError(
            f"{path}: {name} has no {lacking}, expected all tensors of a linear of version "
            f"{version}; the file is damaged: copy it anew"
        )
    if parts.keys() & set(RANK_LUT_PARTS):
        raise CheckpointError(
            f"{path}: {name} has tables for its scales (A_lut, B_lut), expected none: no preset of "
            "the reference system uses them, and they cannot be imported; save it without rank_lut"
        )


def _typed(values: dict[str, object], key: str, kind: type, where: str) -> object:
    value = values.get(key)
    if value is not None and not isinstance(value, kind):
        raise _wrong(key, value, kind.__name__, where)
    return value


def _number(value: object, key: str, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e9:
        raise _wrong(key, value, "a number that is not negative", where)
    return float(value)


def _one_of(value: object, key: str, known: tuple[str, ...], where: str) -> object:
    if value is not None and value not in known:
        raise _wrong(key, value, f"one of {', '.join(known)}", where)
    return value


def _wrong(key: str, value: object, expected: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} says {key}={str(value)[:60]!r}, expected {expected}; mend or remove that line"
    )


# Checks of the tensors of one linear, before anything is computed with them. P: in_features padded.

LEAST_LEVELS, MOST_LEVELS = 2, 256  # an index is one byte
LEARNED_LEVELS = 16
"""Entries of a learned LUT: eight gaps, mirrored."""


def check_finite(name: str, parts: Parts) -> None:
    """Raise CheckpointError for the first tensor with NaN or infinity."""
    for part, tensor in parts.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{name}.{part} holds NaN or infinity, expected finite values; go back to an "
                "earlier checkpoint"
            )


def check_shapes(name: str, parts: Parts, version: Version, shape: tuple[int, int]) -> None:
    """Raise CheckpointError for the first tensor that does not belong to an `(O, I)` linear."""
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


def _side(parts: Parts, part: str, dim: int) -> int:
    """Return the size of a matrix along `dim`; 0 if there is no such matrix."""
    tensor = parts.get(part)
    return 0 if tensor is None or tensor.dim() != 2 else tensor.shape[dim]
