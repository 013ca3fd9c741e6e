"""Target `litert`: a program for LiteRT (.tflite), run by its interpreter on a CPU.

A weight is integers of 2, 4 or 8 bits with zero points of 0, in a row for each group: `W =
RESHAPE(DEQUANTIZE(codes_RW))`, since LiteRT has one scale per row of a tensor and its scales for
blocks are for rounded inputs alone. The interpreter forms each weight once, when it first runs, and
rounds nothing. Where a student rounds the input of a linear to 8 bits with a static scale, the
product reads `DEQUANTIZE(QUANTIZE(x))` with that scale; a product of the integers themselves would
round its output to 8 bits too, which no student has learned.

Shapes: O out_features, I in_features, R = O * I / W groups, W weights of a group, S positions.
"""

import hashlib
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qat.errors import ExportError
from qat.export.dense import dense_state_dict
from qat.export.parts import float_model
from qat.extensions.targets.codes import (
    Codes,
    block_size,
    lost_by_blocks,
    stored_bits,
    to_codes,
)
from qat.extensions.targets.shared import (
    even_levels,
    group_size_near,
    plain_decoder,
    refuse_all_but_float32,
    refuse_all_but_groups,
    write_config,
)
from qat.models.checkpoint import quiet_transformers
from qat.models.stored_state import has_input_scale, quantized_modules
from qat.quant.spec import LutSpec

COMPARED = "sums"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None, "int8-static")
FILE_NAME = "model.tflite"
LENGTH = 256
"""The largest number of positions that the program reads at a time."""
GROUP_SIZES = (16, 32, 64, 128, 256)
SCALE_BITS = 32 + 64
"""A scale, and its zero point, which LiteRT wants for each."""
MOST_BYTES = 2**31
"""A program is made with float weights first, and LiteRT's files end here."""
HOW_TO_LOAD = """\
```python
# pip install ai-edge-litert transformers
import numpy as np
from ai_edge_litert.interpreter import Interpreter
from transformers import AutoTokenizer

forward = Interpreter("DIR/model.tflite").get_signature_runner()
tokenizer = AutoTokenizer.from_pretrained("DIR")
((name, tokens),) = forward.get_input_details().items()
ids = tokenizer("Once upon a time").input_ids
padded = np.zeros(tokens["shape"], np.int32)
padded[0, : len(ids)] = ids  # what follows is not seen
(logits,) = forward(**{name: padded}).values()
print(tokenizer.decode(logits[0, len(ids) - 1].argmax()))
```

The program has a fixed length and no state: it reads a prompt and gives the logits of every place.
"""


def code_bits(spec: LutSpec) -> int | None:
    """Return the bits of the integers that hold the levels; those without a zero take one more."""
    return stored_bits(spec.bits + (spec.codebook == "seq"))


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Even levels that integers of 8 bits hold lose nothing.
    """
    return lost_by_blocks(spec, code_bits(spec), GROUP_SIZES[0])


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return levels without a zero up to 3 bits, integers above, with 8-bit scales."""
    refuse_all_but_groups(spec)
    size = group_size_near(spec.group_size, GROUP_SIZES[1:], shape[1])
    return even_levels(spec, size, seq_bits=3)


def file_bits(spec: LutSpec, shape: tuple[int, int]) -> int:
    """Return the bits of an `(O, I)` weight in the files."""
    block = block_size(spec)
    return math.prod(shape) * (code_bits(spec) * block + SCALE_BITS) // block


