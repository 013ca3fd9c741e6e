"""A decoder as a MIL program: fixed length, no state, every quantized weight a look-up table.

The input of a linear passes through `quantize` and `dequantize` if its student was trained so. Only
this file imports coremltools at the top.

Shapes: S positions, D model width, H heads, K key heads, E head width, V words.
"""

from dataclasses import dataclass

import numpy as np
from coremltools import target
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Operation, Program, Var, types
from torch import Tensor
from transformers import PreTrainedConfig

from qat.extensions.targets.decoder import Decoder
from qat.nn.swap import head_dim

OPSET = target.iOS18
SCALE, READ_SCALE = ".scale", "_scale"
"""The suffixes of a scale's name: as it is written, and as coremltools reads it."""
MASKED = -30000.0
"""Added to masked scores: below every real score, but within the range of float16."""


@dataclass(frozen=True)
class Lookup:
    """A weight in Core ML: `lut[indices] * scale`, with a scale per block of a row.

    A scale of the whole row multiplies what is computed with the table.
    """

    indices: np.ndarray
    """`(O, I / d)` uint8; int8 if they are the levels themselves."""
    lut: np.ndarray | None
    """`(T, 2**bits, d)`, float, T tables for O / T rows each: an index names d neighbours of a row.
    None for `indices * scale`."""
    scale: np.ndarray
    """One scale per block, `(O, G)`, float."""

    @property
    def is_scaled_after(self) -> bool:
        """True if the scale is a factor of a row's product, or of a row that is looked up."""
        return self.lut is not None and self.scale.shape[1] == 1


Weights = dict[str, Lookup | np.ndarray]
"""Every weight of the model by transformers' name."""
Scales = dict[str, np.floating]
"""The static scale of a linear's input, by the linear's name, if it is quantized."""


def decoder(
    config: PreTrainedConfig,
    weights: Weights,
    rotary: tuple[Tensor, Tensor],
    dtype: type,
    *,
    scales: Scales,
) -> Program:
    """Build the program from `input_ids` `(1, S)` to `logits` `(1, S, V)` float32.

    Args:
        config: of a llama, qwen2 or qwen3 model.
        weights: in `dtype`; a tied head is left out.
        rotary: cosines and sines, `(S, E)` each.
        dtype: `np.float16` or `np.float32`: the dtype that the program computes in.
        scales: in `dtype`.
    """
    length = rotary[0].shape[0]
    spec = mb.TensorSpec((1, length), dtype=types.int32)

    @mb.program(input_specs=[spec], opset_version=OPSET)
    def program(input_ids: Var) -> Var:
        graph = _Graph(config, weights, rotary, dtype, scales=scales)
        hidden = graph.embedded(input_ids, "model.embed_tokens.weight")
        hidden = graph.blocks(hidden, config.num_hidden_layers)
        head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
        logits = graph.linear(hidden, head)
        return mb.cast(x=logits, dtype="fp32", name="logits")

    return program


