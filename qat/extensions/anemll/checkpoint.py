"""`qat convert --from anemll`: converts a checkpoint of the reference system to a packed one.

Facts: Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5. The model's function is kept within
float32 rounding, except for weights of version 1 whose scale it raises to 1e-8: they become zero.
"""

import json
import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers import PreTrainedConfig as Config

from qat.convert.importing import ImportReport
from qat.errors import CheckpointError
from qat.export.model import IMPORT
from qat.extensions.anemll.linear import Imported, import_linear
from qat.extensions.anemll.state import LegacyState, check_finite, read_state, state_file
from qat.files import check_free
from qat.logs import progress
from qat.models.checkpoint import check_written, quiet_transformers, write_checkpoint
from qat.models.cost import linear_bits, whole_model_bits
from qat.models.directory import atomic_directory, resolve
from qat.models.load import load_config, load_tokenizer
from qat.models.sizes import model_bytes
from qat.nn.swap import put_quantized, table_names

logger = logging.getLogger(__name__)

DERIVED = "rotary_emb.inv_freq"
"""Suffix of the key of a tensor that follows from the configuration."""


def import_checkpoint(source: Path, base: str | None, out: Path) -> ImportReport:
    """Convert the checkpoint of the reference system at `source` to a packed one in `out`.

    Args:
        source: a `.pt` file with its `config.json` in the same directory, or that directory.
        base: the float model it was made from, for architecture and tokenizer; None for the
            one that `config.json` names.
        out: the directory to create.

    Raises:
        ConfigError: `out` is not empty.
        CheckpointError: `source` is of neither version, damaged, or not a checkpoint of `base`.
    """
    check_free(out)
    path = state_file(source)
    legacy = read_state(path)
    base, config = _float_model(path, legacy, base)
    model, imported = build_model(legacy, config)
    _add_generation_config(model, base)
    with atomic_directory(out) as partial:
        write_checkpoint(model, _tokenizer(base), partial)
        check_written(partial, model)
        report = ImportReport(
            str(path),
            base,
            legacy.version,
            linears=len(imported),
            formats=dict(Counter(map(_format_of, imported))),
            adapters=sum(linear.lora is not None for linear in imported),
            floored=sum(linear.num_floored for linear in imported),
            bits_per_weight=whole_model_bits(model),
            linear_bits=linear_bits(model),
            megabytes=model_bytes(partial) / 1e6,
        )
        (partial / IMPORT).write_text(json.dumps(asdict(report), indent=1) + "\n")
    return report


def _float_model(path: Path, legacy: LegacyState, base: str | None) -> tuple[str, Config]:
    if base is not None:
        return base, load_config(base)
    named = legacy.settings.model_id
    if named is None:
        raise CheckpointError(
            f"{path} has no config.json beside it that names its model, expected its model_id; "
            "add --base MODEL, the float model that it was made from"
        )
    try:
        return named, load_config(named)
    except CheckpointError as error:
        raise CheckpointError(
            f"the config.json beside {path} names model_id={named[:80]!r}, which cannot be opened "
            f"({str(error)[:200]}); add --base MODEL, the float model that it was made from"
        ) from None


def build_model(legacy: LegacyState, config: Config) -> tuple[PreTrainedModel, list[Imported]]:
    """Build the float32 model with its quantized linears in eval mode, emptying `legacy.linears`.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or cannot be represented.
    """
    config = _untied_if_apart(legacy, config)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    shapes = _check_names(legacy, skeleton)
    check_finite("the state dict", legacy.others)
    imported = {}
    with progress("importing", len(legacy.linears), "linears") as ticker:
        for name in list(legacy.linears):
            parts = legacy.linears.pop(name)
            imported[name] = import_linear(name, parts, legacy, shapes[f"{name}.weight"])
            ticker.advance()
    model = _with_tensors(skeleton, legacy.others, {n: shapes[f"{n}.weight"] for n in imported})
    for name, linear in imported.items():
        put_quantized(model, name, linear.quantized, linear.spec)
        if linear.lora is not None:
            if name in table_names(model):
                raise CheckpointError(
                    f"{name} has a LoRA, expected none on the head, whose table takes no adapter; "
                    "save the checkpoint without it"
                )
            model.get_submodule(name).set_lora(linear.lora)
    return model.eval(), list(imported.values())


