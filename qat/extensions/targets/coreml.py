"""Target `coreml`: an .mlpackage for iOS 18 and macOS 15 with weights as look-up tables.

A weight is a `constexpr_lut_to_dense`, one table of 1 to 8 bits for the whole tensor or for some
rows, under a `constexpr_blockwise_shift_scale`, one scale per group: `W = lut[indices] * scale`. An
entry of a table is a level, or a codeword of neighbouring weights of a row. A scale of a whole row
multiplies the output instead: the Neural Engine computes scales within a weight wrongly.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.export.parts import DtypeError
from qat.extensions.targets.shared import (
    DTYPE_NAMES,
    WITH_GROUPS,
    exact,
    lost_by_rank,
    plain_decoder,
    refuse,
    unquantized_state,
    write_config,
)
from qat.models.checkpoint import quiet_transformers
from qat.models.stored_state import INPUT_SCALE, has_input_scale, quantized_modules
from qat.nn.quant_weight import QuantWeight
from qat.nn.swap import embedding_dtype
from qat.quant.spec import LutSpec

COMPARED = "constants"
HOLDS_ADAPTERS = False
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None, "int8-static")
FILE_NAME = "model.mlpackage"
LENGTH = 256
"""The largest number of positions that the program reads at a time."""
INDEX_BITS = (1, 2, 3, 4, 6, 8)
"""Bits per index that Core ML's look-up tables support."""
NUMPY_DTYPES = {torch.float16: np.float16, torch.float32: np.float32}
HOW_TO_LOAD = """\
```python
# on a Mac: pip install coremltools transformers
import coremltools as ct
import numpy as np
from transformers import AutoTokenizer

model, tokenizer = ct.models.MLModel("DIR/model.mlpackage"), AutoTokenizer.from_pretrained("DIR")
length = model.get_spec().description.input[0].type.multiArrayType.shape[1]
ids = tokenizer("Once upon a time").input_ids
padded = np.array([ids + [0] * (length - len(ids))], np.int32)  # what follows is not seen
logits = model.predict({"input_ids": padded})["logits"][0, len(ids) - 1]
```

The program has a fixed length and no state: it reads a prompt and gives the logits of every place.
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Up to 256 levels or codewords, with a scale per group, lose nothing.
    """
    if spec.bits > INDEX_BITS[-1]:
        return f"its codebook has {spec.num_levels} codewords, expected at most 256"
    return lost_by_rank(spec)


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return `spec` with 16-bit levels, which float16 programs also hold, and 8-bit scales."""
    refuse(lost_by_rank(spec), WITH_GROUPS)
    refuse(lost(spec, shape), f"of at most {INDEX_BITS[-1]} bits an index")
    return spec.model_copy(update={"scale_bits": 8, "level_bits": 16})


def file_bits(spec: LutSpec, shape: tuple[int, int]) -> int:
    """Return the bits of an `(O, I)` weight in a program in float16, with 16-bit scales."""
    index = next(bits for bits in INDEX_BITS if bits >= spec.bits)
    tables = shape[0] // spec.table_rows if spec.table_rows else 1
    table = 16 * spec.num_levels * spec.vector_size * tables
    weights = math.prod(shape)
    return weights // spec.vector_size * index + weights // spec.group_size * 16 + table


def check(model: PreTrainedModel) -> None:
    """Refuse an architecture that cannot be written as a graph here."""
    plain_decoder(model, "a Core ML program")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write model.mlpackage, config.json and the tokenizer, in float16 or float32."""
    dtype = embedding_dtype(model)
    if dtype not in NUMPY_DTYPES:
        raise DtypeError(
            f"Core ML has no {DTYPE_NAMES[dtype]}, expected float16 or float32; export with "
            "--dtype fp16 (what the Neural Engine runs) or fp32"
        )
    import coremltools as ct

    from qat.extensions.targets.coreml_program import OPSET, decoder

    modules, scales = quantized_modules(model), {}
    weights = {n: tensor.numpy() for n, tensor in unquantized_state(model, dtype).items()}
    for name, module in modules.items():
        weights[f"{name}.weight"] = _lookup(name, module, dtype)
        if has_input_scale(module):
            scale = module.activation.stored_scale().double()
            scales[name] = exact(f"{name}.{INPUT_SCALE}", scale, dtype).numpy()[()]
    places = torch.arange(length_of(model))[None]
    with torch.no_grad():  # cosines and sines of the positions, as the model computes them
        cos, sin = model.model.rotary_emb(torch.zeros(1), places)
    angles = cos[0], sin[0]
    program = decoder(model.config, weights, angles, NUMPY_DTYPES[dtype], scales=scales)
    with quiet_transformers():
        converted = ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=OPSET,
            compute_precision=ct.precision.FLOAT32,  # keep the graph's dtypes: cast nothing
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
    converted.save(str(directory / FILE_NAME))
    write_config(model, tokenizer, directory)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the logits that coremltools infers from the saved program.

    Raises:
        ValueError: its weights or its scales of inputs are not ours to the bit.
    """
    from coremltools.converters.mil.frontend.milproto.load import load
    from coremltools.models import MLModel

    from qat.extensions.targets.coreml_program import evaluate, read_scales, read_weights

    package = MLModel(str(directory / FILE_NAME), skip_model_load=True)
    spec = package.get_spec()
    program = load(spec, spec.specificationVersion, file_weights_dir=package.weights_dir)
    # coremltools writes names with underscores for dots
    modules = {f"{n}.weight".replace(".", "_"): m for n, m in quantized_modules(model).items()}
    for name, found in read_weights(program).items():
        ours = modules[name].quantized_weight(embedding_dtype(model))
        if not torch.equal(torch.from_numpy(found), ours):
            raise ValueError(f"{name} is decompressed to other values")
    statics = {name: m.activation for name, m in modules.items() if has_input_scale(m)}
    ours = {name: {activation.stored_scale().item()} for name, activation in statics.items()}
    if read_scales(program) != ours:
        raise ValueError("what linears read is rounded by other scales")
    padded = torch.zeros(1, length_of(model), dtype=ids.dtype)
    padded[:, : ids.shape[1]] = ids
    return torch.from_numpy(evaluate(program, padded.numpy()))[:, : ids.shape[1]]


def length_of(model: PreTrainedModel) -> int:
    """Return the number of positions that a program of `model` reads."""
    return min(LENGTH, model.config.max_position_embeddings)


class Palette(NamedTuple):
    """A weight as Apple's programs hold it: `lut[indices] * scale`."""

    indices: Tensor
    """`(O, I / d)`."""
    lut: Tensor
    """`(T, 2**bits, d)`: T tables for O / T rows each, padded with zeros to supported bits."""
    scale: Tensor
    """`(O, G)`."""


