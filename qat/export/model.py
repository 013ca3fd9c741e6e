"""Export of a model to a deployable form, which must give equal logits when it is read back."""

import logging
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from qat.backend.base import DTYPES
from qat.convert.config import REPORT_NAME
from qat.errors import CheckpointError, ExportError
from qat.export.config import ExportConfig, TargetName
from qat.export.dense import dense_state_dict
from qat.export.parts import (
    DtypeError,
    align,
    float_model,
    logits_of,
    probe_ids,
    quantize_inputs,
)
from qat.export.targets import check_library, check_model, held_as, load_target
from qat.files import check_free, parse_json, parse_toml
from qat.hooks import hooks
from qat.hub.files import WEIGHTS
from qat.logs import FACTS, RECIPE
from qat.models.attention import kv_spec
from qat.models.checkpoint import how_to_get, is_packed, load_checkpoint, load_skeleton
from qat.models.cost import linear_bits, parameter_count, quantized_parameter_count
from qat.models.directory import GGUF, atomic_directory, resolve
from qat.models.document_attention import set_kv
from qat.models.gguf_layout import gguf_sizes
from qat.models.load import load_tokenizer
from qat.models.noise import disturbed
from qat.models.opening import is_of_files, read_table
from qat.models.sizes import (
    MEGABYTE,
    Sizes,
    linear_bits_in,
    source_megabytes,
    tensor_sizes,
)
from qat.models.stored_state import activation_counts, quantized_modules
from qat.nn.lut_embedding import QuantTable
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import embedding_dtype, put_quantized, table_names, weight_shape
from qat.quant.weight import ternary_levels

logger = logging.getLogger(__name__)

UNREADABLE = (OSError, ValueError, RuntimeError, LookupError, SafetensorError)
"""Errors that libraries raise for files that they cannot read."""
SUM_NOISE = 64 * torch.finfo(torch.float32).eps
"""Relative noise of a layer's output if float32 sums run in another order: models of 2 to 30 layers
differed by up to 8 `eps`."""
ROUNDING_FACTOR = 4
"""Factor on the allowed difference if inputs are rounded to 8 bits. A value next to a rounding
boundary moves by a whole step or not at all, others follow, and that is chance: in 128 rows of 16
tokens a program differed by up to 2.35 times the noise."""
NOISE_DRAWS = 8
"""The number of noise draws in that case: in a small model one draw in three moves no input at
all."""
FALLBACK_DTYPES = {torch.bfloat16: (torch.float16, torch.float32), torch.float16: (torch.float32,)}
"""Dtypes to try, in order, if a target cannot hold a model in the dtype of its checkpoint."""
CARD = "README.md"
IMPORT = "import_report.json"
"""Report of an import of the reference's checkpoint, stored with its tensors."""


class ExportReport(NamedTuple):
    """Facts about the files that were written."""

    dtype: str
    """Dtype of the tensors that are not packed."""
    saved_dtype: str
    """Dtype of the checkpoint."""
    bytes: int
    """Size of all files that hold weights."""
    bits_per_weight: float
    """Bits of these files over all weights: tables, norms, scales and codebooks included."""
    linear_bits: float
    """Bits per weight of the quantized linears alone in these files, by the target's own count for
    programs (in Core ML with 16-bit scales), or in the packed checkpoint without one."""
    source_megabytes: float | None
    """Size of the model that the checkpoint began with, in 10**6 bytes; None if it is not on this
    disk."""
    has_float_tables: bool
    """True if the embedding or the head is in floating point."""
    quantized_weights: int
    """Number of weights in quantized linears."""
    logits_max_diff: float
    """The largest difference of a read-back logit from the model's own; 0 means bit-exact."""

    def sizes(self) -> Sizes:
        """Return the sizes of the source and of the export."""
        megabytes = self.bytes / MEGABYTE
        return Sizes(self.source_megabytes, megabytes, self.bits_per_weight, self.linear_bits)


