"""Target `anemll`: a version 2 state dict of the reference system, for its Core ML converter.

Its linears are `W = lut[idx] * (A diag(g) B)`. Our low-rank scales have this form, and so do group
scales: G groups are rank G, `A` holds the scales and `B` is one where a group lies. The file is in
the state that its own `snap_for_export` leaves: gains merged into `A`, ones in `g`, and the flag
for baked scales set. Facts: Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5.

Shapes: O out_features, I in_features, G groups per row, L entries of a LUT, R rank.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError
from qat.export.model import float_base
from qat.export.parts import logits_of, plain_config
from qat.extensions.anemll.checkpoint import build_model
from qat.extensions.anemll.state import read_state
from qat.extensions.targets.shared import OF_LEVELS, refuse, unquantized_state, write_config
from qat.nn.quant_linear import QuantLinear, quant_linears
from qat.nn.swap import linear_names
from qat.quant.spec import LutSpec
from qat.quant.weight import Scales, dequantize

COMPARED = "sums"
HOLDS_ADAPTERS = True
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None,)
HOW_TO_LOAD = """\
`best_state_dict.pt` is for Anemll/qwen3_apple_style_2bit_qat_lora (`load_v2_checkpoint`, or
`--v2-checkpoint` of its scripts, with `config.json` beside it); `base/` holds the configuration and
the tokenizer of the float model, whose hub id its scripts want as `--model-id`. Back again:

    qat convert DIR --from anemll --base DIR/base --out CHECKPOINT
"""

STATE_NAME = "best_state_dict.pt"
BASE = "base"
MOST_RANK = 64
"""The largest rank in the presets of the reference system."""
USUAL_RANK = 32
"""The rank of its 2-bit MLPs."""
INIT_GROUP = 32
"""The `group_size` in its config.json, which matters only for initialization from weights."""
PARTS = {"mlp": ".mlp.", "attn": ".self_attn."}
"""The parts of a model that share one format there, by a substring of their linears' names."""


class _Common(NamedTuple):
    """The format that all linears of MLPs, or of attention, share in the file."""

    bits: int
    rank: int
    lora_rank: int


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why `spec` cannot be held: vectors, or more groups than ranks."""
    if spec.lost_as_levels or spec.scale == "low_rank":
        return spec.lost_as_levels
    num_groups = shape[1] // spec.group_size
    if num_groups <= MOST_RANK:
        return None
    return (
        f"its {num_groups} group scales a row are a scale of rank {num_groups}, and the largest "
        f"rank of the reference system is {MOST_RANK}"
    )


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return `spec` if it can be held, else its bits and codebook with a low-rank scale."""
    refuse(spec.lost_as_levels, OF_LEVELS)
    if lost(spec, shape) is None:
        return spec
    rank = min(USUAL_RANK, *shape)
    values = spec.model_dump() | {"scale": "low_rank", "rank": rank, "scale_bits": 16}
    return LutSpec(**values)