class _Graph(Decoder[Var]):
    """Builds the parts of a model, each from weights by name."""

    def __init__(
        self,
        config: PreTrainedConfig,
        weights: Weights,
        rotary: tuple[Tensor, Tensor],
        dtype: type,
        *,
        scales: Scales,
    ) -> None:
        self.config, self.weights, self.scales, self.dtype = config, weights, scales, dtype
        self.made: dict[str, Var] = {}
        self.rounded: dict[tuple[Var, np.floating], Var] = {}
        # constants of the program: an array would be stored again by each layer that reads it
        self.cos, self.sin = (
            mb.const(val=part.numpy().astype(dtype)[None, None]) for part in rotary
        )
        length = rotary[0].shape[0]
        self.mask = mb.const(val=np.triu(np.full((length, length), MASKED, dtype), 1)[None, None])
        self.head_dim = head_dim(config)

    def weight(self, name: str) -> Var:
        """Return a constant, a scale or a look-up table, created once."""
        if name not in self.made:
            value = self.weights[name]
            is_lookup = isinstance(value, Lookup)
            self.made[name] = lookup(value, name) if is_lookup else mb.const(val=value, name=name)
        return self.made[name]

    def embedded(self, ids: Var, name: str) -> Var:
        """Return the rows `ids` of the weight called `name`."""
        rows = mb.gather(x=self.weight(name), indices=ids, axis=0)
        scale = self.scale_after(name)
        return rows if scale is None else mb.mul(x=rows, y=mb.gather(x=scale, indices=ids, axis=0))

    def scale_after(self, name: str) -> Var | None:
        """Return the scales `(O, 1)` of the rows of a weight that are no part of it, or None."""
        value, key = self.weights[name], name + SCALE
        if not (isinstance(value, Lookup) and value.is_scaled_after):
            return None
        if key not in self.made:
            self.made[key] = mb.const(val=value.scale, name=key)
        return self.made[key]

    def linear(self, x: Var, name: str) -> Var:
        """Return `read(x) @ W.T + b`."""
        x, weight, bias = self.quantized_input(x, name), f"{name}.weight", f"{name}.bias"
        scale, has_bias = self.scale_after(weight), bias in self.weights
        given = {"bias": self.weight(bias)} if has_bias and scale is None else {}
        y = mb.linear(x=x, weight=self.weight(weight), **given)
        if scale is None:
            return y
        y = mb.mul(x=y, y=mb.reshape(x=scale, shape=[-1]))
        return mb.add(x=y, y=self.weight(bias)) if has_bias else y

    def quantized_input(self, x: Var, name: str) -> Var:
        """Return `clip(round(x / scale), -128, 127) * scale`, shared for equal `x` and scale."""
        if name not in self.scales:
            return x
        scale = self.scales[name]
        if (x, scale) not in self.rounded:
            levels = mb.quantize(input=x, scale=scale, output_dtype="int8")
            self.rounded[x, scale] = mb.dequantize(input=levels, scale=scale)
        return self.rounded[x, scale]

    def norm(self, x: Var, name: str) -> Var:
        """Return `x / sqrt(mean(x^2) + eps) * gamma`: the layer norm of (x, -x), of mean 0."""
        width = x.shape[-1]
        both = mb.concat(values=[x, mb.mul(x=x, y=self.dtype(-1))], axis=-1)
        epsilon = self.dtype(self.config.rms_norm_eps)
        normed = mb.layer_norm(x=both, axes=[-1], epsilon=epsilon)
        rank = len(x.shape)
        half = mb.slice_by_size(x=normed, begin=[0] * rank, size=[*x.shape[:-1], width])
        return mb.mul(x=half, y=self.weight(f"{name}.weight"))

    def add(self, x: Var, y: Var) -> Var:
        """Return `x + y`."""
        return mb.add(x=x, y=y)

    def multiply(self, x: Var, y: Var) -> Var:
        """Return `x * y`."""
        return mb.mul(x=x, y=y)

    def sigmoid(self, x: Var) -> Var:
        """Return `1 / (1 + exp(-x))`."""
        return mb.sigmoid(x=x)

    def attention(self, x: Var, number: int) -> Var:
        """Compute the causal attention of a layer with rotary positions."""
        name = f"model.layers.{number}.self_attn."
        config = self.config
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        q = self.rotated(self.heads(x, f"{name}q_proj", heads, f"{name}q_norm"))
        k = self.rotated(self.heads(x, f"{name}k_proj", key_heads, f"{name}k_norm"))
        v = self.heads(x, f"{name}v_proj", key_heads, None)
        k, v = (self.repeated(part, heads // key_heads) for part in (k, v))
        scores = mb.matmul(x=mb.mul(x=q, y=self.dtype(self.head_dim**-0.5)), y=k, transpose_y=True)
        mixed = mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=self.mask), axis=-1), y=v)
        length = x.shape[1]
        joined = mb.reshape(
            x=mb.transpose(x=mixed, perm=[0, 2, 1, 3]), shape=[1, length, heads * self.head_dim]
        )
        return self.linear(joined, f"{name}o_proj")

    def heads(self, x: Var, name: str, count: int, norm: str | None) -> Var:
        """Project `(1, S, D)` to `(1, count, S, E)`, normed if the model has such a norm."""
        split = mb.reshape(x=self.linear(x, name), shape=[1, x.shape[1], count, self.head_dim])
        if norm is not None and f"{norm}.weight" in self.weights:
            split = self.norm(split, norm)
        return mb.transpose(x=split, perm=[0, 2, 1, 3])

    def rotated(self, x: Var) -> Var:
        """Return `x * cos + (-x2, x1) * sin`."""
        x1, x2 = mb.split(x=x, num_splits=2, axis=-1)
        turned = mb.concat(values=[mb.mul(x=x2, y=self.dtype(-1)), x1], axis=-1)
        return mb.add(x=mb.mul(x=x, y=self.cos), y=mb.mul(x=turned, y=self.sin))

    def repeated(self, x: Var, times: int) -> Var:
        """Repeat each key head for `times` query heads: `(1, K, S, E)` to `(1, H, S, E)`."""
        if times == 1:
            return x
        _, count, length, width = x.shape
        tiled = mb.tile(x=mb.reshape(x=x, shape=[count, 1, length, width]), reps=[1, times, 1, 1])
        return mb.reshape(x=tiled, shape=[1, count * times, length, width])