def export_model(
    source: str, config: ExportConfig, out: Path, *, repository: str | None = None
) -> ExportReport:
    """Write the packed checkpoint or run `source` in the form of `config` to `out`, atomically.

    The card says how to load it from `out`, or from `repository` of a hub.

    Raises:
        ConfigError: `out` is not empty.
        CheckpointError: `source` is missing or damaged, or `out` cannot be written.
        ExportError: `source` is not packed, the target would lose something of it or lacks its
            library, a value does not fit into the dtype, or the files read back give other logits.
    """
    check_free(out)
    path = Path(resolve(source))
    if not is_packed(path):
        raise ExportError(
            f"{source} is not a packed checkpoint on this disk, expected one; {how_to_get(path)}"
        )
    skeleton = load_skeleton(path)
    if not quantized_modules(skeleton):
        raise ExportError(
            f"{source} holds no quantized weight, expected some; quantize it with 'qat convert "
            "--to', or make it an ordinary directory with 'qat convert --attention dense'"
        )
    check_model(config.to, skeleton)  # a library is of no use to a student that does not fit
    check_library(config.to)
    model = _load(config.to, path, DTYPES.get(config.dtype, "auto"))
    saved, kv = embedding_dtype(skeleton), kv_spec(skeleton.config)
    if kv is not None and config.to != "packed":
        logger.warning(
            "%s holds no format of keys and values, which this model was trained to have in %d "
            "bits: ask the program that runs it for a cache of so many",
            config.to,
            kv.bits,
        )
    others = FALLBACK_DTYPES.get(saved, ()) if config.dtype == "auto" else ()
    for dtype in (*others, None):
        try:
            report = _write(config.to, model, path, out, saved=saved, repository=repository)
            break
        except DtypeError as error:
            if dtype is None:
                raise
            why = str(error).split(", expected")[0].split("; ")[0]
            logger.info("not in %s: %s; trying %s", embedding_dtype(model), why, dtype)
            model = _load(config.to, path, dtype)
    difference = report.logits_max_diff
    equal = f"the same within {difference:.2g}" if difference else "equal to the bit"
    logger.info("%s: read back, its logits are %s", out, equal)
    return report


def weight_bytes(directory: Path) -> int:
    """Return the size of all files in an exported directory that hold weights, no tokenizers."""
    files = [p for p in directory.rglob("*") if p.suffix in WEIGHTS and "tokenizer" not in p.name]
    return sum(p.stat().st_size for p in files)


