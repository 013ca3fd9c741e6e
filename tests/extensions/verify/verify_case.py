"""Files for other engines of one small student, and copies of them with a fault."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from tiny import edited, tiny_model, tiny_tokenizer

from qat.convert.quantize import quantize_model
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.extensions.targets.gguf import FILE_NAME
from qat.models.checkpoint import save_checkpoint
from qat.models.gguf import GgufFile, type_number
from qat.models.gguf_header import ARRAY, read_header
from qat.models.language_model import LanguageModel
from qat.nn.swap import linear_names
from qat.quant.spec import LutSpec, PlanRule, QuantPlan

INT4 = LutSpec(bits=4, codebook="int", group_size=32, scale_bits=8)
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}


class Stored(NamedTuple):
    """A tensor of a GGUF file."""

    type: str
    shape: tuple[int, ...]
    octets: np.ndarray
    """The bytes of each row."""


def save_student(out: Path, architecture: str = "llama", **overrides: object) -> Path:
    """Write a student of 2 layers with integers of 4 bits in its linears."""
    settings = {"tie_word_embeddings": False, "initializer_range": 0.2, **SHAPE, **overrides}
    model = tiny_model(architecture, **settings)
    rules = tuple(PlanRule(pattern=name, spec=INT4) for name in linear_names(model))
    quantize_model(LanguageModel(model), QuantPlan(name="int4", rules=rules))
    save_checkpoint(model, tiny_tokenizer(), out)
    return out


def export(student: Path, to: str, out: Path) -> Path:
    """Export a student; return the file or directory to verify."""
    export_model(str(student), ExportConfig(to=to), out)
    return out / FILE_NAME if to == "gguf" else out


Fields, Tensors = dict[str, Any], dict[str, Stored]


def copy_gguf(path: Path, out: Path, change: Callable[[Fields, Tensors], object]) -> Path:
    """Write the GGUF file `path` to `out` after `change`, whose arguments it may alter in place."""
    read, header = GgufFile(path), read_header(path)
    fields, types = {}, {}
    for key, field in read.fields.items():
        values = [p.decode() if isinstance(p, bytes) else p[0] for p in field.parts]
        fields[key] = values if field.types[0] == ARRAY else values[0]
        types[key] = [gguf.GGUFValueType(number) for number in field.types]
    tensors = {
        each.name: Stored(each.tensor_type, header[each.name].shape, np.array(each.data))
        for each in read.tensors
    }
    change(fields, tensors)
    writer = gguf.GGUFWriter(out, fields.pop("general.architecture"))
    for key, value in fields.items():
        kinds = types.get(key, [gguf.GGUFValueType.get_type(value)])
        writer.add_key_value(key, value, *kinds)
    for name, (kind, shape, octets) in tensors.items():
        data = np.ascontiguousarray(octets).view(np.int8)
        writer.add_tensor(name, data, raw_shape=shape, raw_dtype=type_number(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def copy_directory(
    directory: Path, out: Path, name: str, change: Callable[[dict[str, Any]], object]
) -> Path:
    """Copy a directory and `change` the values or tensors of its file `name`."""
    shutil.copytree(directory, out)
    with edited(out, name) as values:
        change(values)
    return out
