"""Target `litert`: a program for LiteRT (.tflite), run by its interpreter on a CPU.

A weight is integers of 2, 4 or 8 bits with zero points of 0, in a row for each group: `W =
RESHAPE(DEQUANTIZE(codes_RW))`, since LiteRT has one scale per row of a tensor and its scales for
blocks are for rounded inputs alone. The interpreter forms each weight once, when it first runs, and
rounds nothing. Only this file imports LiteRT.

Shapes: O out_features, I in_features, R = O * I / W groups, W weights of a group, S positions.
"""

import hashlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

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
    blocks_bits,
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
from qat.models.stored_state import quantized_modules
from qat.quant.spec import LutSpec

COMPARED = "sums"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None,)
FILE_NAME = "model.tflite"
LENGTH = 256
"""The largest number of positions that the program reads at a time."""
GROUP_SIZES = (16, 32, 64, 128, 256)
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
    """Return the bits of an `(O, I)` weight in the files, with 32-bit scales."""
    block = block_size(spec)
    return blocks_bits(shape, code_bits(spec), block) + blocks_bits(shape, 0, block)


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
    refuse_all_but_float32(model, "LiteRT")
    made = float_model(model, dense_state_dict(model, torch.float32), torch.float32)
    size = sum(parameter.nbytes for parameter in made.parameters())
    if size >= MOST_BYTES:
        raise ExportError(
            f"the model has {size / 1e9:.1f} GB of float weights, expected less than "
            f"{MOST_BYTES / 1e9:.1f}, where LiteRT's files end; export --to executorch"
        )
    from ai_edge_litert.tools.flatbuffer_utils import convert_object_to_bytearray

    program = _converted(_Program(made, _length(model)))
    weights = {}
    for name, module in quantized_modules(model).items():
        key = _digest(made.get_submodule(name).weight.detach().numpy())
        weights[key] = to_codes(name, module, is_half=False)
    _code(program, weights)
    (directory / FILE_NAME).write_bytes(convert_object_to_bytearray(program))
    write_config(model, tokenizer, directory)


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


@torch.no_grad()
def _converted(program: _Program) -> Any:
    """Return LiteRT's tree of the program, with float weights."""
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")  # libraries warn about each other
        import litert_torch
        from ai_edge_litert.tools.flatbuffer_utils import convert_bytearray_to_object

        litert_torch.config.show_progress = False
        tokens = torch.zeros(1, program.mask.shape[-1], dtype=torch.int32)
        made = litert_torch.convert(program.eval(), (tokens,))
        with tempfile.TemporaryDirectory() as place:
            made.export(f"{place}/floats")
            return convert_bytearray_to_object(Path(place, "floats").read_bytes())


def _code(program: Any, weights: dict[bytes, Codes]) -> None:
    """Let each float weight be formed of its codes, before anything else is computed.

    Raises:
        ExportError: a weight is not in the program as it is.
    """
    from ai_edge_litert import schema_py_generated as schema

    (graph,), kinds = program.subgraphs, schema.BuiltinOperator
    types = {2: schema.TensorType.INT2, 4: schema.TensorType.INT4, 8: schema.TensorType.INT8}

    def operator(kind: int, inputs: list[int], output: int) -> Any:
        codes = [each.builtinCode for each in program.operatorCodes]
        if kind not in codes:
            made = schema.OperatorCodeT(deprecatedBuiltinCode=kind, builtinCode=kind)
            program.operatorCodes.append(made)
            return operator(kind, inputs, output)
        return schema.OperatorT(opcodeIndex=codes.index(kind), inputs=inputs, outputs=[output])

    def tensor(shape: list[int], kind: int, data: np.ndarray | None = None, **more: Any) -> int:
        if data is not None:
            program.buffers.append(schema.BufferT(data=data.reshape(-1).view(np.uint8)))
        place = 0 if data is None else len(program.buffers) - 1
        named = {"name": f"weight_{len(graph.tensors)}", "hasRank": True}
        graph.tensors.append(schema.TensorT(shape=shape, type=kind, buffer=place, **named, **more))
        return len(graph.tensors) - 1

    formed, found = [], set()
    for number, each in enumerate(graph.tensors[:]):
        data = program.buffers[each.buffer].data
        key = None if data is None else _digest(np.asarray(data))
        if key not in weights:
            continue
        codes = weights[key]
        rows = [codes.scales.numel(), codes.block]
        scales = schema.QuantizationParametersT(
            scale=codes.scales.flatten().numpy(), zeroPoint=np.zeros(rows[0], np.int64)
        )
        packed = _signed(codes)
        held = tensor(rows, types[codes.bits], packed, quantization=scales)
        floats = tensor(rows, schema.TensorType.FLOAT32)
        shape = np.array(each.shape, np.int32)
        whole = tensor([len(shape)], schema.TensorType.INT32, shape)
        formed.append(operator(kinds.DEQUANTIZE, [held], floats))
        formed.append(operator(kinds.RESHAPE, [floats, whole], number))
        program.buffers[each.buffer].data = None
        each.buffer = 0
        found.add(key)
    if found != weights.keys():
        raise ExportError(
            f"LiteRT's converter kept {len(found)} of {len(weights)} weights as they are, expected "
            "all; export --to executorch, and report this"
        )
    graph.operators = formed + graph.operators


def _signed(codes: Codes) -> np.ndarray:
    """Return the codes less their zero point as LiteRT packs integers, lowest bits first."""
    half = sum(1 << place for place in range(codes.bits - 1, 8, codes.bits))
    return (codes.packed ^ half).numpy()  # adds half of the codes to each, without carry


def _digest(data: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(data)).digest()


def _length(model: PreTrainedModel) -> int:
    return min(LENGTH, model.config.max_position_embeddings)
