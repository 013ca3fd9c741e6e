"""Weights of a llama.cpp file as they are: the integers and scales of its blocks, not their floats.

Shapes: O rows, I columns, G blocks of a row.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from qat.convert.checkpoint import write_converted
from qat.convert.config import ConvertConfig
from qat.convert.convert import Converted
from qat.convert.quantize import QuantizeReport, quantize_model
from qat.convert.savings import Saving
from qat.convert.stored_tables import Twins, stored_tables
from qat.convert.tables import FLOAT_BITS, round_float_tables
from qat.errors import CheckpointError, ConfigError
from qat.extensions.targets.gguf import SMALL, scheme
from qat.files import check_free
from qat.models.cost import bytes_by_name, format_bits
from qat.models.directory import GGUF, resolve
from qat.models.gguf import dequantize
from qat.models.gguf_header import StoredTensor, block_size, read_header
from qat.models.gguf_layout import ARCHITECTURES, row_order, tensor_names
from qat.models.load import load_model, load_tokenizer
from qat.models.opening import read_config
from qat.nn.swap import FEW_BITS, linear_names, put_quantized, table_names
from qat.quant.codebook import fixed_grid
from qat.quant.spec import LutSpec, PlanRule, QuantPlan
from qat.quant.weight import QuantizedWeight, Scales
from qat.quant.weight import dequantize as form

logger = logging.getLogger(__name__)

LEVELS: dict[str, dict[str, Any]] = {
    "Q1_0": {"bits": 1, "codebook": "seq"},
    "Q2_0": {"bits": 2, "codebook": "ternary"},
    "TQ1_0": {"bits": 2, "codebook": "ternary"},
    "TQ2_0": {"bits": 2, "codebook": "ternary"},
    "Q4_0": {"bits": 4, "codebook": "int"},
    "Q5_0": {"bits": 5, "codebook": "int"},
    "Q8_0": {"bits": 8, "codebook": "int"},
}
"""Levels of the types whose blocks are integers times one float16 scale."""
SCALE_AT_END = ("TQ1_0", "TQ2_0")
"""Types whose blocks end with their scale; the others begin with it."""
FLOATS = ("F32", "F16", "BF16")


def keep_checkpoint(source: str, out: Path, config: ConvertConfig) -> QuantizeReport:
    """Write the GGUF file `source` to `out` as a student with exactly its levels and scales.

    Only `embedding_bits` of `config` is read.

    Raises:
        ConfigError: it is none, or holds a linear of a type without levels.
    """
    check_free(out)
    file = check_file(source)
    student = load_model(source, device="cpu", dtype="fp32")
    plan = keep_weights(file, student.model, config.embedding_bits)
    if config.embedding_bits == FLOAT_BITS:
        round_float_tables(student.model, plan)
    twins = Twins.among(stored_tables(source, student.model))
    saved = list(_savings(file, student.model, plan))
    report = replace(quantize_model(student, plan), savings=saved)
    done = Converted(report, plan, fits=[], rotation=None)
    write_converted(out, done, student, load_tokenizer(source), source=source, config=config)
    if twins is not None:
        sizes = bytes_by_name(student.model).items()
        logger.warning(
            "%s: --keep keeps both, and %s is %.2f MB of the student; --to PLAN instead of --keep "
            "makes one of them",
            twins.words,
            twins.coarse,
            sum(size for name, size in sizes if name.startswith(f"{twins.coarse}.")) / 1e6,
        )
    return report


def check_file(source: str) -> Path:
    """Return the GGUF file `source` after a look at the types of its linears; nothing is read.

    Raises:
        ConfigError: it is none, of another architecture, or has a linear of a type without levels.
    """
    path = Path(resolve(source))
    kind = read_config(str(path)).model_type
    if path.suffix != GGUF or kind not in ARCHITECTURES:
        raise ConfigError(
            f"keep is given for {source} (model_type={kind}), expected a GGUF file of "
            f"{', '.join(ARCHITECTURES)}; convert it with --to PLAN"
        )
    for name, tensor in read_header(path).items():
        is_linear = name.startswith("blk.") and len(tensor.shape) > 1
        if is_linear and tensor.type not in (*LEVELS, *FLOATS):
            raise ConfigError(
                f"{path} holds {name} as {tensor.type}, expected a type of levels and one scale "
                f"({', '.join(LEVELS)}); convert it with --to PLAN"
            )
    return path


def keep_weights(
    path: Path, model: PreTrainedModel, embedding_bits: int | None = None
) -> QuantPlan:
    """Give linears and tables of `model`, read from the file as floats, the file's own levels.

    Tables of types without levels stay in floating point, or are to become integers of
    `embedding_bits`.

    Returns:
        The plan that the model has then.

    Raises:
        CheckpointError: levels and scales do not give the weight that was read.
    """
    names, header, rules = tensor_names(model), read_header(path), []
    tables = table_names(model)
    for name in (*tables, *linear_names(model)):
        tensor = header[f"{names[name]}.weight"]
        spec = None
        if tensor.type in LEVELS:
            spec, quantized = read_levels(path, tensor, row_order(name, model.config))
            if not torch.equal(form(quantized), model.get_submodule(name).weight):
                raise CheckpointError(
                    f"{path}: integers and scales of {name} ({tensor.type}) give another weight "
                    "than was read of it, expected the same; convert it with --to PLAN"
                )
            put_quantized(model, name, quantized, spec)
        elif name in tables and embedding_bits not in (None, FLOAT_BITS):
            spec = _integers(embedding_bits, tensor.shape)
        else:
            logger.info("%s is of type %s and stays in floating point", name, tensor.type)
        rules.append(PlanRule(pattern=name, spec=spec))
    return QuantPlan(name="kept", rules=tuple(rules))


def _integers(bits: int, shape: tuple[int, int]) -> LutSpec:
    """Return integers of so many bits in the blocks of a type of ggml."""
    return scheme(LutSpec(bits=bits, codebook="int", group_size=SMALL), shape)


def _savings(path: Path, model: PreTrainedModel, plan: QuantPlan) -> Iterator[Saving]:
    """Yield what tables in floating point would save as integers of as many bits as in the file."""
    names, header, sizes = tensor_names(model), read_header(path), bytes_by_name(model)
    floats = [n for n in table_names(model) if plan.spec_for(n, is_table=True) is None]
    if not floats:
        return
    stored = [header[f"{names[name]}.weight"] for name in floats]
    bits = FEW_BITS if max(each.bits for each in stored) < FEW_BITS + 1 else 2 * FEW_BITS
    octets = sum(sizes[f"{name}.weight"] for name in floats)
    octets -= sum(format_bits(_integers(bits, each.shape), each.shape) // 8 for each in stored)
    yield Saving(f"--embedding-bits {bits}", octets / 1e6)


def read_levels(
    path: Path, tensor: StoredTensor, rows: Tensor | None
) -> tuple[LutSpec, QuantizedWeight]:
    """Return a matrix of the GGUF file at `path` and its format; `rows` is its `row_order`.

    A block whose scale is replaced by one gives its integers. Those of Q2_0 may be -1 to 2: if some
    are 2, they are integers of two bits, with the signs of levels and scales flipped.
    """
    (O, I), (size, octets) = tensor.shape, block_size(tensor.type)
    blocks = np.fromfile(path, np.uint8, tensor.num_bytes, offset=tensor.place)
    blocks = blocks.reshape(-1, octets)
    place = slice(-2, None) if tensor.type in SCALE_AT_END else slice(2)
    halves = np.ascontiguousarray(blocks[:, place]).view(np.float16)
    scales = torch.from_numpy(halves.astype(np.float32)).view(O, I // size)
    blocks[:, place] = np.ones(1, np.float16).view(np.uint8)
    integers = torch.from_numpy(dequantize(blocks, tensor.type)).view(O, I)
    spec = LutSpec(**LEVELS[tensor.type], group_size=size)
    if spec.codebook == "seq":  # the levels are -1/2 and 1/2
        integers, scales = integers / 2, scales * 2
    elif spec.codebook == "ternary" and integers.max() > 1:
        spec = spec.model_copy(update={"codebook": "int"})
        integers, scales = -integers, -scales
    levels = cast(Tensor, fixed_grid(spec))  # never learned
    indices = (integers - levels[0]).to(torch.uint8)
    if rows is not None:
        own = rows.argsort()
        indices, scales = indices[own], scales[own]
    return spec, QuantizedWeight(indices, levels, Scales(scales, bits=spec.scale_bits))
