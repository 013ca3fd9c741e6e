"""Parts that several targets share: formats they hold, exact integers and scales, their files.

Shapes: O out_features, I in_features, G groups per row.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError
from qat.export.parts import DtypeError, cast, plain_config, without_quantized
from qat.models.rotary import with_older_names
from qat.models.stored_state import narrowed
from qat.nn.quant_weight import QuantWeight
from qat.nn.swap import embedding_dtype
from qat.quant.spec import LutSpec

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
EVEN_GRIDS = ("seq", "int", "ternary")
"""Codebooks of evenly spaced levels."""
DECODERS = ("llama", "qwen2", "qwen3")
"""Model types that can be written as programs."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on the length of the text."""
OF_LEVELS, WITH_GROUPS = "of levels, such as q2a4", "with groups"
OF_TERNARY = "of levels, or drop --for and take --embedding-bits 16: export writes its levels"
"""The advice for vectors of -1, 0 and 1, which an export can write as ternary levels."""


class Affine(NamedTuple):
    """A weight of evenly spaced levels: `W = scale * codes + bias`, with both per group."""

    codes: Tensor
    """`(O, I)` uint8, from 0."""
    scale: Tensor
    """`(O, G)` float64, exact."""
    bias: Tensor
    """`(O, G)` float64, exact."""


def affine(module: QuantWeight) -> Affine:
    """Return the exact affine form of a module with group scales and evenly spaced levels.

    Levels are multiples of a power of two, so float64 holds their products with scales.
    """
    weight = module.quantized()
    scales, levels = weight.scales.scales.double(), weight.codebook.double()
    return Affine(weight.indices, scales * (levels[1] - levels[0]), scales * levels[0])


def exact(name: str, value: Tensor, dtype: torch.dtype, *, has_choice: bool = True) -> Tensor:
    """Return `value` (float64) in `dtype` if that changes nothing.

    Raises:
        ExportError: it changes something; a `DtypeError` if the target `has_choice` of dtypes.
    """
    found = value.to(dtype)
    if torch.equal(found.double(), value):
        return found
    index = (found.double() != value).flatten().nonzero()[0, 0]
    is_dtype = has_choice and dtype != torch.float32
    wider = "export with --dtype fp32, or " if is_dtype else ""
    raise (DtypeError if is_dtype else ExportError)(
        f"{name} holds {value.flatten()[index].item():.9g}, which is no {DTYPE_NAMES[dtype]} "
        f"number, expected values that the files hold exactly; {wider}convert the model with "
        "'qat convert --for', which takes shorter ones"
    )


def plain_decoder(model: PreTrainedModel, program: str) -> None:
    """Refuse a model that is not known to become a `program`, which is named in the message.

    Raises:
        ExportError: another family, rotary positions that depend on the length of the text, another
            activation, or attention that does not see all of the text.
    """
    config = model.config
    if config.model_type not in DECODERS:
        raise ExportError(
            f"model_type={config.model_type} cannot be written as {program}, expected one of "
            f"{', '.join(DECODERS)}; export --to dense and trace it yourself"
        )
    rope = config.rope_parameters.get("rope_type", "default")
    layers = set(getattr(config, "layer_types", None) or ())
    activation = config.hidden_act
    if rope not in ROPES or layers - {"full_attention"} or activation not in ("silu", "swish"):
        raise ExportError(
            f"rope_type={rope}, hidden_act={activation} and layers of "
            f"{', '.join(sorted(layers)) or 'full_attention'} cannot be written as {program}, "
            f"expected one of {', '.join(ROPES)}, then silu and full_attention; export --to dense "
            "and trace it yourself"
        )


def steps(length: int) -> list[range]:
    """Return the positions of each call: half of a row as one prompt, the rest token by token."""
    half = length // 2
    return [range(half), *(range(place, place + 1) for place in range(half, length))]


def lost_by_rank(spec: LutSpec) -> str | None:
    """Return why one scale per group cannot hold that weight; None if it can."""
    if spec.scale != "group":
        return f"its scale is of low rank ({spec.rank}), expected one for each group"
    return None