def palette(name: str, module: QuantWeight, dtype: torch.dtype) -> Palette:
    """Return the tables of a module in `dtype`, which must change nothing."""
    weight, num_levels = module.quantized(), module.spec.num_levels
    scale = exact(f"{name}.scales", weight.scales.by_group().double(), dtype).detach()
    size = next(2**bits for bits in INDEX_BITS if 2**bits >= num_levels)
    levels = exact(f"{name}.codebook", weight.codebook.double(), dtype)
    entries = levels.view(-1, num_levels, module.spec.vector_size)
    lut = torch.nn.functional.pad(entries, (0, 0, 0, size - num_levels))
    return Palette(weight.indices, lut.detach(), scale)


def _lookup(name: str, module: QuantWeight, dtype: torch.dtype) -> object:
    """Return the tables of a module, or integers."""
    from qat.extensions.targets.coreml_program import Lookup

    indices, lut, scale = palette(name, module, dtype)
    # no table: with inputs of 8 bits Core ML may multiply such a weight as integers
    if (module.spec.codebook, module.spec.bits) == ("int", 8):
        integers = indices.int() + int(module.levels()[0])
        return Lookup(integers.to(torch.int8).numpy(), None, scale.numpy())
    return Lookup(indices.numpy(), lut.numpy(), scale.numpy())