def check(model: PreTrainedModel) -> None:
    """Refuse a model that the loader of the reference system cannot represent.

    The loader has one format for all MLPs and one for attention, and no other linears.
    """
    quantized = quant_linears(model)
    if not quantized:
        return
    for name in linear_names(model):
        if name not in quantized:
            raise ExportError(
                f"anemll holds models whose linears are all quantized, but {name} is in floating "
                "point; give it a format in the plan"
            )
        if not any(part in name for part in PARTS.values()):
            raise ExportError(
                f"anemll knows linears of mlp and self_attn, expected no other, but there is "
                f"{name}; export --to dense"
            )
    for part, linears in _by_part(model).items():
        bits = sorted({linear.spec.bits for linear in linears.values()})
        if len(bits) > 1:
            raise ExportError(
                f"anemll has one LUT size for all linears of {part}, but they have {bits[0]} and "
                f"{bits[-1]} bits; convert the model with one number of bits for them"
            )


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write the state dict, its config.json, and the float model's configuration in `base`."""
    state, common = unquantized_state(model, torch.float32), {}
    for part, linears in _by_part(model).items():
        common[part] = _common(linears)
        for name, linear in linears.items():
            for key, tensor in _tensors(linear, common[part]).items():
                state[f"{name}.{key}"] = tensor
    torch.save(state, directory / STATE_NAME)
    text = json.dumps(_config(model, common), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    (directory / BASE).mkdir()
    write_config(model, tokenizer, directory / BASE, dtype=torch.float32)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the logits of the model that `qat convert --from anemll` reads from the files."""
    read, _ = build_model(read_state(directory / STATE_NAME), plain_config(model))
    return logits_of(read, ids)


def _by_part(model: PreTrainedModel) -> dict[str, dict[str, QuantLinear]]:
    linears = quant_linears(model)
    return {
        part: {name: linear for name, linear in linears.items() if inside in name}
        for part, inside in PARTS.items()
    }


def _common(linears: dict[str, QuantLinear]) -> _Common:
    ranks = (
        m.spec.rank if m.spec.scale == "low_rank" else m.in_features // m.spec.group_size
        for m in linears.values()
    )
    return _Common(
        bits=max((m.spec.bits for m in linears.values()), default=4),
        rank=max(ranks, default=1),
        lora_rank=max((m.lora_rank for m in linears.values()), default=0),
    )


@torch.no_grad()
def _tensors(linear: QuantLinear, common: _Common) -> dict[str, Tensor]:
    """Return the tensors of one linear, padded to the common format.

    Missing ranks are zeros; missing LUT entries repeat the largest level.
    """
    quantized = linear.quantized()
    A, B = _factors(quantized.scales, linear.in_features)
    missing = common.rank - A.shape[1]
    levels = quantized.codebook
    lut = torch.cat([levels, levels[-1:].expand(2**common.bits - levels.numel())])
    indices = quantized.indices.long()
    tensors = {
        "weight": dequantize(quantized),
        "scale_A": pad(A, (0, missing)),
        "scale_B": pad(B, (0, 0, 0, missing)),
        "rank_magnitude": torch.ones(common.rank),
        "lut": lut,
        "_Q": lut[indices],
        "_indices": indices,
        "_scales_baked_flag": torch.tensor(1, dtype=torch.int8),
    }
    lora = linear.lora()
    if lora is not None:
        missing = common.lora_rank - linear.lora_rank
        tensors["lora_A"] = pad(lora.lora_in, (0, 0, 0, missing))
        tensors["lora_B"] = pad(lora.lora_out, (0, missing))
    return tensors


def _factors(scales: Scales, in_features: int) -> tuple[Tensor, Tensor]:
    """Return `A diag(g)` `(O, R)` and `B` `(R, I)`, or group scales `(O, G)` and a group mask."""
    if scales.scales is None:
        return scales.scale_out * scales.rank_gain, scales.scale_in
    G = scales.scales.shape[1]
    return scales.scales, torch.eye(G).repeat_interleave(in_features // G, dim=1)


def _config(model: PreTrainedModel, common: dict[str, _Common]) -> dict[str, object]:
    """Return its `config.json`, with the keys of both of its writers."""
    mlp, attn = common["mlp"], common["attn"]
    lora_rank = max(mlp.lora_rank, attn.lora_rank)
    return {
        "version": "v2",
        "model_id": float_base(model.name_or_path),
        "config_preset": None,
        "lut_bits": mlp.bits,
        "mlp_lut_bits": mlp.bits,
        "attn_lut_bits": attn.bits,
        "scale_rank": mlp.rank,
        "mlp_scale_rank": mlp.rank,
        "attn_scale_rank": attn.rank,
        "group_size": INIT_GROUP,
        "force_positive_scales": False,
        "magnitude_activation": "identity",
        "lora_r": lora_rank,
        "lora_alpha": lora_rank,
        "lora_mlp_only": lora_rank > 0 and attn.lora_rank == 0,
    }
