"""One decoding step in few launches: one token per sequence in, all logits out.

Norms, gated units and residual sums are fused into the linears (`kernels.lut_matvec`), queries,
keys and values are one product, and so are gates and ups. A layer takes four launches for linears
and two for attention, all captured in one graph. Weights that are packed stay packed.

Shapes: B sequences, N positions of the cache, V words, D model width, O out_features, I
in_features.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from qat.extensions.decode.kernels.cache import EVERY, Angles, Cache, Scoring
from qat.extensions.decode.kernels.decode_attention import decode_attention
from qat.extensions.decode.kernels.lut_gemm import Part, is_format, lut_gemm
from qat.extensions.decode.kernels.lut_matvec import (
    MOST_VECTORS,
    Norm,
    Stream,
    matvec,
    matvec_add,
    stream,
)
from qat.extensions.decode.kernels.lut_rows import (
    LutRows,
    Rows,
    order_of,
    reads,
    spread,
    stack,
    stacks,
)
from qat.kernels.lut_weight import form
from qat.models.attention import kv_spec
from qat.models.language_model import LanguageModel
from qat.models.regions import ATTENTIONS, MLPS, QKV, SILUS, as_written
from qat.nn.activation import ActivationQuantizer, activation_of, read, read_alike
from qat.nn.lut_embedding import QuantTable, TableHead
from qat.nn.quant_linear import QuantLinear, quant_linears
from qat.nn.swap import CACHE, decoder_layers, replace_module
from qat.quant.weight import PackedIndices, Scales, from_stored


class Scratch:
    """Memory for one formed weight at a time, shared by all layers of a model."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a weight of this shape and dtype, valid until the next call."""
        memory, size = self._memory, prod(shape)
        is_fit = memory is not None and (memory.dtype, memory.device) == (dtype, device)
        if not is_fit or memory.numel() < size:
            self._memory = torch.empty(size, dtype=dtype, device=device)
        return self._memory[:size].view(shape)


def form_rows(rows: LutRows, out: Tensor) -> Tensor:
    """Dequantize packed rows into the weight `out` `(O, I)`, rounding each number once."""
    bits, ends = 8 * rows.scales.element_size(), (*rows.starts[1:], rows.shape[0])
    for index, (start, end) in enumerate(zip(rows.starts, ends, strict=True)):
        part = rows.part(index)
        scales = Scales(from_stored("scales", part.scales, bits), bits=bits)
        source = PackedIndices(part.octets, part.bits, rows.shape[1], part.vector_size)
        form(source, part.codebooks[0], scales, out.dtype, out=out[start:end])
    return out


class PackedLinear(nn.Module):
    """`y = x @ W.T + bias` with the packed `W = codebook[indices] * S` of a frozen linear.

    Up to 8 tokens are multiplied in float32, more in their own dtype (`kernels.lut_gemm`). If
    the format does not allow that, or with so many tokens that a library is faster, the weight is
    formed in a buffer that all layers share. It has no trainable parameters and no state. Its input
    is quantized as in the frozen linear.
    """

    def __init__(self, linear: QuantLinear, rows: LutRows, scratch: Scratch) -> None:
        super().__init__()
        self.out_features, self.in_features = rows.shape
        self.rows, self.spec = rows, linear.spec
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.activation = linear.activation
        self._scratch = scratch

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Form `W`, `(O, I)` in `dtype`; valid until another layer of the model forms its own."""
        out = self._scratch.room(self.rows.shape, dtype, self.rows.octets.device)
        return form_rows(self.rows, out)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: `(..., I)` to `(..., O)`."""
        x = read(self, x)
        if x.numel() > MOST_VECTORS * self.in_features:
            spec = self.spec
            if is_format(spec.bits, spec.vector_size, spec.group_size, self.in_features):
                return lut_gemm(x, Part.of(self.rows), self.bias, room=self._scratch.room)
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight_in(x.dtype), bias)
        flat = spread(x.reshape(-1, self.in_features), order_of(self.rows))
        y = matvec(flat, self.rows, bias=self.bias)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


