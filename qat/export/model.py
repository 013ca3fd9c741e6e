"""`qat export`: write a deployable form, read it back, and believe only equal logits."""

import json
import logging
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from qat.backend import DTYPES
from qat.errors import ExportError
from qat.export.config import ExportConfig, TargetName
from qat.export.probe import logits_of, probe_ids
from qat.export.targets import check_model, load_target
from qat.models.checkpoint import is_packed, load_checkpoint
from qat.models.count import model_bits_per_weight, quantized_parameter_count
from qat.models.directory import atomic_directory, check_free
from qat.models.load import load_tokenizer, resolve
from qat.models.tables import embedding_dtype

logger = logging.getLogger(__name__)

SLACK = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far a logit may be off, relative to the largest, where only the order of sums differs."""


class ExportReport(NamedTuple):
    """What was written."""

    dtype: str
    """Of what is not packed."""
    bytes: int
    """Of all files that hold weights."""
    bits_per_weight: float
    """Of the linears that were quantized, including scales and codebooks."""
    quantized_weights: int
    """How many weights those hold."""
    logits_max_diff: float
    """The largest difference of a logit, read back, from the model's own; 0: equal to the bit."""


def export_model(source: str, config: ExportConfig, out: Path) -> ExportReport:
    """Write the packed checkpoint or run `source` in the wished form at `out`, whole or not at all.

    Raises:
        ConfigError: `out` is not empty.
        CheckpointError: `source` is missing or damaged, or `out` cannot be written.
        ExportError: `source` is not packed, the target would lose something of it or lacks its
            library, a value does not fit into the dtype, or what was written gives other logits.
    """
    check_free(out)
    path = Path(resolve(source))
    if not is_packed(path):
        raise ExportError(
            f"{source} is not a packed checkpoint on this disk, expected one; make one with "
            "'qat convert'"
        )
    model = load_checkpoint(path, DTYPES.get(config.dtype, "auto"))
    check_model(config.to, model)
    tokenizer = load_tokenizer(str(path)) if (path / "tokenizer_config.json").is_file() else None
    with atomic_directory(out) as partial:
        load_target(config.to).write(model, tokenizer, partial)
        difference = check_equal(config.to, model, partial)
        report = _report(config.to, model, partial, difference)
    equal = "equal to the bit" if difference == 0 else f"the same within {difference:.2g}"
    logger.info("%s: read back, its logits are %s", out, equal)
    return report


def check_equal(name: TargetName, model: PreTrainedModel, directory: Path) -> float:
    """Read what was written to `directory` and compare its logits on a few tokens with `model`'s.

    Returns:
        The largest difference.

    Raises:
        ExportError: it does not load, or a logit differs by more than the order of sums explains.
    """
    target, ids = load_target(name), probe_ids(model)
    try:
        found = target.read_logits(model, directory, ids)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ExportError(f"what was written cannot be read back ({error}); report this") from error
    expected = logits_of(model, ids)
    if target.IS_BIT_EQUAL and torch.equal(found, expected):
        return 0.0
    difference = (found.float() - expected.float()).abs().max().item()
    allowed = SLACK[embedding_dtype(model)] * max(1.0, expected.abs().max().item())
    if target.IS_BIT_EQUAL or not difference <= allowed:  # NaN is no number to believe
        wished = "to the bit" if target.IS_BIT_EQUAL else f"within {allowed:.3g}"
        raise ExportError(
            f"what was written gives other logits (by up to {difference:.3g}), expected the same "
            f"{wished}; export with --dtype fp32, or report this"
        )
    return difference


def _report(
    name: TargetName, model: PreTrainedModel, directory: Path, difference: float
) -> ExportReport:
    dense_bits = 8.0 * embedding_dtype(model).itemsize
    config = directory / "config.json"
    dtype = str(embedding_dtype(model)).removeprefix("torch.")
    if config.is_file():
        dtype = json.loads(config.read_text(encoding="utf-8")).get("dtype", dtype)
    return ExportReport(
        dtype=dtype,
        bytes=weight_bytes(directory),
        bits_per_weight=dense_bits if name == "dense" else model_bits_per_weight(model),
        quantized_weights=quantized_parameter_count(model),
        logits_max_diff=difference,
    )


def weight_bytes(directory: Path) -> int:
    """Bytes of the files that hold weights."""
    suffixes = {".safetensors", ".gguf", ".bin", ".pt"}
    return sum(p.stat().st_size for p in directory.rglob("*") if p.suffix in suffixes)