def _untied_if_apart(legacy: LegacyState, config: Config) -> Config:
    """Return the configuration in float32, untied if head and embedding differ."""
    config = type(config).from_dict(config.to_dict())
    if hasattr(config, "quantization_config"):
        raise CheckpointError(
            "the model named as its base is quantized itself, expected the float model that the "
            "checkpoint was made from; add --base MODEL with that one"
        )
    config.dtype = torch.float32
    head, embedding = (
        next((t for key, t in legacy.others.items() if key.endswith(end)), None)
        for end in ("lm_head.weight", "embed_tokens.weight")
    )
    are_there = head is not None and embedding is not None
    is_tied = are_there and head.shape == embedding.shape and torch.equal(head, embedding)
    if (are_there and not is_tied) or any(name.endswith("lm_head") for name in legacy.linears):
        config.tie_word_embeddings = False
    return config


def _check_names(legacy: LegacyState, skeleton: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the float model, which the state dict must all have."""
    shapes = {key: tuple(tensor.shape) for key, tensor in skeleton.state_dict().items()}
    modules = dict(skeleton.named_modules())
    for name in legacy.linears:
        if not isinstance(modules.get(name), torch.nn.Linear):
            raise CheckpointError(
                f"the state dict quantizes {name}, but {type(skeleton).__name__} has no linear "
                "layer of that name; expected a checkpoint of that architecture: add --base MODEL"
            )
    given = {f"{name}.weight" for name in legacy.linears} | legacy.others.keys()
    missing = sorted(shapes.keys() - given - set(skeleton.all_tied_weights_keys))
    strays = sorted(k for k in legacy.others.keys() - shapes.keys() if not k.endswith(DERIVED))
    wrong = [
        f"{key} of shape {tuple(t.shape)} instead of {shapes[key]}"
        for key, t in legacy.others.items()
        if key in shapes and tuple(t.shape) != shapes[key]
    ]
    for fault, items in (("misses", missing), ("has an unknown", strays), ("has", wrong)):
        if items:
            more = f" and {len(items) - 1} more" if len(items) > 1 else ""
            raise CheckpointError(
                f"the state dict {fault} {items[0]}{more}, expected the tensors of "
                f"{type(skeleton).__name__} as its configuration describes it; add --base MODEL "
                "with the model it was made from, or copy the file anew"
            )
    return shapes


def _with_tensors(
    skeleton: PreTrainedModel, others: dict[str, Tensor], linears: dict[str, tuple[int, ...]]
) -> PreTrainedModel:
    """Return a float32 model of the tensors `others`; weights of `linears` are placeholders."""
    state = {key: t.float() for key, t in others.items() if not key.endswith(DERIVED)}
    # one zero expanded to the shape: a placeholder that takes no memory
    zero = torch.zeros(())
    state |= {f"{name}.weight": zero.expand(shape) for name, shape in linears.items()}
    with quiet_transformers():
        return type(skeleton).from_pretrained(
            None, config=skeleton.config, state_dict=state, dtype=torch.float32
        )


def _add_generation_config(model: PreTrainedModel, base: str) -> None:
    path = Path(resolve(base))
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            path if path.is_dir() else base, local_files_only=path.is_dir()
        )
    except OSError:
        logger.info("%s has no generation_config.json; the defaults are kept", base)


def _tokenizer(base: str) -> object | None:
    try:
        return load_tokenizer(base)
    except CheckpointError as error:
        logger.warning("no tokenizer was written: %s", error)
        return None


def _format_of(linear: Imported) -> str:
    """Return a format as the report shows it, such as `lut2 r3 s32`."""
    spec = linear.spec
    scale = f"r{spec.rank}" if spec.scale == "low_rank" else f"g{spec.group_size}"
    return f"{spec.codebook}{spec.bits} {scale} s{spec.scale_bits}"
