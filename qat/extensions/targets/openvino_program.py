"""A decoder as a program of OpenVINO, whose state is keys and values.

Shapes: B sequences, S positions, T positions with the past ones, E head width, O out_features, G
blocks per row.
"""

import numpy as np
import openvino as ov
import torch
from openvino import Node, Type
from openvino import opset13 as ops
from torch import Tensor
from transformers import PreTrainedModel

from qat.extensions.targets.codes import is_coded, stored_bits, to_codes
from qat.extensions.targets.decoder import TABLE, Decoder, owner
from qat.models.stored_state import narrowed, quantized_modules
from qat.nn.quant_weight import QuantWeight
from qat.nn.swap import head_dim
from qat.quant.weight import pack

CODES = {2: Type.u2, 4: Type.u4, 8: Type.u8}
FLOATS = {torch.float32: Type.f32, torch.float16: Type.f16, torch.bfloat16: Type.bf16}
MASKED = float(np.finfo(np.float32).min)
"""Added to masked scores: finite, as padding on the left has nothing to attend to."""


def program(model: PreTrainedModel) -> ov.Model:
    """Return the program of a decoder, as openvino-genai calls it."""
    return _Decoder(model).program()


class _Decoder(Decoder[Node]):
    """The parts of a model as nodes, in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config, self.width = model, model.config, head_dim(model.config)
        self.weights: dict[str, Node] = {}
        self.kept: list[Node] = []
        self.quantized = quantized_modules(model)
        self.ids, self.attended, self.places = (
            _parameter(name, [-1, -1], Type.i64)
            for name in ("input_ids", "attention_mask", "position_ids")
        )
        self.beams = _parameter("beam_idx", [-1], Type.i32)
        self.batch = ops.gather(ops.shape_of(self.ids), _integers(0), _integer(0))
        self.angles, self.mask = self._angles(), self._mask()

    def program(self) -> ov.Model:
        """Return the whole program."""
        rows = ops.gather(self.weight(TABLE), self.ids, _integer(0))
        read = self.blocks(rows, self.config.num_hidden_layers)
        found = ops.result(self.linear(read, "lm_head"))
        found.output(0).get_tensor().set_names({"logits"})
        return ov.Model([found], self.kept, [self.ids, self.attended, self.places, self.beams])

    def add(self, x: Node, y: Node) -> Node:
        """Return `x + y`."""
        return ops.add(x, y)

    def multiply(self, x: Node, y: Node) -> Node:
        """Return `x * y`."""
        return ops.multiply(x, y)

    def sigmoid(self, x: Node) -> Node:
        """Return `1 / (1 + exp(-x))`."""
        return ops.sigmoid(x)

    def norm(self, x: Node, name: str) -> Node:
        """Return `x / sqrt(mean(x^2) + eps) * weight`, over the last dimension."""
        module = self.model.get_submodule(name)
        mean = ops.reduce_mean(ops.power(x, _float(2)), _integers(-1), keep_dims=True)
        root = ops.sqrt(ops.add(mean, _float(module.variance_epsilon)))
        normed = ops.multiply(x, ops.divide(_float(1), root))
        return ops.multiply(normed, _floats(module.weight))

    def linear(self, x: Node, name: str) -> Node:
        """Return the product of the linear or head called `name`."""
        module = self.model.get_submodule(name)
        weight = self.weight(owner(self.model, name))
        product = ops.matmul(x, weight, transpose_a=False, transpose_b=True)
        return product if module.bias is None else ops.add(product, _floats(module.bias))

    def weight(self, name: str) -> Node:
        """Return the `(O, I)` weight of a linear or table, created once."""
        if name not in self.weights:
            module = self.quantized.get(name)
            self.weights[name] = (
                _floats(self.model.get_submodule(name).weight)
                if module is None
                else _quantized(name, module)
            )
        return self.weights[name]

    def attention(self, x: Node, number: int) -> Node:
        """Return causal attention with rotary positions to what the state holds and to `x`."""
        config, name = self.config, f"model.layers.{number}.self_attn"
        module = self.model.get_submodule(name)
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        query, key, value = (
            self._heads(x, name, part, count)
            for part, count in zip("qkv", (heads, key_heads, key_heads), strict=True)
        )
        key = self._remembered(self._rotated(key), f"key.{number}", key_heads)
        value = self._remembered(value, f"value.{number}", key_heads)
        key, value = (self._repeated(each, heads, key_heads) for each in (key, value))
        scale = _float(module.scaling)
        mixed = ops.scaled_dot_product_attention(
            self._rotated(query), key, value, self.mask, scale, causal=False
        )
        joined = ops.reshape(
            ops.transpose(mixed, _integers(0, 2, 1, 3)),
            _integers(0, 0, heads * self.width),
            special_zero=True,
        )
        return self.linear(joined, f"{name}.o_proj")

    def _heads(self, x: Node, name: str, part: str, count: int) -> Node:
        """Return a projection as `(B, count, S, E)`, normed if the model has such a norm."""
        read = self.linear(x, f"{name}.{part}_proj")
        split = ops.reshape(read, _integers(0, 0, count, self.width), special_zero=True)
        if hasattr(self.model.get_submodule(name), f"{part}_norm"):
            split = self.norm(split, f"{name}.{part}_norm")
        return ops.transpose(split, _integers(0, 2, 1, 3))

    def _rotated(self, x: Node) -> Node:
        """Return `x * cos + (-x2, x1) * sin`."""
        half, (cos, sin) = self.width // 2, self.angles
        x1, x2 = ops.variadic_split(x, _integer(-1), _integers(half, half)).outputs()
        turned = ops.concat([ops.multiply(x2, _float(-1)), x1], -1)
        return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))

    def _remembered(self, new: Node, name: str, heads: int) -> Node:
        """Return past and `new` keys or values, `(B, heads, T, E)`, which the state then holds."""
        shape = ops.concat([self.batch, _integers(heads, 0, self.width)], 0)
        kept = [-1, heads, -1, self.width]
        past = ops.read_value(ops.broadcast(_float(0), shape), name, Type.f32, kept)
        both = ops.concat([ops.gather(past, self.beams, _integer(0)), new], 2)
        self.kept.append(ops.assign(both, name))
        return both

    def _repeated(self, x: Node, heads: int, key_heads: int) -> Node:
        """Repeat each key head for its query heads."""
        if heads == key_heads:
            return x
        times = _integers(1, 1, heads // key_heads, 1, 1)
        tiled = ops.broadcast(ops.unsqueeze(x, _integer(2)), times, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(tiled, _integers(0, heads, -1, self.width), special_zero=True)

    def _angles(self) -> tuple[Node, Node]:
        """Return cosines and sines of the positions, `(B, 1, S, E)`."""
        rotary = self.model.model.rotary_emb
        places = ops.unsqueeze(ops.convert(self.places, Type.f32), _integers(1, 3))
        frequencies = ops.constant(rotary.inv_freq.float().numpy()[None, None, None])
        angles = ops.multiply(places, frequencies)
        both, scale = ops.concat([angles, angles], -1), _float(rotary.attention_scaling)
        return ops.multiply(ops.cos(both), scale), ops.multiply(ops.sin(both), scale)

    def _mask(self) -> Node:
        """Return what is added to scores, `(B, 1, S, T)`, against later tokens and padding."""
        total, new = (
            ops.squeeze(ops.gather(ops.shape_of(each), _integers(1), _integer(0)), _integer(0))
            for each in (self.attended, self.ids)
        )
        places = ops.range(_integer(0), total, _integer(1), Type.i64)
        own = ops.unsqueeze(
            ops.range(ops.subtract(total, new), total, _integer(1), Type.i64), _integer(1)
        )
        is_seen = ops.logical_and(
            ops.less_equal(places, own),
            ops.unsqueeze(ops.convert(self.attended, Type.boolean), _integers(1, 2)),
        )
        return ops.select(is_seen, _float(0), _float(MASKED))


def _quantized(name: str, module: QuantWeight) -> Node:
    """Return `scale * (code - zero)`, or `scale * levels[code]` for other levels than even ones."""
    spec = module.spec
    if is_coded(spec):
        found = to_codes(name, module, is_half=spec.codebook == "seq")
        O, G = found.scales.shape
        codes = _packed(found.packed, found.bits, [O, G, found.block])
        levels = ops.subtract(ops.convert(codes, Type.f32), _float(found.zero))
        scales = found.scales
    else:
        weight, bits = module.quantized(), stored_bits(spec.bits)
        scales = weight.scales.scales.float()
        O, G = scales.shape
        codes = _packed(pack(weight.indices.int(), bits), bits, [O, G, spec.group_size])
        levels = ops.gather(_floats(weight.codebook), ops.convert(codes, Type.i32), _integer(0))
    scaled = ops.multiply(levels, _floats(scales[..., None]))
    return ops.reshape(scaled, _integers(O, -1), special_zero=False)


def _parameter(name: str, shape: list[int], dtype: Type) -> Node:
    found = ops.parameter(shape, dtype, name=name)
    found.output(0).get_tensor().set_names({name})
    return found


def _constant(octets: Tensor, shape: list[int], dtype: Type) -> Node:
    tensor = ov.Tensor(octets.contiguous().numpy(), ov.Shape(shape), dtype)
    return ops.constant(tensor, shared_memory=False)  # what is shared is not kept alive


def _packed(octets: Tensor, bits: int, shape: list[int]) -> Node:
    return _constant(octets, shape, CODES[bits])


def _floats(value: Tensor) -> Node:
    """Return a float32 tensor, stored in 16 bits if that is lossless."""
    (short,) = narrowed({"": value.detach().contiguous()}).values()
    octets = short.contiguous().view(torch.uint8)
    stored = _constant(octets, list(short.shape), FLOATS[short.dtype])
    return stored if short.dtype == torch.float32 else ops.convert(stored, Type.f32)


def _float(value: float) -> Node:
    return ops.constant(np.float32(value))


def _integer(value: int) -> Node:
    return ops.constant(np.int64(value))


def _integers(*values: int) -> Node:
    return ops.constant(np.array(values, np.int64))
