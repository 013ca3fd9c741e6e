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


# Faults to plant in a GGUF file.

UP, GATE, QUERY = "blk.1.ffn_up.weight", "blk.1.ffn_gate.weight", "blk.0.attn_q.weight"
UP_NAME = "model.layers.1.mlp.up_proj.weight"
GATE_NAME = "model.layers.1.mlp.gate_proj.weight"
BLOCK = 18
"""Bytes of a block of Q4_0, the first two of which are its scale."""


def with_scales(tensors: Tensors, name: str, rows: slice, scale: float) -> None:
    """Give all blocks in some rows of a Q4_0 tensor that scale."""
    octets = tensors[name].octets.reshape(tensors[name].shape[0], -1, BLOCK)
    octets[rows, :, :2] = np.array([scale], np.float16).view(np.uint8)
    tensors[name] = tensors[name]._replace(octets=octets.reshape(len(octets), -1))


def double_scales(tensors: Tensors, name: str) -> None:
    octets = tensors[name].octets.reshape(-1, BLOCK)
    halves = np.ascontiguousarray(octets[:, :2]).view(np.float16) * np.float16(2)
    octets[:, :2] = halves.view(np.uint8)
    tensors[name] = tensors[name]._replace(octets=octets.reshape(tensors[name].octets.shape))


def damage(_: Fields, tensors: Tensors) -> None:
    octets = tensors[UP].octets.reshape(-1, BLOCK)
    octets[::7, 2:] ^= 0x33
    tensors[UP] = tensors[UP]._replace(octets=octets.reshape(tensors[UP].octets.shape))


def forget_row_order(_: Fields, tensors: Tensors) -> None:
    """Leave the rows of a head as transformers has them: halves, not neighbours."""
    octets = tensors[QUERY].octets
    heads = octets.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(octets.shape)
    tensors[QUERY] = tensors[QUERY]._replace(octets=heads)


def swap(_: Fields, tensors: Tensors) -> None:
    tensors[UP], tensors[GATE] = tensors[GATE], tensors[UP]


def swap_tokens(fields: Fields, _: Tensors) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    tokens[40], tokens[41] = tokens[41], tokens[40]


def drop_prompt(fields: Fields, _: Tensors) -> None:
    template = fields["tokenizer.chat_template"]
    fields["tokenizer.chat_template"] = template.partition("{% if add_generation_prompt %}")[0]


def widen_norm(_: Fields, tensors: Tensors) -> None:
    kind, shape, octets = tensors["output_norm.weight"]
    values = octets.view(np.float32) * np.linspace(1, 3, shape[0], dtype=np.float32)
    tensors["output_norm.weight"] = Stored(kind, shape, (values + 1).view(np.uint8))


TWELVE = {
    "tensor": (damage, UP_NAME),
    "order": (forget_row_order, "model.layers.0.self_attn.q_proj.weight"),
    "swapped": (swap, GATE_NAME),
    "missing": (lambda _, tensors: tensors.pop(UP), UP_NAME),
    "overflow": (lambda _, t: with_scales(t, UP, slice(3, 4), np.inf), UP_NAME),
    "underflow": (lambda _, t: with_scales(t, UP, slice(0, 9), 2e-7), UP_NAME),
    "vocabulary": (swap_tokens, "token 40"),
    "splitting": (
        lambda fields, _: fields.update({"tokenizer.ggml.pre": "qwen2"}),
        "tokenizer pre",
    ),
    "end-token": (
        lambda fields, _: fields.update({"tokenizer.ggml.eos_token_id": 9}),
        "end of an answer",
    ),
    "chat-template": (drop_prompt, "letter"),
    "rope": (
        lambda fields, _: fields.update({"llama.rope.freq_base": 500_000.0}),
        "model.rotary_emb.inv_freq",
    ),
    "tied-head": (lambda _, tensors: tensors.pop("output.weight"), "head"),
}
"""Faults of a GGUF file by the kind of the finding, and where it is found."""
MORE = {
    "factor": (lambda _, tensors: double_scales(tensors, UP), UP_NAME),
    "begin-token": (
        lambda fields, _: fields.update(
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1}
        ),
        "begin of a text",
    ),
    "settings": (
        lambda fields, _: fields.update({"llama.attention.layer_norm_rms_epsilon": 1e-3}),
        "rms_norm_eps",
    ),
}
"""Kinds of faults beyond the twelve."""
