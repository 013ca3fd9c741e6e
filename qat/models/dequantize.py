"""Conversion of checkpoints quantized or adapted by other programs to float weights.

transformers converts some formats itself (`OWN`). It opens GPTQ and AWQ only with kernel libraries,
which need a GPU, so their few lines of arithmetic are here: `w = scale * (q - zero)` per group of
inputs. Adapters are merged by peft.

Shapes: O out_features, I in_features, G groups of inputs.
"""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from qat.errors import CheckpointError, how_to_install
from qat.models.directory import ADAPTER
from qat.models.hf_quantizer import read_headers
from qat.models.opening import read_table
from qat.patterns import pattern_fault
from qat.quant.weight import unpack

OWN: dict[str, Callable[[], Any]] = {
    "mxfp4": lambda: Mxfp4Config(dequantize=True),
    "fp8": lambda: FineGrainedFP8Config(dequantize=True),
    "compressed-tensors": lambda: CompressedTensorsConfig(dequantize=True),
}
"""Settings with which transformers dequantizes, by name of the method."""
BY_HAND = ("gptq", "awq")
"""Methods whose weights are read by `float_state`."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's order of the eight numbers of an int32: number n is in nibble `AWQ_ORDER[n]`."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NO_CHANGE_OF_WEIGHTS = {
    "ADAPTION_PROMPT",
    "CARTRIDGE",
    "CPT",
    "MULTITASK_PROMPT_TUNING",
    "POLY",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "P_TUNING",
    "XLORA",
}
"""Kinds of adapters that cannot be merged; some of them name further models or adapters to open."""
HARMLESS = {"megatron_config": None, "megatron_core": "megatron.core"}
"""Settings of an adapter that name modules to import, and the values that import nothing."""
PACKED = ("qweight", "qzeros", "scales", "g_idx")
WORD = 32
"""Bits of a word of GPTQ or AWQ."""


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the method by which a checkpoint's weights are quantized; None if they are not.

    Raises:
        CheckpointError: its `quantization_config` is no table.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"config.json of {config.name_or_path or 'the model'} has "
            f"quantization_config={settings!r:.40}, expected a table; copy the model anew"
        )
    return str(settings.get("quant_method"))


def has_several_schemes(config: PreTrainedConfig) -> bool:
    """Return whether parts of a compressed-tensors checkpoint are packed in different ways.

    transformers 5.23 reads all of them with the first scheme.
    """
    settings = getattr(config, "quantization_config", None)
    groups = settings.get("config_groups") if isinstance(settings, dict) else None
    return isinstance(groups, dict) and len(groups) > 1


def patterns_of(settings: object) -> list[str]:
    """Return the strings in a `quantization_config` that may be used as regular expressions."""
    if isinstance(settings, str):
        return [settings.removeprefix("re:")] if set(settings) & set("*+?{|") else []
    inner = settings.values() if isinstance(settings, dict) else settings
    return [t for each in inner for t in patterns_of(each)] if isinstance(inner, Iterable) else []


def float_state(directory: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a GPTQ or AWQ checkpoint, with each packed weight as a float16 one.

    Args:
        directory: the directory of its safetensors files.
        settings: its `quantization_config`.

    Raises:
        CheckpointError: a variant of the format is not supported, or a tensor is missing.
    """
    method, bits = settings["quant_method"], settings.get("bits", settings.get("w_bit"))
    is_gemm = str(settings.get("version", "gemm")).lower() == "gemm"
    allowed = {"awq": (4,) if is_gemm else (), "gptq": (2, 3, 4, 8)}[method]
    if type(bits) is not int or bits not in allowed:
        version = settings.get("version", settings.get("checkpoint_format"))
        raise CheckpointError(
            f"{directory} holds {method} weights of {bits!r:.40} bits (version {version!s:.40}), "
            "expected GPTQ of 2, 3, 4 or 8 bits or AWQ of 4 in its gemm order; start from the "
            "float model"
        )
    state: dict[str, Tensor] = {}
    is_mixed = bool(settings.get("dynamic"))  # weights have bits and groups of their own
    group_size = -1 if is_mixed else settings.get("group_size", -1)
    for file in sorted(directory.glob("*.safetensors")):
        state |= load_file(file)
    for key in [key for key in state if key.endswith(".qweight")]:
        name = key.removesuffix(".qweight")
        parts = {part: state.pop(f"{name}.{part}", None) for part in PACKED}
        if parts["qzeros"] is None or parts["scales"] is None:
            raise CheckpointError(
                f"{directory}: {name} lacks its qzeros or scales, expected both beside qweight; "
                "copy the checkpoint anew"
            )
        if is_mixed:
            sizes = [max(1, parts[part].shape[-1:].numel()) for part in ("qzeros", "scales")]
            bits = min(allowed, key=lambda each: abs(each - WORD * sizes[0] / sizes[1]))
        if fault := _part_fault(parts, method, bits, group_size):
            raise CheckpointError(
                f"{directory}: the parts of {name} do not fit each other ({fault}); copy the "
                "checkpoint anew"
            )
        offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        state[f"{name}.weight"] = _weight(parts, method, bits, offset)
    return state