STATIC_ANGLES = ("default", "linear", "llama3", "yarn")
"""Rotary embedding types whose angles do not depend on the sequence length."""
LARGEST_HEAD = 256  # maximum head width of the decode attention


class DenseLinear(nn.Linear):
    """A plain linear that replaces a quantized one and quantizes its input in the same way."""

    activation: ActivationQuantizer | None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: `(..., I)` to `(..., O)`."""
        return super().forward(read(self, x))


class FusedLinears(NamedTuple):
    """Linears with the same input, as one stacked matrix or one after the other."""

    rows: tuple[Rows, ...]
    bias: Tensor | None
    activation: ActivationQuantizer | None
    """Quantizer of the input. It needs the normed input in `dtype`, so the norm is not fused
    then."""
    dtype: torch.dtype

    @classmethod
    def of(cls, linears: Sequence[nn.Module], dtype: torch.dtype) -> Self:
        """Stack the linears where possible, packed if all are; their modules share the memory."""
        members = [_rows(linear) for linear in linears]
        if len({order_of(rows) for rows in members}) > 1:
            members = [_dense(linear, dtype) for linear in linears]
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat([b.detach().float() for b in biases])
        how = bias, activation_of(linears[0]), dtype
        if len(members) == 1 or not stacks(members):
            return cls(tuple(members), *how)
        joined = stack(members)
        _hand_back(linears, joined)
        return cls((joined,), *how)

    @property
    def order(self) -> int:
        """Order in which the input must be given; 1 (unchanged) if it is still to be quantized."""
        return order_of(self.rows[0]) if self.activation is None else 1

    def _read(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Return the input in the order of the rows, and the norm to fuse into the product."""
        if self.activation is None:
            return x, norm
        if norm is not None:
            x = x * torch.rsqrt(norm.squares.sum(1, keepdim=True) / x.shape[1] + norm.eps)
        return spread(self.activation(x.to(self.dtype)), order_of(self.rows[0])), None

    def __call__(
        self, x: Tensor, norm: Norm | None = None, *, is_gated: bool = False, order: int = 1
    ) -> Tensor:
        """Return the outputs side by side, as `matvec` does for one matrix."""
        x, norm = self._read(x, norm)
        if len(self.rows) == 1:
            return matvec(
                x, self.rows[0], norm=norm, bias=self.bias, is_gated=is_gated, order=order
            )
        parts = torch.cat([matvec(x, rows, norm=norm) for rows in self.rows], 1)
        if self.bias is not None:
            parts = parts + self.bias
        if is_gated:
            gate, up = parts.chunk(2, 1)
            parts = nn.functional.silu(gate) * up
        return spread(parts, order)

    def add(self, x: Tensor, residual: Tensor, gamma: Tensor, *, order: int) -> Stream:
        """Add the output to the residual stream, as `matvec_add` does; for a single linear."""
        x, _ = self._read(x, None)
        return matvec_add(x, self.rows[0], residual, gamma, bias=self.bias, order=order)


class DecodeLayer(NamedTuple):
    """The linears, norms and scoring of one layer."""

    qkv: FusedLinears
    heads: Scoring
    out: FusedLinears
    gate_up: FusedLinears
    down: FusedLinears
    before: Tensor
    """Gain of the norm before the attention, `(D,)` float32."""
    between: Tensor
    """Gain of the norm before the gated unit, `(D,)` float32."""