def lookup(weight: Lookup, name: str) -> Var:
    """Return look-up tables or integers under a scale per block, or tables alone."""
    if weight.lut is None:
        data = weight.indices
        return mb.constexpr_blockwise_shift_scale(data=data, scale=weight.scale, name=name)
    bits = int(np.log2(weight.lut.shape[1]))
    index_type = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    levels = mb.constexpr_lut_to_dense(
        indices=weight.indices.astype(index_type),
        lut=weight.lut[:, None],
        **({"vector_axis": np.int32(1)} if weight.lut.shape[2] > 1 else {}),
        **({"name": name} if weight.is_scaled_after else {}),
    )
    if weight.is_scaled_after:
        return levels
    return mb.constexpr_blockwise_shift_scale(data=levels, scale=weight.scale, name=name)


# Evaluation of a saved program without Core ML: coremltools reads it and infers every value.
# Weights are decompressed by coremltools in their stored dtype; everything else runs in float32.


def read_weights(program: Program) -> dict[str, np.ndarray]:
    """Return the quantized weights that coremltools decompresses, by the name written."""
    (main,) = program.functions.values()
    scales = {op.name: op.val.val for op in main.operations if op.name.endswith(READ_SCALE)}
    scaled = [op for op in main.operations if op.op_type == "constexpr_blockwise_shift_scale"]
    found = {op.name: op.materialized_val_inference() for op in scaled}
    inside = {op.data.op for op in scaled}
    for op in main.operations:
        if op.op_type == "constexpr_lut_to_dense" and op not in inside:
            levels, scale = op.materialized_val_inference(), scales[op.name + READ_SCALE]
            found[op.name] = (np.float32(levels) * np.float32(scale)).astype(levels.dtype)
    return found


def read_scales(program: Program) -> dict[str, set[float]]:
    """Return the scales of `quantize` and `dequantize` before each linear that has them.

    The key is the name of its weight. The set has one scale if the two agree.
    """
    (main,) = program.functions.values()
    return {
        op.weight.op.name: {float(part.scale.val) for part in (op.x.op, op.x.op.input.op)}
        for op in main.operations
        if op.op_type == "linear" and op.x.op.op_type == "dequantize"
    }


def evaluate(program: Program, input_ids: np.ndarray) -> np.ndarray:
    """Return the output of a program with one input and one output, in float32.

    A look-up table is decompressed at each use and not kept.
    """
    (main,) = program.functions.values()
    (given,) = main.inputs.values()
    values = {given: input_ids.astype(np.int32)}
    with Function({}, opset_version=OPSET):
        for op in main.operations:
            if op.op_type != "const" and not op.op_type.startswith("constexpr_"):
                values.update(zip(op.outputs, _outputs(op, values), strict=True))
    return values[main.outputs[0]]


def _outputs(op: Operation, values: dict[Var, np.ndarray]) -> list[np.ndarray]:
    inputs = {
        name: [_value(part, values) for part in var]
        if isinstance(var, list | tuple)
        else _value(var, values)
        for name, var in op.inputs.items()
        if var is not None
    }
    if op.op_type == "silu":  # coremltools infers no value for silu
        return [inputs["x"] / (1 + np.exp(-inputs["x"]))]
    if op.op_type == "cast":
        return [inputs["x"]]
    made = getattr(mb, op.op_type)(**inputs)
    if op.op_type == "dequantize":  # its value must be requested, as for a table
        return [made.op.materialized_val_inference()]
    return [var.val for var in (made if isinstance(made, list | tuple) else (made,))]


def _value(var: Var, values: dict[Var, np.ndarray]) -> np.ndarray:
    """Return the value of a variable, with halves as float32."""
    if var in values:
        return values[var]
    is_table = var.op.op_type.startswith("constexpr_")
    value = var.op.materialized_val_inference() if is_table else var.val
    return value.astype(np.float32) if getattr(value, "dtype", None) == np.float16 else value
