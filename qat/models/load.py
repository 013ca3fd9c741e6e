"""Loading of models from any source: a directory, a run, a GGUF file, or a hub id."""

import logging
import tempfile
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qat.backend.base import Backend
from qat.backend.device import select
from qat.errors import CheckpointError
from qat.models.attention import SPARSE, attends_sparsely
from qat.models.checkpoint import (
    is_packed,
    load_checkpoint,
    quiet_transformers,
    without_records,
)
from qat.models.dequantize import (
    BY_HAND,
    OWN,
    float_state,
    has_several_schemes,
    method_of,
    patterns_of,
    with_adapter,
)
from qat.models.directory import (
    ADAPTER,
    GGUF,
    adapted,
    needs_no_hub,
    resolve,
)
from qat.models.hf_quantizer import QUANT_METHOD
from qat.models.language_model import LanguageModel
from qat.models.opening import Opening, auto_class, read_config, read_part
from qat.models.split_check import check_layers, check_split
from qat.models.stored_state import packed_state_dict
from qat.models.streamed import ON_DISK, StreamedModel, map_weights
from qat.online import hub_file, snapshot
from qat.patterns import pattern_fault
from qat.process import uncounted

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
"""Bytes hashed at a time, few enough to stay in a core's cache."""
MOST_IDS = 2**24
"""The largest token id that is accepted."""
MOST_WEIGHTS, FEW_WEIGHTS = 8, 2**26
"""Weights per byte that any format can hold, and extra weights that a model may create: its
masks."""


