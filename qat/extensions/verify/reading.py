"""Readers of the forms in which a model is stored: each gives a `Side`.

Shapes: O rows, I columns, G groups per row.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from qat.backend.device import select
from qat.errors import CheckpointError
from qat.export.dense import dense_state_dict
from qat.export.parts import float_model
from qat.extensions.targets.gguf import gemma_scalar, read_weights
from qat.extensions.verify.facts import Side, Stored, Tokens
from qat.extensions.verify.tensors import FLOAT_BITS
from qat.extensions.verify.tokens import of_gguf, of_tokenizer
from qat.models.checkpoint import is_packed, quiet_transformers
from qat.models.dequantize import method_of
from qat.models.gguf_header import block_size, read_header, read_metadata
from qat.models.gguf_layout import ARCHITECTURES, ROPE_FACTORS, row_order, tensor_names
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.models.opening import Opening, auto_class, read_config, read_table
from qat.models.stored_state import quantized_modules
from qat.nn.swap import is_tied
from qat.quant.weight import decode, unpack

ENDS = "eos_token_id"
MLX = "quantization"
"""The key of config.json by which mlx-lm knows a quantized model."""
SCALE_PLACES = {
    **dict.fromkeys(("Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"), 0),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), 0),
    **dict.fromkeys(("Q3_K", "Q6_K", "TQ1_0", "TQ2_0"), -2),
    "Q2_K": -4,
}
"""Offsets of the float16 scale in the blocks of ggml's types, from the end if negative."""
CODES = ("packed", "weight_packed", "qweight", "weight")
"""Parts of a quantized weight that hold its codes, in checkpoints of this and other programs."""
SCALES = ("scales", "weight_scale", "weight_scale_inv")
"""Parts that hold its scales."""
SCALINGS = ("linear", "yarn")
"""Types of `rope.scaling.type` in GGUF files that mean the same in transformers."""
SCALED_BY = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}
"""Their settings, by the end of the name in GGUF files."""