class DecodeStep:
    """Computes logits token by token; `prefill` processes the prompts.

    The result equals the model's up to summation order and rounding between layers, of which there
    is less here: the residual stream is float32. The model is modified: its linears become
    `PackedLinear` where they can be read packed, otherwise dense.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.dtype = model, model.dtype
        base, config = model.model.base_model, model.config
        _read_packed_(model.model, self.dtype)
        blocks = decoder_layers(model.model)
        self.blocks = [_block(layer, self.dtype) for layer in blocks]
        self.eps = config.rms_norm_eps
        self.last_gain = base.norm.weight.detach().float()
        self.embedding, self._rotary = model.model.get_input_embeddings(), base.rotary_emb
        head = model.head
        self.head = FusedLinears(
            (_head_rows(head, self.dtype),), head.bias, activation_of(head), self.dtype
        )
        self.num_key_heads = config.num_key_value_heads
        self.head_dim = blocks[0].self_attn.head_dim

    @staticmethod
    def fits(model: LanguageModel) -> bool:
        """Return whether the layers of the model's family are supported."""
        base = model.model.base_model
        rotary = getattr(base, "rotary_emb", None)
        return (
            model.softcap is None
            and hasattr(base, "norm")
            and getattr(rotary, "rope_type", None) in STATIC_ANGLES
            and all(_is_known(layer, rotary) for layer in decoder_layers(model.model))
        )

    @torch.no_grad()
    def angles(self, num_positions: int) -> Angles:
        """Return the float32 rotary angles of positions 0 ... N - 1."""
        device = self.model.device
        places = torch.arange(num_positions, device=device)[None]
        cos, sin = self._rotary(torch.empty(0, dtype=torch.float32, device=device), places)
        return Angles(cos[0].contiguous(), sin[0].contiguous())

    def new_caches(self, num_sequences: int, num_positions: int) -> list[Cache]:
        """Allocate empty caches of all layers, packed if the model quantizes keys and values."""
        shape = (num_sequences, self.num_key_heads, num_positions, self.head_dim)
        kv = kv_spec(self.model.config)
        bits = None if kv is None else kv.bits
        return [Cache.empty(shape, self.dtype, self.model.device, bits) for _ in self.blocks]

    @torch.no_grad()
    def prefill(self, ids: Tensor, num_positions: int) -> tuple[Tensor, list[Cache]]:
        """Return logits `(B, V)` after `ids` `(B, S)`, and filled caches of N positions."""
        with as_written(self.model.model):
            said = self.model.model.base_model(input_ids=ids, use_cache=True)
        caches = self.new_caches(ids.shape[0], num_positions)
        for cache, layer in zip(caches, said[CACHE].layers, strict=True):
            cache.put(layer.keys, layer.values, EVERY, EVERY, slice(ids.shape[1]))
        last = spread(said.last_hidden_state[:, -1], self.head.order)
        return self.head(last), caches

    @torch.no_grad()
    def logits(
        self,
        ids: Tensor,
        position: Tensor,
        caches: Sequence[Cache],
        angles: Angles,
        *,
        attend: Callable[..., Tensor] = decode_attention,
    ) -> Tensor:
        """Return logits `(B, V)` float32 after the tokens `ids` `(B,)` at `position` `(1,)`.

        Writes keys and values into `caches`. Does not synchronize with a GPU, so that it can be
        captured. Another `attend` may read the tokens as other than one of each sequence.
        """
        embedded = self.embedding(ids[:, None])[:, 0]
        flow = stream(embedded, self.blocks[0].before, self.blocks[0].qkv.order)
        following = [(block.before, block.qkv.order) for block in self.blocks[1:]]
        for block, cache, (gamma, order) in zip(
            self.blocks, caches, (*following, (self.last_gain, self.head.order)), strict=True
        ):
            qkv = block.qkv(flow.scaled, Norm(flow.squares, self.eps))
            said = attend(qkv, cache, position, angles, block.heads, order=block.out.order)
            flow = block.out.add(said, flow.residual, block.between, order=block.gate_up.order)
            gated = block.gate_up(
                flow.scaled, Norm(flow.squares, self.eps), is_gated=True, order=block.down.order
            )
            flow = block.down.add(gated, flow.residual, gamma, order=order)
        return self.head(flow.scaled, Norm(flow.squares, self.eps))


def read_bytes(step: DecodeStep) -> int:
    """Return the bytes of weights that one step reads: the embedding table is not counted."""
    groups = [g for b in step.blocks for g in (b.qkv, b.out, b.gate_up, b.down)]
    rows = [rows for group in (*groups, step.head) for rows in group.rows]
    tensors = [t for r in rows for t in ([r] if isinstance(r, Tensor) else [r.octets, r.scales])]
    return sum(tensor.nbytes for tensor in tensors)


