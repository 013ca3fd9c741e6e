"""A decoder as a program of ONNX Runtime's own operators. Only this file imports onnx.

Shapes: B sequences, S positions, P past positions, D model width, V words, O out_features, I
in_features, G blocks per row.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import BinaryIO

import torch
from onnx import TensorProto, ValueInfoProto, helper
from onnx.external_data_helper import set_external_data
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from qat.extensions.targets.codes import Codes
from qat.extensions.targets.decoder import TABLE, Decoder, owner
from qat.models.stored_state import narrowed
from qat.nn.swap import head_dim

OWN = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
OPSETS = {"": 21, OWN: 1}
IR_VERSION = 10
"""The version of the ONNX format that opset 21 belongs to."""
ALIGNMENT = 64
"""The alignment of tensors in the data file in bytes, a line of a processor's cache."""
ROWS_AT_ONCE = 128
"""The number whose multiples of rows ONNX Runtime's fast products with zero points of 1.5 take."""
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"
CACHED = ("key", "value")
INT8_INPUTS, FLOAT_INPUTS = 4, 1
"""Values of `accuracy_level`: what products read is rounded to 8 bits, or not."""
TYPES = {
    torch.uint8: TensorProto.UINT8,
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}


class _Graph:
    """Nodes and tensors of a program, whose values go to a file as they are added."""

    def __init__(self, data: BinaryIO, location: str) -> None:
        self.data, self.location = data, location
        self.nodes, self.tensors, self.numbers = [], {}, count()

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] = (), **attributes: object) -> str:
        """Add a node, of ONNX Runtime's own if it has a `domain`; return its first output.

        `outputs` are names of outputs; by default there is one, of any name.
        """
        name = f"{kind}.{next(self.numbers)}"
        outputs = outputs or [name]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=name, **attributes))
        return outputs[0]

    def own_op(self, kind: str, *inputs: str, **attributes: object) -> str:
        """Add a node of ONNX Runtime's own operators."""
        return self.op(kind, *inputs, domain=OWN, **attributes)

    def integers(self, *values: int) -> str:
        """Add a vector of integers, in the program itself; return its name."""
        name = ".".join(map(str, ("integers", *values)))
        self.tensors[name] = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        return name

    def scalar(self, value: int) -> str:
        """Add an integer, in the program itself; return its name."""
        name = f"integer.{value}"
        self.tensors[name] = helper.make_tensor(name, TensorProto.INT64, [], [value])
        return name

    def stored(self, name: str, value: Tensor) -> str:
        """Add a tensor called `name`, once; return its name."""
        if name not in self.tensors:
            self.data.write(bytes(-self.data.tell() % ALIGNMENT))
            proto = TensorProto(name=name, data_type=TYPES[value.dtype], dims=value.shape)
            octets = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
            proto.raw_data = b""  # set_external_data asks for some
            set_external_data(proto, self.location, self.data.tell(), len(octets))
            self.data.write(octets)
            self.tensors[name] = proto
        return name

    def reshaped(self, name: str, stored: str, *dims: int) -> str:
        """Add a tensor called `name` with the bytes of another; return its name."""
        proto = TensorProto()
        proto.CopyFrom(self.tensors[stored])
        proto.name, proto.dims[:] = name, dims
        self.tensors[name] = proto
        return name

    def floats(self, name: str, value: Tensor) -> str:
        """Add a float32 tensor, stored in 16 bits if that is lossless; return its name."""
        (short,) = narrowed({name: value.detach()}).values()
        return self.widened(self.stored(name, short), short.dtype)

    def widened(self, name: str, dtype: torch.dtype) -> str:
        """Return the name of a tensor in float32."""
        return name if dtype == torch.float32 else self.op("Cast", name, to=TensorProto.FLOAT)


