"""Packed checkpoints: Hugging Face directories with bit-packed linears (checkpoints/README.md)."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from qat.errors import CheckpointError, ConfigError
from qat.files import lies_inside
from qat.hub.files import REPOSITORY
from qat.models.attention import attends_sparsely, kv_spec
from qat.models.directory import GGUF, atomic_directory, save_tokenizer, write_checksums
from qat.models.hf_quantizer import NEEDS_QAT, QUANT_METHOD, QatConfig, QatHfQuantizer
from qat.models.opening import Opening, auto_class, read_config, read_table
from qat.models.rotary import with_older_names
from qat.models.stored_state import (
    packed_state_dict,
    quantized_modules,
    state_as_read,
    stored_dtype,
)
from qat.nn.sites import close_sites

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of image, video and audio processors."""


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    out: Path,
    *,
    replace: bool = False,
) -> None:
    """Write `model` as a packed checkpoint to `out`, atomically.

    Raises:
        ConfigError: `out` is not empty; with `replace`, it is not a packed checkpoint either.
        CheckpointError: it cannot be written, or a scale is not finite as stored.
    """
    if replace and out.is_dir() and any(out.iterdir()) and not is_packed(out):
        raise ConfigError(
            f"out={out} holds something that is not a packed checkpoint, so it is not replaced; "
            "remove it or choose another --out"
        )
    with atomic_directory(out, replace=replace) as partial:
        write_checkpoint(model, tokenizer, partial)


def write_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    packed: dict[str, Tensor] | None = None,
) -> None:
    """Write the files of a packed checkpoint into the existing `directory`.

    For callers that write more files with them inside one `atomic_directory`.

    Args:
        packed: the result of `packed_state_dict`, to be written instead of the model's current
            state: then no weight is read here, and another thread may continue training.

    Raises:
        CheckpointError: nothing of the model is quantized or sparse, or a scale is not finite as
            stored.
    """
    packed = packed_state_dict(model) if packed is None else packed
    model.hf_quantizer = QatHfQuantizer(QatConfig.of(model))
    model.hf_quantizer.packed = packed
    try:
        with quiet_transformers():
            # use the names of the model's own modules, which loading looks for
            model.save_pretrained(directory, save_original_format=False)
    finally:
        model.hf_quantizer.packed = None
    copy_processors(model, directory)
    dtype = stored_dtype(packed)
    finish_config(directory, model, dtype=dtype, transformers_weights=NEEDS_QAT)
    _finish(directory, tokenizer)