def _is_known(layer: nn.Module, rotary: nn.Module) -> bool:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if type(attention) not in ATTENTIONS or type(mlp) not in MLPS:
        return False
    D = attention.head_dim
    together = [[getattr(attention, name) for name in QKV], [mlp.gate_proj, mlp.up_proj]]
    return (
        all(map(read_alike, together))
        and isinstance(mlp.act_fn, SILUS)
        and getattr(attention, "sliding_window", None) is None
        and D == 2 * rotary.inv_freq.numel()
        and D & (D - 1) == 0
        and D <= LARGEST_HEAD
    )


def _read_packed_(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace every quantized linear by a `PackedLinear`, or by a dense one."""
    scratch = Scratch()
    for name, linear in quant_linears(model).items():
        if reads(linear.spec) and not linear.lora_rank:
            rows = LutRows.of(
                linear.source(),
                linear.levels(),
                linear.scales_as_stored(),
                is_short=dtype != torch.float32,
            )
            replace_module(model, name, PackedLinear(linear, rows, scratch).eval())
        else:
            replace_module(model, name, dense_linear(linear, dtype))
    table = model.get_input_embeddings()
    if isinstance(table, QuantTable):
        table.formed = None


def dense_linear(linear: QuantLinear | TableHead, dtype: torch.dtype) -> DenseLinear:
    """Return a plain linear with the dequantized weight of a quantized one, in `dtype`."""
    quantized = linear.table if isinstance(linear, TableHead) else linear
    O, I = linear.out_features, linear.in_features
    dense = DenseLinear(I, O, bias=linear.bias is not None, device="meta")
    dense.activation = linear.activation
    dense.weight = nn.Parameter(quantized.quantized_weight(dtype), requires_grad=False)
    if linear.bias is not None:
        dense.bias = nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
    return dense.eval()


def _block(layer: nn.Module, dtype: torch.dtype) -> DecodeLayer:
    attention, mlp = layer.self_attn, layer.mlp
    gains = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    heads = Scoring(
        attention.scaling,
        *(None if norm is None else norm.weight.detach().float() for norm in gains),
        eps=0.0 if gains[0] is None else gains[0].variance_epsilon,
    )
    return DecodeLayer(
        FusedLinears.of([attention.q_proj, attention.k_proj, attention.v_proj], dtype),
        heads,
        FusedLinears.of([attention.o_proj], dtype),
        FusedLinears.of([mlp.gate_proj, mlp.up_proj], dtype),
        FusedLinears.of([mlp.down_proj], dtype),
        layer.input_layernorm.weight.detach().float(),
        layer.post_attention_layernorm.weight.detach().float(),
    )


def _rows(linear: nn.Module) -> Rows:
    return linear.rows if isinstance(linear, PackedLinear) else linear.weight.detach()


def _dense(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the weight in memory that is not shared."""
    is_packed = isinstance(linear, PackedLinear)
    return linear.weight_in(dtype).clone() if is_packed else linear.weight.detach()


def _hand_back(linears: Sequence[nn.Module], joined: Rows) -> None:
    """Let each module read its part of the stacked matrix, so that no weight is stored twice."""
    start = 0
    for part, linear in enumerate(linears):
        end = start + linear.out_features
        if isinstance(joined, Tensor):
            if isinstance(linear, nn.Linear):
                linear.weight.data = joined[start:end]
        else:
            linear.rows = joined.part(part)
        start = end


def _head_rows(head: nn.Module, dtype: torch.dtype) -> Rows:
    if isinstance(head, nn.Linear):
        return head.weight.detach()
    table = head.table
    if not reads(table.spec):
        return table.weight_in(dtype)
    parts = table.source(), table.levels(), table.scales_as_stored()
    return LutRows.of(*parts, is_short=dtype != torch.float32)