class _Decoder(Decoder[str]):
    """The parts of a model as nodes of a graph."""

    def __init__(
        self, graph: _Graph, model: PreTrainedModel, codes: Mapping[str, Codes], level: int
    ) -> None:
        self.graph, self.model, self.codes, self.level = graph, model, codes, level
        self.lengths, self.angles = _lengths(graph), _angles(graph, model)

    def build(self) -> None:
        """Add all nodes, from `input_ids` to `logits`."""
        read = self.blocks(self.rows("input_ids"), self.model.config.num_hidden_layers)
        self.linear(read, "lm_head", outputs=["logits"])

    def add(self, x: str, y: str) -> str:
        """Return `x + y`."""
        return self.graph.op("Add", x, y)

    def multiply(self, x: str, y: str) -> str:
        """Return `x * y`."""
        return self.graph.op("Mul", x, y)

    def sigmoid(self, x: str) -> str:
        """Return `1 / (1 + exp(-x))`."""
        return self.graph.op("Sigmoid", x)

    def attention(self, x: str, number: int) -> str:
        """Add the attention of a layer; return its output."""
        graph, config, name = self.graph, self.model.config, f"model.layers.{number}.self_attn"
        module = self.model.get_submodule(name)
        read = [self.linear(x, f"{name}.{part}_proj") for part in "qkv"]
        if hasattr(module, "q_norm"):
            heads = graph.integers(0, 0, -1, head_dim(config)), graph.integers(0, 0, -1)
            for place, part in enumerate("qk"):
                split = graph.op("Reshape", read[place], heads[0])
                normed = self.norm(split, f"{name}.{part}_norm")
                read[place] = graph.op("Reshape", normed, heads[1])
        past, present = ([form.format(number, w) for w in CACHED] for form in (PAST, PRESENT))
        attended = graph.own_op(
            "GroupQueryAttention",
            *(*read, *past, *self.lengths, *self.angles),
            outputs=[f"{name}.attended", *present],
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            scale=module.scaling,
            do_rotary=1,
        )
        return self.linear(attended, f"{name}.o_proj")

    def linear(self, x: str, name: str, outputs: Sequence[str] = ()) -> str:
        """Add the product of the linear or head called `name`; return its output."""
        module, stored = self.model.get_submodule(name), owner(self.model, name)
        if stored in self.codes:
            return self._product(x, name, stored, outputs)
        weight = self.graph.floats(f"{stored}.weight", module.weight)
        factors = x, self.graph.op("Transpose", weight, perm=[1, 0])
        if module.bias is None:
            return self.graph.op("MatMul", *factors, outputs=outputs)
        bias = self.graph.floats(f"{name}.bias", module.bias)
        return self.graph.op("Add", self.graph.op("MatMul", *factors), bias, outputs=outputs)

    def rows(self, ids: str) -> str:
        """Add the embedding of tokens; return its output."""
        graph = self.graph
        if TABLE not in self.codes:
            table = self.model.get_input_embeddings().weight
            (short,) = narrowed({TABLE: table.detach()}).values()
            rows = graph.op("Gather", graph.stored(f"{TABLE}.weight", short), ids)
            return graph.widened(rows, short.dtype)
        found = self.codes[TABLE]
        table = graph.stored(f"{TABLE}.codes", found.packed)
        scales = graph.floats(f"{TABLE}.scales", found.scales)
        form = {"bits": found.bits, "block_size": found.block}
        axes = {"gather_axis": 0, "quantize_axis": 1}
        return graph.own_op("GatherBlockQuantized", table, ids, scales, **form, **axes)

    def norm(self, x: str, name: str) -> str:
        """Add the norm called `name` of the last dimension; return its output."""
        module = self.model.get_submodule(name)
        weight, eps = self.graph.floats(f"{name}.weight", module.weight), module.variance_epsilon
        return self.graph.op("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=eps)

    def _product(self, x: str, name: str, stored: str, outputs: Sequence[str]) -> str:
        found, graph, bias_O = self.codes[stored], self.graph, self.model.get_submodule(name).bias
        O, G = found.scales.shape
        more = -O % ROWS_AT_ONCE if found.has_half else 0  # rows of zeros
        N, bias, zero = O + more, "", ""
        codes = graph.stored(f"{stored}.codes", pad(found.packed, (0, 0, 0, more)))
        blocks = graph.reshaped(f"{stored}.blocks", codes, N, G, found.packed.shape[1] // G)
        scales = graph.floats(f"{stored}.scales", pad(found.scales, (0, 0, 0, more)))
        # without it, what rounds nothing would take seven times as long with 2 bits
        if found.has_half or (found.bits == 2 and self.level == FLOAT_INPUTS):
            value = helper.make_tensor("zero", TensorProto.FLOAT, [1], [found.zero])
            zero = graph.op("ConstantOfShape", graph.integers(N, G), value=value)
        if bias_O is not None:
            bias = graph.floats(f"{name}.bias", pad(bias_O, (0, more)))
        form = {"K": G * found.block, "N": N, "bits": found.bits, "block_size": found.block}
        form["accuracy_level"] = self.level
        given, own = (x, blocks, scales, zero, "", bias), () if more else outputs
        product = graph.own_op("MatMulNBits", *given, outputs=own, **form)
        if not more:
            return product
        ends = graph.integers(0), graph.integers(O), graph.integers(-1)
        return graph.op("Slice", product, *ends, outputs=outputs)


def save(
    model: PreTrainedModel, codes: Mapping[str, Codes], paths: tuple[Path, Path, Path]
) -> None:
    """Write two programs of a decoder and the data that they share; the second rounds no inputs."""
    rounding, exact, data = paths
    opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
    inputs, outputs = _signature(model)
    with data.open("wb") as opened:
        graph = _Graph(opened, data.name)
        for program, level in ((rounding, INT8_INPUTS), (exact, FLOAT_INPUTS)):
            graph.nodes = []
            _Decoder(graph, model, codes, level).build()
            parts = graph.nodes, "decoder", inputs, outputs, [*graph.tensors.values()]
            body = helper.make_graph(*parts)
            made = helper.make_model(body, opset_imports=opsets, ir_version=IR_VERSION)
            program.write_bytes(made.SerializeToString())


def _signature(model: PreTrainedModel) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
    config = model.config
    heads, width = config.num_key_value_heads, head_dim(config)
    float32, int64 = TensorProto.FLOAT, TensorProto.INT64

    def cache(form: str, length: str) -> list[ValueInfoProto]:
        names = [form.format(n, w) for n in range(config.num_hidden_layers) for w in CACHED]
        shape = ["B", heads, length, width]
        return [helper.make_tensor_value_info(name, float32, shape) for name in names]

    return [
        helper.make_tensor_value_info("input_ids", int64, ["B", "S"]),
        helper.make_tensor_value_info("attention_mask", int64, ["B", "P + S"]),
        *cache(PAST, "P"),
    ], [
        helper.make_tensor_value_info("logits", float32, ["B", "S", config.vocab_size]),
        *cache(PRESENT, "P + S"),
    ]


def _lengths(graph: _Graph) -> tuple[str, str]:
    """Add the index of the last token of each sequence, and the length of the longest."""
    lengths = graph.op("ReduceSum", "attention_mask", graph.integers(1), keepdims=0)
    last = graph.op("Sub", lengths, graph.integers(1))
    longest = graph.op("Gather", graph.op("Shape", "attention_mask"), graph.integers(1))
    return tuple(graph.op("Cast", each, to=TensorProto.INT32) for each in (last, longest))


def _angles(graph: _Graph, model: PreTrainedModel) -> tuple[str, str]:
    """Add cosines and sines of each position, which ONNX Runtime computes once, as it loads."""
    rotary, length = model.model.rotary_emb, model.config.max_position_embeddings
    frequencies = graph.floats("frequencies", rotary.inv_freq.float()[None])
    scale = graph.floats("angle_scale", torch.tensor([float(rotary.attention_scaling)]))
    places = graph.op("Range", *(graph.scalar(n) for n in (0, length, 1)))
    places = graph.op("Cast", places, to=TensorProto.FLOAT)
    angles = graph.op("Mul", graph.op("Unsqueeze", places, graph.integers(1)), frequencies)
    return tuple(graph.op("Mul", graph.op(kind, angles), scale) for kind in ("Cos", "Sin"))