def _part_fault(parts: dict[str, Any], method: str, bits: int, group_size: object) -> str | None:
    """Describe what does not fit among the parts of a packed weight; None if all do."""
    rows, columns = (parts["qweight"].shape + (0, 0))[:2]
    is_awq = method == "awq"
    I, O = (rows, columns * WORD // bits) if is_awq else (rows * WORD // bits, columns)
    G = len(parts["scales"]) if parts["scales"].ndim else 0
    whole, zero_shape = (torch.int32,), (G, O * bits // WORD)
    expected = {
        "qweight": (whole, (rows, columns)),
        "qzeros": (whole, zero_shape),
        "scales": ((torch.float16, torch.bfloat16, torch.float32), (G, O)),
        "g_idx": ((torch.int32, torch.int64), (I,)),
    }
    for name, (dtypes, shape) in expected.items():
        part = parts[name]
        if part is not None and (part.dtype not in dtypes or tuple(part.shape) != shape):
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}"
            return f"{name} is {found}, expected {names} {shape}"
    if not (I and O and G) or O * bits % WORD or rows % (1 if is_awq else bits):
        return f"a weight of {O} x {I} in {G} groups"
    groups = parts["g_idx"]
    if groups is None and I % G:
        return f"{I} inputs in {G} groups, expected groups of one size"
    if groups is not None and not 0 <= groups.min() <= groups.max() < G:
        return f"g_idx names groups {groups.min()} to {groups.max()}, expected 0 to {G - 1}"
    size = group_size if type(group_size) is int and group_size > 0 else I
    if group_size != -1 and -(-I // size) != G:
        return f"group_size={group_size!r:.40} for {I} inputs, expected {G} groups as scales has"
    return None


def _weight(parts: dict[str, Any], method: str, bits: int, offset: int) -> Tensor:
    """Return the `(O, I)` weight whose codes lie in words as `qat.quant.weight.pack` packs them.

    GPTQ packs codes along inputs, so `qweight` is `(I * bits / 32, O)`, and the first version of
    the format stores each zero less one (`offset`). AWQ packs them along outputs, `(I, O / 8)`, in
    an order of its own.
    """
    q, zeros = parts["qweight"], _codes(parts["qzeros"], bits)  # (I, O), (G, O)
    if method == "awq":
        each = (-1, len(AWQ_ORDER))
        q, zeros = (
            t.unflatten(1, each)[..., AWQ_ORDER].flatten(1) for t in (_codes(q, bits), zeros)
        )
    else:
        q, zeros = _codes(q.T, bits).T, zeros + offset
    scales, groups = parts["scales"], parts["g_idx"]
    if groups is None:
        groups = torch.arange(len(q)) // (len(q) // len(scales))
    groups = groups.long()
    return ((q - zeros[groups]).to(scales.dtype) * scales[groups]).T.contiguous()


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes `(R, C * 32 / bits)` of words `(R, C)`."""
    octets = words.contiguous().view(torch.uint8)
    return unpack(octets, bits, words.shape[1] * WORD // bits).int()


def with_adapter(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Return `model` with the peft adapter in `directory` merged into its weights.

    Raises:
        CheckpointError: peft is not installed, or the adapter is for another model or cannot be
            merged.
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError:
        raise CheckpointError(
            f"{directory} holds an adapter of peft, which is not installed; merge the adapter "
            f"yourself, or: {how_to_install('adapters')}"
        ) from None
    weights = directory / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise CheckpointError(
            f"{directory} holds no {ADAPTER_WEIGHTS}, expected the adapter's weights; save it anew "
            "with peft"
        )
    _check_adapter(directory / ADAPTER, model)
    # resized tables are saved whole with an adapter
    own = {f"base_model.model.{name}": tuple(p.shape) for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about missing keys, which are compared below
        adapted = PeftModel.from_pretrained(model, directory, torch_device=str(model.device))
    # compare with what peft would write: tensors may have been ignored or initialized
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    wished = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = {name: shape for name, (shape, _) in read_headers([weights]).items()}
    found = {n: shape for n, shape in found.items() if n in wished or own.get(n) != shape}
    if found != wished:
        names = sorted({*dict(found.items() ^ wished.items())})
        raise CheckpointError(
            f"{weights} and the settings beside it differ in {len(names)} tensors (such as "
            f"{names[0]}), expected weights of exactly the layers that the settings name; it is "
            "damaged, or for another model"
        )
    return adapted.merge_and_unload(safe_merge=True)


def _check_adapter(path: Path, model: PreTrainedModel) -> None:
    """Refuse adapter settings that make peft import a module, open another adapter, or hang.

    Patterns of module names may take practically forever to match.
    """
    settings = read_table(path)
    kind = str(settings.get("peft_type"))
    if kind in NO_CHANGE_OF_WEIGHTS:
        raise CheckpointError(
            f"{path.parent} is an adapter of {kind}, which is no change of weights, expected LoRA "
            "or the like; start from the model without it"
        )
    leading = {
        name: settings[name]
        for name, default in HARMLESS.items()
        if settings.get(name) not in (None, default)
    }
    if leading:
        name, value = next(iter(leading.items()))
        raise CheckpointError(
            f"{path} sets {name}={value!r:.80}, by which peft imports a module that it names, "
            "expected none; remove that key, or merge the adapter where its module is"
        )
    # a list of modules holds names, a string is a pattern; ranks and alphas have patterns as keys
    modules = (settings.get(key) for key in ("target_modules", "exclude_modules"))
    found = [each for each in modules if isinstance(each, str)]
    found += [settings.get("layers_pattern")]
    tables = (settings.get(key) for key in ("rank_pattern", "alpha_pattern"))
    found += [list(each) if isinstance(each, dict) else each for each in tables]
    if fault := pattern_fault(patterns_of(found), [name for name, _ in model.named_modules()]):
        raise CheckpointError(f"{path} holds {fault}, expected names of modules; write them there")