def write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write a packed checkpoint, or an ordinary directory if nothing of `model` needs `qat`.

    Raises:
        CheckpointError: a scale is not finite as stored.
    """
    if quantized_modules(model) or attends_sparsely(model) or kv_spec(model.config):
        write_checkpoint(model, tokenizer, directory)
        return
    close_sites(model)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    state = packed_state_dict(model)
    with quiet_transformers():
        model.save_pretrained(directory, state_dict=state)
    copy_processors(model, directory)
    finish_config(directory, model, dtype=stored_dtype(state))
    _finish(directory, tokenizer)


def copy_processors(model: PreTrainedModel, directory: Path) -> None:
    """Copy the image, video and audio processor files from the directory that `model` came from.

    They are not used here, but by programs that run the student on more than text.
    """
    source = Path(model.name_or_path)
    source = source.parent if source.suffix == GGUF else source
    for name in PROCESSORS:
        if not (source / name).is_file() or (directory / name).exists():
            continue
        if not lies_inside(source / name, source):
            raise CheckpointError(
                f"{source / name} is a link to a file elsewhere, expected a file in the model's "
                "directory; put a copy there or remove the link"
            )
        shutil.copyfile(source / name, directory / name)


def check_written(directory: Path, model: PreTrainedModel) -> None:
    """Open the files just written to `directory` as later commands will, and compare tensors.

    Raises:
        CheckpointError: it does not open, or a tensor is not the one that `model` has.
    """
    what = f"what was written of {type(model).__name__}"
    try:
        with quiet_transformers(), QatHfQuantizer.leaving_as_stored():
            again = auto_class(model.config).from_pretrained(
                directory, dtype="auto", local_files_only=True, trust_remote_code=False
            )
    except (CheckpointError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{what} cannot be opened again ({' '.join(str(error).split())[:300]}), expected the "
            "same model; nothing is kept: choose another model or plan, and report this"
        ) from error
    found = state_as_read(again)
    for name, tensor in packed_state_dict(model).items():
        copy = found.pop(name, None)
        if copy is None or copy.dtype != tensor.dtype or not torch.equal(copy, tensor.cpu()):
            raise CheckpointError(
                f"{what} gives another {name} when it is opened again, expected the same; nothing "
                "is kept: choose another model or plan, and report this"
            )


def finish_config(
    directory: Path, model: PreTrainedModel, *, dtype: torch.dtype, **settings: str
) -> None:
    """Complete the config.json that transformers wrote.

    Adds the dtype of the file, rotary settings as transformers 4 reads them, and `settings`.
    """
    path = directory / "config.json"
    config = with_older_names(model.config, json.loads(path.read_text(encoding="utf-8")))
    # transformers writes the compute dtype, which may be wider than that of the file
    config |= {"dtype": str(dtype).removeprefix("torch."), **settings}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _finish(directory: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is not None:
        save_tokenizer(tokenizer, directory)
    write_checksums(directory)


def load_checkpoint(
    path: Path,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device_map: str | dict | None = None,
) -> PreTrainedModel:
    """Load a packed checkpoint with its quantized linears as `FrozenLutLinear`, in eval mode.

    `dtype` applies to everything but packed indices, codebooks and scales; `auto` takes the saved
    one. Equals `from_pretrained` of transformers, with errors in one line.

    Raises:
        CheckpointError: there is none, or it is damaged, incomplete or of an unknown format.
    """
    _check_packed(path)
    config = read_config(str(path))
    with Opening(path, "a whole packed checkpoint", weights=True), quiet_transformers():
        try:
            return auto_class(config).from_pretrained(
                path,
                dtype=dtype,
                device_map=device_map,
                local_files_only=True,
                trust_remote_code=False,
            )
        except CheckpointError as error:
            named = "" if str(error).startswith(str(path)) else f"{path}: "
            raise CheckpointError(f"{named}{error}") from None


def load_skeleton(path: Path) -> PreTrainedModel:
    """Build the model of a packed checkpoint on the meta device: shapes and formats, no values.

    Raises:
        CheckpointError: there is none, or its config.json is of an unknown format.
    """
    _check_packed(path)
    config = read_config(str(path))
    with Opening(path, "a packed checkpoint"):
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        quantizer = QatHfQuantizer(QatConfig.from_dict(config.quantization_config))
        quantizer.preprocess_model(model)
    return model.eval()


def _check_packed(path: Path) -> None:
    if not is_packed(path):
        raise CheckpointError(
            f"{path} is not a packed checkpoint (no quantization_config of method "
            f"{QUANT_METHOD!r} in its config.json on this disk); {how_to_get(path)}"
        )


def how_to_get(path: Path) -> str:
    """Return what to do about a `path` that is no packed checkpoint here, maybe a hub id."""
    is_here = path.exists()
    return "make one with 'qat convert'" if is_here else f"run: qat hub pull {REPOSITORY}{path}"


def is_packed(path: Path) -> bool:
    """Return whether `path` is a directory whose config.json declares a packed checkpoint.

    Raises:
        CheckpointError: its config.json is no JSON object.
    """
    config = path / "config.json"
    if not config.is_file():
        return False
    quantization = read_table(config).get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and load reports of transformers inside the block.

    Bars would stay on a terminal and break up a log. Instead of a report, `qat.models.load` names
    missing and unexpected tensors in one line.
    """
    shown, begin = hf_logging.is_progress_bar_enabled(), tqdm.__init__
    hf_logging.disable_progress_bar()
    # bars that transformers makes of tqdm itself
    tqdm.__init__ = lambda bar, *args, **given: begin(bar, *args, **{**given, "disable": True})
    try:
        with without_records("transformers.modeling_utils", "LOAD REPORT"):
            yield
    finally:
        tqdm.__init__ = begin
        if shown:
            hf_logging.enable_progress_bar()


@contextmanager
def without_records(logger: str, text: str) -> Iterator[None]:
    """Drop the records of the `logger` that contain `text` in the block."""

    def is_other(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logging.getLogger(logger).addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(is_other)