def _load(name: TargetName, path: Path, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """Load the model at `path` for that target: only packed keeps the format of keys and values."""
    model, target = load_checkpoint(path, dtype), load_target(name)
    for place, module in quantized_modules(model).items():
        spec = held_as(target, module)
        if spec != module.spec:
            put_quantized(model, place, ternary_levels(module.quantized()), spec)
            model.get_submodule(place).activation = module.activation
    if name != "packed" and kv_spec(model.config) is not None:
        set_kv(model, None)
    return model


def _write(
    name: TargetName,
    model: PreTrainedModel,
    source: Path,
    out: Path,
    *,
    saved: torch.dtype,
    repository: str | None,
) -> ExportReport:
    has_tokenizer = (source / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(source)) if has_tokenizer else None
    with atomic_directory(out) as partial:
        load_target(name).write(model, tokenizer, partial)
        size = weight_bytes(partial)
        dtype = str(embedding_dtype(model)).removeprefix("torch.")
        if (partial / "config.json").is_file():
            dtype = read_table(partial / "config.json").get("dtype", dtype)
        gguf = next(partial.glob(f"*{GGUF}"), None)
        sizes = tensor_sizes(partial) if gguf is None else gguf_sizes(gguf, model)
        is_dense, dense_bits = name == "dense", 8.0 * embedding_dtype(model).itemsize
        otherwise = dense_bits if is_dense else _linear_bits_of(name, model)
        tables, base = map(model.get_submodule, table_names(model)), float_base(source)
        report = ExportReport(
            dtype=dtype,
            saved_dtype=str(saved).removeprefix("torch."),
            bytes=size,
            # the tokenizer inside a GGUF file is no weight
            bits_per_weight=8 * (sum(sizes.values()) if gguf else size) / parameter_count(model),
            linear_bits=linear_bits_in(sizes, model, otherwise=otherwise),
            source_megabytes=None if base == str(source) else source_megabytes(base),
            has_float_tables=not all(isinstance(table, QuantTable) for table in tables),
            quantized_weights=quantized_parameter_count(model),
            logits_max_diff=check_equal(name, model, partial),
        )
        if card := hooks("qat.publish").get("card"):
            text = card.load()(
                model,
                name,
                report.sizes(),
                dtype=report.dtype,
                difference=report.logits_max_diff,
                source=source,
                name=out.name,
                repository=repository,
            )
            (partial / CARD).write_text(text, encoding="utf-8")
    return report


def _linear_bits_of(name: TargetName, model: PreTrainedModel) -> float:
    """Return the bits per weight of the linears in files that do not tell their tensors apart.

    As in the packed checkpoint for a target that does not count them.
    """
    count = getattr(load_target(name), "file_bits", None)
    weights = quantized_parameter_count(model)
    if count is None or weights == 0:
        return linear_bits(model)
    return sum(count(m.spec, weight_shape(m)) for m in quant_linears(model).values()) / weights


def check_equal(name: TargetName, model: PreTrainedModel, directory: Path) -> float:
    """Read the export in `directory` and compare its logits on a few tokens with those of `model`.

    Targets whose sums run in another order are compared in float32. The allowed difference depends
    on the model, because rounding grows in deep models with large values in a few channels; so it
    is measured.

    Returns:
        The largest difference.

    Raises:
        ExportError: it does not load, or a logit differs by more than rounding explains.
    """
    target, ids = load_target(name), probe_ids(model)
    plain, dtype = model, embedding_dtype(model)
    if target.COMPARED != "bits":
        dtype = dtype if target.COMPARED == "constants" else torch.float32
        plain = float_model(model, dense_state_dict(model, dtype), torch.float32)
        quantize_inputs(plain, model)
    try:
        found = target.read_logits(plain if target.COMPARED == "bits32" else model, directory, ids)
    except Exception as error:
        if not (isinstance(error, UNREADABLE) or is_of_files(error, error.__traceback__)):
            raise
        why = " ".join(str(error).split())[:200]
        raise ExportError(
            f"what was written of {type(model).__name__} cannot be read back ({why}), expected a "
            "model that this format's programs know; export --to dense"
        ) from error
    align(plain)
    expected, allowed = logits_of(plain, ids), 0.0
    if target.COMPARED in ("sums", "constants"):
        allowed = _noise(
            plain, ids, max(SUM_NOISE, torch.finfo(dtype).eps), bool(activation_counts(model))
        )
    difference = _largest_difference(found, expected)
    if not difference <= allowed:  # NaN fails too
        wished = f"within {allowed:.3g}" if allowed else "to the bit"
        raise ExportError(
            f"what was written gives other logits (by up to {difference:.3g}), expected the same "
            f"{wished}; report this, and meanwhile export --to dense"
        )
    return difference


def _noise(model: PreTrainedModel, ids: Tensor, eps: float, is_rounded: bool) -> float:
    """Measure how far a correct program's logits may differ: disturb each value by relative `eps`.

    `is_rounded`: the program rounds the inputs of its linears.
    """
    expected, most = logits_of(model, ids), 0.0
    for seed in range(NOISE_DRAWS if is_rounded else 1):
        with disturbed(model, eps, every_product=is_rounded, seed=seed):
            most = max(most, _largest_difference(logits_of(model, ids), expected))
    return most * (ROUNDING_FACTOR if is_rounded else 1)


def _largest_difference(found: Tensor, expected: Tensor) -> float:
    return (found.float() - expected.float()).abs().max().item()


def damaged(checkpoint: str | Path, error: Exception) -> CheckpointError:
    """Return the error about a file that the run or the conversion of `checkpoint` wrote."""
    return CheckpointError(
        f"{checkpoint}: what its run or its conversion wrote is damaged ({error}), expected JSON; "
        "restore it, or copy the checkpoint to a directory of its own"
    )


def float_base(checkpoint: str | Path) -> str:
    """Return the model that `checkpoint` began with, as far back as reports lead; else itself.

    Raises:
        CheckpointError: one of these reports is damaged.
    """
    found, seen = str(checkpoint), set()
    while found not in seen:
        seen.add(found)
        try:
            found = _made_from(Path(found)) or found
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(found, error) from None
    return found


def _made_from(checkpoint: Path) -> str | None:
    """Return the source that a checkpoint or a run records; None without a record."""
    if not checkpoint.is_dir():  # a hub id, or a deleted directory
        return None
    place = checkpoint.resolve()
    for run in (place, place.parent, place.parent.parent):
        if (run / RECIPE).is_file() and (run / FACTS).is_file():
            values = parse_toml((run / RECIPE).read_text(encoding="utf-8"))
            return str(values["train"]["student"])
    for name, key in ((IMPORT, "base"), (REPORT_NAME, "source")):
        if (checkpoint / name).is_file():
            return str(parse_json((checkpoint / name).read_text(encoding="utf-8"))[key])
    return None
