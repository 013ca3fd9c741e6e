"""`qat export`: write a deployable form, read it back, and believe only equal logits."""

import json
import logging
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from qat.backend import DTYPES
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.dense import write_dense
from qat.models.checkpoint import (
    is_packed,
    load_checkpoint,
    quiet_transformers,
    write_checkpoint,
)
from qat.models.count import model_bits_per_weight, model_bytes, quantized_parameter_count
from qat.models.directory import atomic_directory, check_free
from qat.models.load import load_tokenizer, resolve
from qat.models.tables import embedding_dtype

logger = logging.getLogger(__name__)

NUM_PROBE_TOKENS = 16


class ExportReport(NamedTuple):
    """What was written."""

    dtype: str
    """Of what is not packed."""
    bytes: int
    """Of all safetensors files."""
    bits_per_weight: float
    """Of the linears that were quantized, including scales and codebooks."""
    quantized_weights: int
    """How many weights those hold."""


def export_model(source: str, config: ExportConfig, out: Path) -> ExportReport:
    """Write the packed checkpoint or run `source` in the wished form at `out`, whole or not at all.

    Raises:
        ConfigError: `out` is not empty.
        CheckpointError: `source` is missing or damaged, or `out` cannot be written.
        ExportError: `source` is not packed, a value does not fit into the dtype, or the written
            model does not give the same logits.
    """
    check_free(out)
    path = Path(resolve(source))
    if not is_packed(path):
        raise ExportError(
            f"{source} is not a packed checkpoint on this disk, expected one; make one with "
            "'qat convert'"
        )
    model = load_checkpoint(path, DTYPES.get(config.dtype, "auto"))
    tokenizer = load_tokenizer(str(path)) if (path / "tokenizer_config.json").is_file() else None
    with atomic_directory(out) as partial:
        _write(model, tokenizer, partial, config)
        check_equal(model, partial)
        report = _report(model, partial, config)
    logger.info("%s: read back, its logits are equal to the bit", out)
    return report


def check_equal(model: PreTrainedModel, directory: Path) -> None:
    """Load what was written to `directory` and compare its logits on a few tokens with `model`'s.

    Raises:
        ExportError: it does not load, or a logit differs in any bit.
    """
    try:
        with quiet_transformers():
            reloaded = AutoModelForCausalLM.from_pretrained(
                directory, dtype=embedding_dtype(model), local_files_only=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ExportError(f"what was written cannot be read back ({error}); report this") from error
    found, expected = _probe(reloaded), _probe(model)
    if not torch.equal(found, expected):
        difference = (found.float() - expected.float()).abs().max().item()
        raise ExportError(
            f"what was written gives other logits (by up to {difference:.3g}), expected the same "
            "to the bit; export with --dtype fp32, or report this"
        )


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Tensor:
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(NUM_PROBE_TOKENS)[None] * (vocab_size // NUM_PROBE_TOKENS) % vocab_size
    return model(input_ids=ids, use_cache=False).logits


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    config: ExportConfig,
) -> None:
    if config.to == "dense":
        write_dense(model, tokenizer, directory, embedding_dtype(model))
    else:
        write_checkpoint(model, tokenizer, directory)


def _report(model: PreTrainedModel, directory: Path, config: ExportConfig) -> ExportReport:
    is_dense = config.to == "dense"
    dense_bits = 8.0 * embedding_dtype(model).itemsize
    return ExportReport(
        dtype=json.loads((directory / "config.json").read_text(encoding="utf-8"))["dtype"],
        bytes=model_bytes(directory),
        bits_per_weight=dense_bits if is_dense else model_bits_per_weight(model),
        quantized_weights=quantized_parameter_count(model),
    )