def open_any(source: str, place: Path, device: str) -> Side:
    """Open what transformers reads, and our own packed checkpoints."""
    opened = load_model(source, device=device, dtype="fp32")
    model, form = opened.model, "packed" if is_packed(place) else None
    form = form or method_of(read_config(str(place))) or "dense"
    tied, weights = is_tied(model), model.state_dict()
    if quantized_modules(model):
        weights = dense_state_dict(model, torch.float32)
    weights = {name: weight.detach().cpu() for name, weight in weights.items()}
    own = {name for name, _ in model.named_parameters()} | {
        f"{name}.weight" for name in quantized_modules(model)
    }
    weights = {name: weight for name, weight in weights.items() if name in own}
    stored = stored_in(place, weights) if place.is_dir() else {}
    tokenizer = load_tokenizer(source)
    ends = [getattr(each, ENDS, None) for each in (model.generation_config, opened.config)]
    return Side(
        source=source,
        form=form,
        config=model.config,
        weights=weights,
        stored=stored,
        tokens=of_tokenizer(tokenizer, ends),
        is_tied=tied,
        model=opened,
        tokenizer=tokenizer,
    )


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of that configuration without values."""
    with torch.device("meta"), quiet_transformers():
        return auto_class(config).from_config(config, dtype=torch.float32)


def with_model(side: Side, device: str) -> Side:
    """Return `side` with the model that its weights make, if none is missing and all are finite."""
    model = skeleton(side.config)
    own = dict(model.named_parameters())
    fits = all(
        name in side.weights
        and side.weights[name].shape == parameter.shape
        and bool(side.weights[name].isfinite().all())
        for name, parameter in own.items()
    )
    if not fits:
        return side
    made = float_model(model, {name: side.weights[name] for name in own}, torch.float32)
    return replace(side, model=LanguageModel(made.to(select(device).device)))


def open_gguf(path: Path) -> Side:
    """Open a GGUF file with the settings that llama.cpp would run it with.

    Raises:
        CheckpointError: it is damaged, or holds a tensor that its architecture has no place for.
    """
    config = _gguf_config(path)
    model = skeleton(config)
    tied, header = is_tied(model), read_header(path)
    if config.model_type in ARCHITECTURES:
        names = tensor_names(model)
        known = {f"{name}.{kind}" for name in names.values() for kind in ("weight", "bias")}
        strange = header.keys() - known - {ROPE_FACTORS}
        if strange:
            raise CheckpointError(
                f"{path} holds {min(strange)}, expected tensors of a {config.model_type} alone; "
                "convert the model to GGUF anew"
            )
        with warnings.catch_warnings():  # a scale of infinity times zero is reported as such
            warnings.simplefilter("ignore", RuntimeWarning)
            weights = read_weights(model, path)
        weights.pop(ROPE_FACTORS, None)
        stored = dict(_stored_in_gguf(path, model, names))
    else:
        weights, stored = load_model(str(path), device="cpu", dtype="fp32").model.state_dict(), {}
    return Side(
        source=str(path),
        form="gguf",
        config=config,
        weights=weights,
        stored=stored,
        tokens=of_gguf(path),
        is_tied=tied,
    )


def _gguf_config(path: Path) -> PreTrainedConfig:
    """Return the configuration of a GGUF file with what llama.cpp knows and transformers ignores.

    That is the scaling of rotary positions, and the scale of a Gemma-3's attention scores.
    """
    config, fields = read_config(str(path)), read_metadata(path)
    if config.model_type == "gemma3_text":
        config.query_pre_attn_scalar = gemma_scalar(config)
    key = next((key for key in fields if key.endswith(".rope.scaling.type")), None)
    kind = fields[key].parts[0].decode() if key else None
    if kind in SCALINGS:
        given = {
            ours: fields[name].parts[0][0]
            for theirs, ours in SCALED_BY.items()
            if (name := f"{key.removesuffix('type')}{theirs}") in fields
        }
        config.rope_parameters = {**config.rope_parameters, "rope_type": kind, **given}
    return config


def _stored_in_gguf(
    path: Path, model: PreTrainedModel, names: dict[str, str]
) -> Iterator[tuple[str, Stored]]:
    written = {theirs: ours for ours, theirs in names.items()}
    for name, tensor in read_header(path).items():
        if name == ROPE_FACTORS:
            continue
        stem, kind = name.rsplit(".", 1)
        # the digit in the name of a type: Q4_1 has 5 bits a weight with its scales
        bits = FLOAT_BITS.get(tensor.type) or int(re.search(r"\d", tensor.type)[0])
        scales, place = None, SCALE_PLACES.get(tensor.type)
        if place is not None:
            weights, octets = block_size(tensor.type)
            blocks = np.fromfile(path, np.uint8, tensor.num_bytes, offset=tensor.place)
            halves = np.ascontiguousarray(blocks.reshape(-1, octets)[:, place:][:, :2])
            scales = torch.from_numpy(halves).view(torch.float16)
            scales = scales.view(tensor.shape[0], tensor.shape[-1] // weights)
            order = row_order(written[stem], model.config)
            scales = scales if order is None else scales[order.argsort()]
        yield f"{written[stem]}.{kind}", Stored(tensor.type, bits, scales)


def directory_tokens(place: Path, config: PreTrainedConfig) -> Tokens | None:
    """Describe the tokenizer of a directory; None if it has none."""
    if not (place / "tokenizer_config.json").is_file():
        return None
    beside = place / "generation_config.json"
    generation = read_table(beside).get(ENDS) if beside.is_file() else None
    return of_tokenizer(load_tokenizer(str(place)), [generation, getattr(config, ENDS, None)])


def open_mlx(place: Path) -> Side:
    """Open a directory of mlx-lm: `W = scale * code + bias` in groups of a row."""
    settings = read_table(place / "config.json")[MLX]
    if not isinstance(settings, dict) or settings.get("mode", "affine") != "affine":
        raise CheckpointError(
            f"{place} is quantized as {settings!r:.80}, expected MLX's affine mode; convert the "
            "model with mlx_lm anew"
        )
    config = read_config(str(place))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    with Opening(place, "a model of MLX", weights=True):
        for file in sorted(place.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - no dictionary
                    stem, _, part = key.rpartition(".")
                    parts[stem][part] = opened.get_tensor(key)
    weights, stored = {}, {}
    for stem, found in parts.items():
        if "scales" in found and "biases" in found:
            own = settings.get(stem)
            form = {**settings, **(own if isinstance(own, dict) else {})}
            weight = _affine(place, stem, found, form)
            weights[f"{stem}.weight"] = weight
            stored[f"{stem}.weight"] = Stored(
                f"affine{form['bits']}", form["bits"], found["scales"]
            )
            found = {"bias": found["bias"]} if "bias" in found else {}
        for part, tensor in found.items():
            weights[f"{stem}.{part}"] = tensor.float()
            stored[f"{stem}.{part}"] = of_float(tensor)
    return Side(
        source=str(place),
        form="mlx",
        config=config,
        weights=weights,
        stored=stored,
        tokens=directory_tokens(place, config),
        is_tied=is_tied(skeleton(config)),
    )


def _affine(place: Path, stem: str, found: dict[str, Tensor], form: dict[str, object]) -> Tensor:
    bits, size, words = form.get("bits"), form.get("group_size"), found["weight"]
    scales, biases = found["scales"].float(), found["biases"].float()
    if not (isinstance(bits, int) and isinstance(size, int)) or (
        32 * words.shape[1] != bits * size * scales.shape[1]
    ):
        raise CheckpointError(
            f"{place}: the parts of {stem} do not fit {bits!r:.20} bits in groups of {size!r:.20}, "
            "expected what its config.json says; copy the model anew"
        )
    codes = unpack(words.view(torch.uint8), bits, scales.shape[1] * size).float()
    grouped = codes.view(*scales.shape, size)
    return (grouped * scales[..., None] + biases[..., None]).flatten(1)


def of_float(tensor: Tensor) -> Stored:
    """Return how a tensor of a file is stored that is no part of a quantized weight."""
    name = str(tensor.dtype).removeprefix("torch.")
    return Stored(name, FLOAT_BITS.get(name, 8))


def stored_in(directory: Path, weights: dict[str, Tensor]) -> dict[str, Stored]:
    """Return how the safetensors files of a directory store `weights`, by the names of these."""
    places: dict[str, dict[str, Path]] = defaultdict(dict)
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - no dictionary
                stem, _, part = key.rpartition(".")
                places[stem][part] = file
    found = {}
    for stem, parts in places.items():
        weight = weights.get(f"{stem}.weight")
        if weight is not None and any(part in parts for part in CODES):
            found[f"{stem}.weight"] = _stored(stem, parts, weight)
    return found


def _stored(stem: str, parts: dict[str, Path], weight: Tensor) -> Stored:
    def read(part: str) -> Tensor:
        with safe_open(parts[part], framework="pt") as opened:
            return opened.get_tensor(f"{stem}.{part}")

    codes = read(next(part for part in CODES if part in parts))
    named = next((part for part in SCALES if part in parts), None)
    if named is None and codes.is_floating_point():
        return of_float(codes)
    bits = 8 * codes.element_size() * codes.numel() / weight.numel()
    scales = None if named is None else read(named)
    if scales is not None and scales.dtype == torch.uint8:
        scales = decode(scales)
    if scales is not None and "qweight" in parts:  # GPTQ and AWQ keep `(G, O)`
        scales = scales.T
    return Stored(f"{bits:.3g} bits", bits, scales)