def lost_by_grid(spec: LutSpec, grids: tuple[str, ...]) -> str | None:
    """Return why integers times group scales cannot hold that weight; None if they can."""
    reason = spec.lost_as_levels or lost_by_rank(spec)
    if reason is None and spec.codebook not in grids:
        reason = f"its codebook is {spec.codebook}, expected {' or '.join(grids)}"
    return reason


def refuse(lost: str | None, plan: str) -> None:
    """Refuse a spec for a reason, if there is one; `plan` says what to name instead."""
    if lost is not None:
        raise ExportError(f"{lost}; name a plan {plan}")


def refuse_all_but_groups(spec: LutSpec) -> None:
    """Refuse a codebook of vectors and a low-rank scale."""
    refuse(spec.lost_as_levels, OF_LEVELS if spec.as_levels is spec else OF_TERNARY)
    refuse(lost_by_rank(spec), WITH_GROUPS)


def refuse_all_but_float32(model: PreTrainedModel, engine: str) -> None:
    """Refuse a dtype in which `engine`, which is named in the message, does not compute."""
    dtype = embedding_dtype(model)
    if dtype != torch.float32:
        raise DtypeError(
            f"{engine} computes in float32, not in {DTYPE_NAMES[dtype]}, expected float32; export "
            "with --dtype fp32"
        )


def even_levels(spec: LutSpec, group_size: int, seq_bits: int = 4) -> LutSpec:
    """Return levels without a zero up to `seq_bits` bits, integers above, with 8-bit scales."""
    is_whole = spec.codebook in ("int", "ternary")
    # with more than 4 bits a zero among the levels costs little, and MLX's bias of an 8-bit scale
    # does not fit into bfloat16
    codebook = spec.codebook if is_whole else "seq" if spec.bits <= seq_bits else "int"
    return LutSpec(bits=spec.bits, codebook=codebook, group_size=group_size, scale_bits=8)


def group_size_near(wished: int, sizes: tuple[int, ...], in_features: int) -> int:
    """Return the divisor of the row among `sizes` that is nearest to `wished`, smaller first.

    Raises:
        ExportError: none divides the row.
    """
    whole = [size for size in sizes if in_features % size == 0]
    if not whole:
        raise ExportError(
            f"its rows of {in_features} do not split into groups of {', '.join(map(str, sizes))}; "
            "leave it in floating point with a rule of its own in a plan"
        )
    return min(whole, key=lambda size: (abs(size - wished), size))


def unquantized_state(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors that are no quantized weight, in `dtype`: norms, biases, float tables.

    A tied head is included once.

    Raises:
        ExportError: a value overflows `dtype`.
    """
    state = without_quantized(model)
    if model.config.get_text_config().tie_word_embeddings:
        for name in model.all_tied_weights_keys:
            state.pop(name, None)
    return {name: cast(name, tensor, dtype).contiguous() for name, tensor in state.items()}


def narrow_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return `unquantized_state` in the model's dtype, or in 16 bits where that is lossless.

    For files in which each tensor has its own dtype.

    Raises:
        ExportError: a value overflows the dtype of the model.
    """
    return narrowed(unquantized_state(model, embedding_dtype(model)))


def float_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of the linears that stay in floating point, including the head.

    Engines refuse a linear that a checkpoint lists neither as quantized nor as ignored.
    """
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def write_tensors(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    *,
    tensors: dict[str, Tensor],
    extra: dict[str, object],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write model.safetensors, config.json with `extra` keys, and the tokenizer."""
    write_config(model, tokenizer, directory, extra=extra)
    metadata = {"format": "pt", **(metadata or {})}
    save_file(tensors, directory / "model.safetensors", metadata=metadata)


def write_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    extra: dict[str, object] | None = None,
) -> None:
    """Write config.json with `extra` keys and without our quantization, and the tokenizer.

    It names `dtype`, by default that of the model.
    """
    config, dtype = plain_config(model), dtype or embedding_dtype(model)
    named = with_older_names(config, config.to_diff_dict())
    values = {**named, "dtype": str(dtype).removeprefix("torch."), **(extra or {})}
    values["architectures"] = [type(model).__name__]
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