def load_model(
    source: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    folder: Path | None = None,
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load the model `source`, packed or float, on `device` and in eval mode.

    `source` is a model directory, a run directory (its best checkpoint, else its latest), a GGUF
    file or a hub id; `dtype` is `auto`, `fp32`, `bf16` or `fp16`. A local directory makes no
    requests to a hub, unless it holds an adapter for a model there. Code that comes with a model
    runs only with `trust_remote_code`.

    With `folder`, for temporary files, a float model stays in its files, and at most one layer is
    in memory. Models that were quantized by other programs or have an adapter are read whole.

    Raises:
        CheckpointError: there is no such model, or it is damaged, or its head is not supported.
        ConfigError: the device is not there or cannot compute in `dtype`.
    """
    backend = select(device)
    return _open(source, _How(backend, backend.dtype(dtype), None, trust_remote_code, folder))


def load_teacher(
    source: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load a model as `load_model` does, without gradients; `device_map` places its weights.

    `auto` spreads it over all devices, `disk` leaves it in its files.
    """
    backend, folder = select(device), None
    if device_map == "disk":
        folder, device_map = Path(tempfile.gettempdir()), None
    how = _How(backend, backend.dtype(dtype), device_map, trust_remote_code, folder)
    teacher = _open(source, how)
    if folder is not None and not isinstance(teacher, StreamedModel):
        logger.info(
            "%s is in memory whole: it is packed, adapted, or somebody quantized it", source
        )
    check_layers(teacher)
    teacher.model.requires_grad_(False)
    return teacher


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model `source`.

    Raises:
        CheckpointError: there is none, it is damaged, or it brings code and is not trusted.
    """
    source = resolve(source)
    with Opening(source, "a tokenizer"):

        def read(place: str, file: dict[str, str]) -> PreTrainedTokenizerBase:
            return AutoTokenizer.from_pretrained(
                place,
                local_files_only=needs_no_hub(place),
                trust_remote_code=trust_remote_code,
                **file,
            )

        # an adapter may bring its own tokenizer
        has_own = Path(source, "tokenizer_config.json").is_file()
        tokenizer = read(source, {}) if has_own else read_part(source, "tokenizer", read)
    if source.endswith(GGUF):
        from qat.models.gguf_layout import read_digit_rule  # other models need no reader of GGUF

        read_digit_rule(Path(source), tokenizer)
        tokenizer.name_or_path = source
        # a GGUF says nothing of it; the default of some versions warns, and older ones drop spaces
        tokenizer.clean_up_tokenization_spaces = False
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # transformers creates one without words if the files are missing
        raise CheckpointError(
            f"{source} holds no tokenizer, expected tokenizer.json or the like beside the model; "
            "copy the tokenizer's files there"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest > MOST_IDS:  # the tokenizers library allocates a list up to the largest id
        raise CheckpointError(
            f"the tokenizer of {source} has a token of id {largest}, expected at most {MOST_IDS}; "
            "copy its files anew"
        )
    return tokenizer


def load_config(source: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the configuration of the model `source`; no weights are read.

    Raises:
        CheckpointError: there is no such model, or its configuration is damaged.
    """
    return read_config(resolve(source), trust_remote_code=trust_remote_code)


def model_identity(source: str, *, trust_remote_code: bool = False) -> str:
    """Return an identity that changes exactly when the model does: a content hash or a hub commit.

    The hash (xxh3-128, 32 hex digits) covers names and bytes of config.json and the weight files of
    a directory.

    Raises:
        CheckpointError: there is no such model.
    """
    source = resolve(source)
    if not Path(source).exists():
        load_config(source, trust_remote_code=trust_remote_code)
        return hub_file(source, "config.json", local_only=True).parent.name
    digest = xxhash.xxh3_128()
    weights = (*Path(source).glob("*.safetensors"), *Path(source).glob("*.bin"))
    files = [Path(source, "config.json"), *sorted(weights)]
    if Path(source).is_file():
        files = [Path(source)]
    elif base := adapted(source):
        digest.update(model_identity(base, trust_remote_code=trust_remote_code).encode())
        files[0] = Path(source, ADAPTER)
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def state_identity(model: PreTrainedModel) -> str:
    """Return the identity of a model in memory: a hash of what a packed checkpoint would hold."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(packed_state_dict(model).items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class _How(NamedTuple):
    backend: Backend
    dtype: torch.dtype
    device_map: str | None
    trust_remote_code: bool
    folder: Path | None

    def placement(self) -> str | dict[str, torch.device] | None:
        """Return the `device_map` for `from_pretrained`."""
        return self.device_map or self.backend.load_map()


def _open(source: str, how: _How) -> LanguageModel:
    path = resolve(source)
    if path != source:
        logger.info("%s: loading %s", source, path)
    if base := adapted(path):
        if is_packed(Path(base)):
            raise CheckpointError(
                f"{path} is an adapter for {base}, which is a packed checkpoint, expected a float "
                "model; merge the adapter into that one and convert the result"
            )
        model = _load_float(base, how._replace(folder=None))
        with Opening(path, "an adapter of peft", weights=True):
            model = with_adapter(model, Path(path))
        logger.info("%s: merged into the weights of %s", path, base)
    elif is_packed(Path(path)):
        model = load_checkpoint(Path(path), how.dtype, how.placement())
    else:
        model = _load_float(path, how)
    # checked before it moves to a device: some would compile for the check
    language_model = _split(path, model)
    if how.device_map is None and not isinstance(language_model, StreamedModel):
        how.backend.tracing.place(language_model.model, how.backend.device)
    return language_model


def _split(source: str, model: PreTrainedModel | StreamedModel) -> LanguageModel:
    """Split the model into body and head, if it is not yet, and check the split."""
    with Opening(source, "a causal language model"):
        found = model if isinstance(model, StreamedModel) else LanguageModel(model.eval())
        model = found.model
        try:
            check_split(found)
        except CheckpointError:
            raise
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # the error may be ours or the model's: run it in the plain way, whose error is clearer
            model.set_attn_implementation("eager")
            model(input_ids=torch.zeros(1, 4, dtype=torch.long, device=model.device))
            raise
    return found


def _by_hand(source: str, config: PreTrainedConfig, how: _How) -> tuple[type, None, dict[str, Any]]:
    """Prepare a checkpoint that transformers does not dequantize, or not correctly.

    Returns the model's own class, None for its path, and a state of floats as arguments.
    """
    method = method_of(config)
    if method in BY_HAND:
        directory = Path(source)
        if not directory.is_dir():
            directory = snapshot(source, local_only=needs_no_hub(source))
        state = float_state(directory, config.quantization_config)
    else:
        packed, info = auto_class(config).from_pretrained(
            source,
            dtype=how.dtype,
            local_files_only=needs_no_hub(source),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        _check_whole(source, packed, info, is_quantized=True)
        packed.hf_quantizer.compressor.decompress_model(packed)
        state = packed.state_dict()
    del config.quantization_config
    with torch.device("meta"):
        made = auto_class(config).from_config(config)
    own = made.state_dict().keys()
    if method in BY_HAND:  # quantizers write zero biases even if a model has none
        is_zero = {n: n.endswith(".bias") and not t.any() for n, t in state.items()}
        state = {name: t for name, t in state.items() if name in own or not is_zero[name]}
    else:  # drop the parts of packed weights, which were checked above
        state = {name: state[name] for name in own if name in state}
    return type(made), None, {"config": config, "state_dict": state}


def _load_float(source: str, how: _How) -> PreTrainedModel | StreamedModel:
    config = read_config(source, trust_remote_code=how.trust_remote_code)
    method = None if source.endswith(GGUF) else method_of(config)
    if how.folder is not None and method is None and not source.endswith(GGUF):
        return _load_streamed(source, config, how)
    _check_bounds(source, config, trust_remote_code=how.trust_remote_code)
    opening = Opening(source, "a causal language model", weights=True)
    with opening, quiet_transformers(), warnings.catch_warnings():
        # this warning only confirms the settings of `OWN`
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        if source.endswith(GGUF):
            model, info = _from_gguf(source, config, how)
        else:
            model, info = _from_directory(source, config, how)
    if method not in (None, QUANT_METHOD) or source.endswith(GGUF):
        logger.info("%s: its %s weights are read as floats", source, method or "GGUF")
        model.hf_quantizer = None
        for parameter in model.parameters():  # some formats return bfloat16 for any dtype
            if parameter.dtype != torch.float32:  # some must stay float32
                parameter.data = parameter.data.to(how.dtype)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    _check_whole(source, model, info, is_quantized=method is not None)
    return model


def _named(source: str, how: _How) -> dict[str, Any]:
    return {
        "dtype": how.dtype,
        "device_map": how.placement(),
        "local_files_only": needs_no_hub(source),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # reported by `_check_whole`
    }


def _from_directory(
    source: str, config: PreTrainedConfig, how: _How
) -> tuple[PreTrainedModel, dict[str, Any]]:
    method, named = method_of(config), _named(source, how)
    if method in BY_HAND or has_several_schemes(config):
        opener, place, more = _by_hand(source, config, how)
        return opener.from_pretrained(place, **named, **more)
    if method in OWN:
        named["quantization_config"] = OWN[method]()
    elif method not in (None, QUANT_METHOD):
        raise CheckpointError(
            f"{source} holds weights quantized by {method:.40}, expected floats or weights "
            f"of {', '.join((*OWN, *BY_HAND))}; start from the float model"
        )
    return auto_class(config).from_pretrained(
        source, **named, trust_remote_code=how.trust_remote_code
    )


def _from_gguf(
    source: str, config: PreTrainedConfig, how: _How
) -> tuple[PreTrainedModel, dict[str, Any]]:
    from qat.models.gguf_cache import Weights, as_floats, opened  # for GGUF files alone

    def read(
        place: str, file: dict[str, str], **other: object
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        named = _named(source, how) | file | (as_floats() if file else {}) | other
        model, info = auto_class(config).from_pretrained(place, config=deepcopy(config), **named)
        for parameter in model.parameters() if not file else ():
            if parameter.device.type == "cpu":  # a view of the file, which may be removed
                parameter.data = parameter.data.clone()
        return model, info

    def read_whole(place: str, file: dict[str, str], *, dtype: torch.dtype) -> PreTrainedModel:
        model, info = read(place, file, device_map=None, dtype=dtype)
        _check_whole(source, model, info, is_quantized=False)
        return model

    model, info = opened(source, Weights(how.dtype, read_whole), read)
    model.name_or_path = model.config._name_or_path = source
    return model, info


def _check_bounds(source: str, config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Refuse a configuration with far more weights than the files hold, or with slow patterns."""
    with Opening(source, "a causal language model"), torch.device("meta"), quiet_transformers():
        made = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    place = Path(source)
    if place.exists():
        files = [path for kind in ("safetensors", "bin") for path in place.glob(f"*.{kind}")]
        files = [place] if place.is_file() else files
        held = sum(path.stat().st_size for path in files)
        wanted = sum(each.numel() for each in (*made.parameters(), *made.buffers()))
        if wanted > MOST_WEIGHTS * held + FEW_WEIGHTS:
            raise CheckpointError(
                f"{source} describes {wanted:,} weights and holds {held:,} bytes, expected files "
                "of the model that its configuration describes; copy or download it anew"
            )
    settings = getattr(config, "quantization_config", None)
    texts = patterns_of(settings) if isinstance(settings, dict) else []
    if fault := pattern_fault(texts, [name for name, _ in made.named_modules()]):
        raise CheckpointError(
            f"the quantization_config of {source} holds {fault}, expected names of modules; start "
            "from the float model"
        )


def _load_streamed(source: str, config: PreTrainedConfig, how: _How) -> StreamedModel:
    _check_bounds(source, config, trust_remote_code=how.trust_remote_code)
    opening = Opening(source, "a causal language model", weights=True)
    folder = tempfile.TemporaryDirectory(dir=how.folder)
    named = _named(source, how) | {"device_map": ON_DISK, "offload_folder": folder.name}
    with opening, quiet_transformers():
        quiet = without_records("accelerate.big_modeling", "offloaded to the disk")
        with quiet, uncounted(), folder:  # maps outlive the folder
            model, info = auto_class(config).from_pretrained(
                source, **named, trust_remote_code=how.trust_remote_code
            )
            _check_whole(source, model, info, is_quantized=False)
            map_weights(model)
        return StreamedModel(model.eval(), how.backend.device, how.dtype, how.folder)


def _check_whole(
    source: str, model: PreTrainedModel, info: dict[str, Any], *, is_quantized: bool
) -> None:
    """Check that every tensor of `model` came from its files, and that none of a layer was ignored.

    transformers initializes tensors at random that a file lacks or has in another shape, and
    ignores tensors that the configuration has no place for. Tied weights are not affected.
    """
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{source} misses {len(missing)} tensors (such as {missing[0]}), expected a whole "
            "model; copy or download it anew"
        )
    if info["mismatched_keys"]:
        name, found, expected = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(
            f"{source} holds {len(info['mismatched_keys'])} tensors of other shapes than its "
            f"config.json says (such as {name} of {tuple(found)}), expected {tuple(expected)}; "
            "copy or download it anew"
        )
    left = sorted(info["unexpected_keys"])
    lost = [name for name in left if _has_a_place(name, model, is_quantized=is_quantized)]
    if lost:
        raise CheckpointError(
            f"{source} holds {len(lost)} tensors of its layers (such as {lost[0]}) that its "
            "config.json has no place for, expected the configuration of these weights; copy or "
            "download it anew"
        )
    if left:
        logger.warning(
            "%s holds %d tensors that %s does not use (such as %s)",
            source,
            len(left),
            type(model).__name__,
            left[0],
        )
    if attends_sparsely(model):
        raise CheckpointError(
            f"{source} holds a dense model, but its config.json defines sparse attention under "
            f"{SPARSE!r}; remove that key, and swap with 'qat convert --attention'"
        )


def _has_a_place(name: str, model: PreTrainedModel, *, is_quantized: bool) -> bool:
    """Return whether an ignored tensor belongs to a layer that `model` should have.

    That is one more layer of a list, or a tensor of a module that is there and holds no others:
    what older releases of transformers saved of masks lies in the modules around these, or is a
    buffer still (GPT-Neo). The modules of a quantized checkpoint also have scales, which floats do
    not need.
    """
    *path, own = name.split(".")
    module: nn.Module | None = model
    for part in path:
        inner = dict(module.named_children()).get(part)
        if inner is None:
            return isinstance(module, nn.ModuleList)
        module = inner
    holds_others = any(True for _ in module.children())
    return not is_quantized and not holds_others and own not in dict(module.named_buffers())