def check(model: PreTrainedModel) -> None:
    """Refuse an architecture that is not known to become a program."""
    plain_decoder(model, "a program for LiteRT")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write model.tflite, config.json and the tokenizer, in float32 alone.

    Raises:
        ExportError: the float weights are larger than LiteRT's files may be.
    """
    program = coded_program(model, lambda made: _converted(_Program(made, _length(made))))
    (directory / FILE_NAME).write_bytes(program)
    write_config(model, tokenizer, directory)


def coded_program(model: PreTrainedModel, convert: Callable[[PreTrainedModel], Any]) -> bytes:
    """Return the file of the program that `convert` makes of a float model, with codes as weights.

    Raises:
        ExportError: the float weights are larger than LiteRT's files may be.
    """
    refuse_all_but_float32(model, "LiteRT")
    made = float_model(model, dense_state_dict(model, torch.float32), torch.float32)
    size = sum(parameter.nbytes for parameter in made.parameters())
    if size >= MOST_BYTES:
        raise ExportError(
            f"the model has {size / 1e9:.1f} GB of float weights, expected less than "
            f"{MOST_BYTES / 1e9:.1f}, where LiteRT's files end; export --to executorch"
        )
    from ai_edge_litert.tools import flatbuffer_utils

    with (
        warnings.catch_warnings(),
        quiet_transformers(),
        torch.no_grad(),
        tempfile.TemporaryDirectory() as place,
    ):
        warnings.simplefilter("ignore")  # libraries warn about each other
        import litert_torch

        litert_torch.config.show_progress = False
        floats = Path(place, "floats")
        convert(made.eval()).export(str(floats))
        content = floats.read_bytes()
        program = flatbuffer_utils.convert_bytearray_to_object(content)
    for buffer in program.buffers:  # files of nearly 2 GB have their weights behind the tables
        if buffer.offset:
            buffer.data = np.frombuffer(content, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
    weights = {}
    for name, module in quantized_modules(model).items():
        key = _digest(made.get_submodule(name).weight.detach().numpy())
        step = module.activation.stored_scale().item() if has_input_scale(module) else None
        weights[key] = _Weight(to_codes(name, module, is_half=False), step)
    _code(program, weights)
    return flatbuffer_utils.convert_object_to_bytearray(program)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the program's logits."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(directory / FILE_NAME), num_threads=torch.get_num_threads())
    forward = interpreter.get_signature_runner()
    (name,) = forward.get_input_details()
    padded = np.zeros((len(ids), _length(model)), np.int32)
    padded[:, : ids.shape[1]] = ids
    found = [next(iter(forward(**{name: row[None]}).values())) for row in padded]
    return torch.from_numpy(np.concatenate(found))[:, : ids.shape[1]]


class _Weight(NamedTuple):
    """A weight of the program."""

    codes: Codes
    """The codes, from which it is formed."""
    step: float | None
    """The static scale of what is multiplied by it; None if that is not rounded."""


class _Program(nn.Module):
    """A model that reads a row of fixed length; each place sees those before it."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        super().__init__()
        ALL_ATTENTION_FUNCTIONS.register(_grouped.__name__, _grouped)
        model.set_attn_implementation(_grouped.__name__)
        self.model = model
        # with the least float32 sums would overflow
        self.register_buffer("mask", torch.full((length, length), -1e9).triu(1)[None, None])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(1, S, V)` of `tokens` `(1, S)`."""
        return self.model(input_ids=tokens, attention_mask=self.mask, use_cache=False).logits


def _grouped(  # noqa: PLR0917 - what transformers calls
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **how: Any
) -> tuple[Tensor, None]:
    """Compute attention with all query heads of a key in one product (`AttentionInterface`).

    litert-torch 0.10 converts a single key that is repeated for each head to wrong numbers.
    """
    B, H, S, D = query.shape
    K = key.shape[1]
    scores = query.reshape(B, K, H // K * S, D) @ key.transpose(2, 3) * how["scaling"]
    weights = (scores.view(B, H, S, -1) + mask).softmax(-1)
    return (weights.view(B, K, H // K * S, -1) @ value).view(B, H, S, D).transpose(1, 2), None


def _converted(program: _Program) -> Any:
    import litert_torch

    tokens = torch.zeros(1, program.mask.shape[-1], dtype=torch.int32)
    return litert_torch.convert(program.eval(), (tokens,))


def _code(program: Any, weights: dict[bytes, _Weight]) -> None:
    """Let each float weight, known by its digest, be formed of its codes before anything else.

    Raises:
        ExportError: a weight is not in the program as it is.
    """
    coded: dict[int, _Weight] = {}
    for number, buffer in enumerate(program.buffers):
        key = None if buffer.data is None else _digest(np.asarray(buffer.data))
        if key in weights:
            coded[number] = weights[key]
            buffer.data = _signed(weights[key].codes).reshape(-1)
    if len({*map(id, coded.values())}) < len(weights):
        raise ExportError(
            f"LiteRT's converter kept {len(coded)} of {len(weights)} weights as they are, expected "
            "all; export --to executorch, and report this"
        )
    for graph in program.subgraphs:
        _Graph(program, graph).code(coded)


class _Graph:
    """A subgraph of a program, whose weights become codes."""

    def __init__(self, program: Any, graph: Any) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema, self.program, self.graph = schema, program, graph
        self.operators: list[Any] = []

    def code(self, coded: dict[int, _Weight]) -> None:
        """Form weights, whose codes are in buffers by number; round what is multiplied by them."""
        found = {n: t for n, t in enumerate(self.graph.tensors) if t.buffer in coded}
        inputs = {number: coded[tensor.buffer].step for number, tensor in found.items()}
        for number, tensor in found.items():
            self.form(number, tensor, coded[tensor.buffer].codes)
        rounded: dict[tuple[int, float], int] = {}  # queries, keys and values read the same
        for each in self.graph.operators:
            read, weight = (*each.inputs[:2], -1)[:2]
            step = inputs.get(weight)
            if step is not None:
                if (read, step) not in rounded:
                    rounded[read, step] = self.round(read, step)
                each.inputs = [rounded[read, step], *each.inputs[1:]]
            self.operators.append(each)
        self.graph.operators = self.operators

    def form(self, number: int, weight: Any, codes: Codes) -> None:
        """Let the weight with that number be formed of the codes in its buffer."""
        types = self.schema.TensorType
        rows = [codes.scales.numel(), codes.block]
        stored = {2: types.INT2, 4: types.INT4, 8: types.INT8}[codes.bits]
        held = self.tensor(rows, stored, weight.buffer, codes.scales.flatten().numpy())
        weight.buffer = 0
        self.program.buffers.append(
            self.schema.BufferT(data=np.array(weight.shape, np.int32).view(np.uint8))
        )
        whole = self.tensor([len(weight.shape)], types.INT32, len(self.program.buffers) - 1)
        floats = self.tensor(rows, types.FLOAT32)
        self.add("DEQUANTIZE", [held], floats)
        self.add("RESHAPE", [floats, whole], number)

    def round(self, read: int, step: float) -> int:
        """Round a tensor to 8 bits; return the number of the result."""
        shape, types = self.graph.tensors[read].shape, self.schema.TensorType
        levels = self.tensor(shape, types.INT8, scales=np.array([step], np.float32))
        values = self.tensor(shape, types.FLOAT32)
        self.add("QUANTIZE", [read], levels)
        self.add("DEQUANTIZE", [levels], values)
        return values

    def tensor(
        self, shape: list[int], kind: int, buffer: int = 0, scales: np.ndarray | None = None
    ) -> int:
        """Add a tensor, with scales for its rows or one for all; return its number."""
        name = f"qat_{len(self.graph.tensors)}"
        made = self.schema.TensorT(shape=shape, type=kind, buffer=buffer, name=name, hasRank=True)
        if scales is not None:
            zeros = np.zeros(len(scales), np.int64)
            made.quantization = self.schema.QuantizationParametersT(scale=scales, zeroPoint=zeros)
        self.graph.tensors.append(made)
        return len(self.graph.tensors) - 1

    def add(self, name: str, inputs: list[int], output: int) -> None:
        """Add an operator behind those that are there."""
        kind, listed = getattr(self.schema.BuiltinOperator, name), self.program.operatorCodes
        codes = [each.builtinCode for each in listed]
        if kind not in codes:
            listed.append(self.schema.OperatorCodeT(deprecatedBuiltinCode=kind, builtinCode=kind))
            codes.append(kind)
        made = self.schema.OperatorT(opcodeIndex=codes.index(kind), inputs=inputs, outputs=[output])
        self.operators.append(made)


def _signed(codes: Codes) -> np.ndarray:
    """Return the codes less their zero point as LiteRT packs integers, lowest bits first."""
    half = sum(1 << place for place in range(codes.bits - 1, 8, codes.bits))
    return (codes.packed ^ half).numpy()  # adds half of the codes to each, without carry


def _digest(data: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(data)).digest()


def _length(model: PreTrainedModel) -> int:
    return min(LENGTH, model.config.max_position_embeddings)
