"""Opens whatever a user may call a model: a directory, a run, or a hub id."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qat.backend.device import Backend, select
from qat.errors import CheckpointError
from qat.models.checkpoint import is_packed, load_checkpoint, quiet_transformers
from qat.models.checksums import check_checksums
from qat.models.language_model import LanguageModel
from qat.models.nsa_swap import KEY, nsa_config
from qat.models.source import is_kept_here, resolve
from qat.models.stored_state import packed_state_dict

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**24
OF_DAMAGE = (KeyError, TypeError, AttributeError, IndexError)
"""What transformers raises, beside errors of its own, over a file whose JSON is another."""


def load_model(
    source: str, *, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> LanguageModel:
    """The model that `source` names, packed or float, on `device` and in eval mode.

    `source` is a model directory, a run directory (its best checkpoint, else its latest) or a hub
    id; `dtype` is `auto`, `fp32`, `bf16` or `fp16`. A local directory never asks a hub. Code that
    comes with a model runs only with `trust_remote_code`.

    Raises:
        CheckpointError: there is no such model, or it is damaged, or its head is not understood.
        ConfigError: the device is not there or cannot compute in `dtype`.
    """
    backend = select(device)
    how = _How(backend, backend.dtype(dtype), None, trust_remote_code)
    return _open(source, how)


def load_teacher(
    source: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModel:
    """As `load_model`, without gradients; `device_map` (`auto`) spreads it over all devices."""
    backend = select(device)
    teacher = _open(source, _How(backend, backend.dtype(dtype), device_map, trust_remote_code))
    teacher.model.requires_grad_(False)
    return teacher


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model that `source` names.

    Raises:
        CheckpointError: there is none, it is damaged, or it brings code and is not trusted.
    """
    source = resolve(source)
    check_checksums(Path(source), of_model=False)
    with _hub_errors_as_one_line(source, "a tokenizer"):
        tokenizer = _tokenizer(source, trust_remote_code)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # transformers makes one without words where the files are missing
        raise CheckpointError(
            f"{source} holds no tokenizer, expected tokenizer.json or the like beside the model; "
            "copy the tokenizer's files there"
        )
    return tokenizer


def load_config(source: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the model that `source` names; no weights are read.

    Raises:
        CheckpointError: there is no such model.
    """
    source = resolve(source)
    with _hub_errors_as_one_line(source, "a model's configuration"):
        return AutoConfig.from_pretrained(
            source,
            local_files_only=is_kept_here(source),
            trust_remote_code=trust_remote_code,
        )


def model_identity(source: str, *, trust_remote_code: bool = False) -> str:
    """What changes exactly when the model does: a content hash, or a hub id's commit.

    The hash (xxh3-128, 32 hex digits) covers names and bytes of config.json and the weight
    files of a directory.

    Raises:
        CheckpointError: there is no such model.
    """
    source = resolve(source)
    if not Path(source).is_dir():
        commit = load_config(source, trust_remote_code=trust_remote_code)._commit_hash
        if commit is None:
            raise CheckpointError(
                f"{source}: the hub does not say which revision it gave; download the model and "
                "name its directory"
            )
        return commit
    digest = xxhash.xxh3_128()
    weights = (*Path(source).glob("*.safetensors"), *Path(source).glob("*.bin"))
    for path in [Path(source, "config.json"), *sorted(weights)]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def state_identity(model: PreTrainedModel) -> str:
    """As `model_identity`, of a model in memory: over what a packed checkpoint would hold."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(packed_state_dict(model).items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class _How(NamedTuple):
    """How a model is to be loaded."""

    backend: Backend
    dtype: torch.dtype
    device_map: str | None
    trust_remote_code: bool

    def placement(self) -> str | dict[str, torch.device] | None:
        """What `from_pretrained` is told of devices."""
        return self.device_map or self.backend.load_map()


def _open(source: str, how: _How) -> LanguageModel:
    path = resolve(source)
    if path != source:
        logger.info("%s: loading %s", source, path)
    if is_packed(Path(path)):
        model = load_checkpoint(Path(path), how.dtype, how.placement())
    else:
        model = _load_float(path, how)
    language_model = LanguageModel(model.eval())
    language_model.check_split()  # where it was read: on another device it would be compiled
    if how.device_map is None:
        how.backend.place(model)
    return language_model


def _load_float(source: str, how: _How) -> PreTrainedModel:
    with _hub_errors_as_one_line(source, "a causal language model"), quiet_transformers():
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=how.dtype,
            device_map=how.placement(),
            local_files_only=is_kept_here(source),
            output_loading_info=True,
            trust_remote_code=how.trust_remote_code,
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{source} misses {len(missing)} tensors (such as {missing[0]}), expected a whole "
            "model; copy or download it anew"
        )
    if nsa_config(model) is not None:
        raise CheckpointError(
            f"{source} holds a dense model, but its config.json defines sparse attention under "
            f"{KEY!r}; remove that key, and swap with 'qat convert --attention'"
        )
    return model


def _tokenizer(source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            source,
            local_files_only=is_kept_here(source),
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # noqa: BLE001 - tokenizers knows no other kind
        if type(error) is not Exception:
            raise
        raise ValueError(error) from error


@contextmanager
def _hub_errors_as_one_line(source: str, wished: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, *OF_DAMAGE) as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{source} brings code of its own, expected {wished} that transformers knows; read "
                "that code, and if you trust it add --trust-remote-code (qat cache, convert, train)"
            ) from None
        raise CheckpointError(
            f"{source} does not give {wished} ({_short(error)}); expected a model directory, a run "
            "directory or a hub id: check the name, or copy the files anew"
        ) from error


def _short(error: Exception) -> str:
    """What went wrong, in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
