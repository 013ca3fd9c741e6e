"""A linear whose weight is `W = codebook[indices] * S`, plus an adapter if it has one.

`QuantLinear` is what all forms share: form `W`, run one matmul, pull the gradient of `W` back to
what it is made of. `d_codebook[c]` sums `dW * S` where the index is `c`; the scale of a group sums
`dW * codebook[indices]` over it. `FrozenLutLinear` has packed indices; `LutLinear` a latent weight
that they follow, which takes `dW` as it is. A formed weight is a leaf of autograd that hands its
gradient on and keeps none: `room_for`.

Shapes: O out_features, I in_features, C codebook entries.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.kernels.dispatch import use_triton
from qat.kernels.lut_gemm import Part, is_format, lut_gemm
from qat.kernels.lut_weight import choose, form, levels_as_stored, pull_back
from qat.nn.activation import ActivationQuantizer, read
from qat.quant.codebook import latent_indices
from qat.quant.lora import (
    LORA_NAMES,
    Lora,
    add_product_,
    factor_size,
    pull_back_product,
    random_lora,
    round_lora,
)
from qat.quant.spec import LutSpec
from qat.quant.weight import (
    SCALE_NAMES,
    PackedIndices,
    QuantizedWeight,
    Scales,
    expand_scales,
    pack,
    rms,
    round_scales,
    to_stored,
)

KIND_OF = {
    "weight": "weights",
    "codebook": "codebook",
    **dict.fromkeys(SCALE_NAMES, "scales"),
    **dict.fromkeys(LORA_NAMES, "lora"),
}
"""The kind of each parameter that a quantized weight is made of, as `learn` names it."""


class Turn(NamedTuple):
    """Memory for the weights of one layer, which equal layers write theirs into one by one."""

    rooms: dict[tuple[object, ...], Tensor]
    number: int
    """Of a weight among those of its shape in the layer, which are there together."""

    def room(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory of this weight, as a tensor of its own.

        So autograd does not miss what it saved: that is there again when backward reads it.
        """
        kind = (self.number, shape, dtype, device)
        if kind not in self.rooms:
            self.rooms[kind] = torch.empty(shape, dtype=dtype, device=device)
        return self.rooms[kind].data


def room_for(
    old: Tensor | None,
    like: Tensor,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype,
    take_gradient: Callable[[Tensor], None] | None,
    turn: Turn | None,
) -> Tensor:
    """Where to write a weight: `old` again where it fits, so that its address stays, or a new one.

    With `take_gradient` the weight requires a gradient, which goes there as soon as it is complete
    and is freed before another weight's; None if nothing behind the weight learns. With a `turn`
    the memory is that of other layers' too.
    """
    learns = take_gradient is not None
    kind = (shape, dtype, like.device, learns)
    if old is not None and (tuple(old.shape), old.dtype, old.device, old.requires_grad) == kind:
        return old
    made = torch.empty if turn is None else turn.room
    room = made(shape, dtype=dtype, device=like.device).requires_grad_(learns)
    if take_gradient is not None:

        def hand_on(weight: Tensor) -> None:
            dW, weight.grad = weight.grad, None
            if dW is not None:  # undefined where nothing differentiable reads the weight
                take_gradient(dW)

        room.register_post_accumulate_grad_hook(hand_on)
    return room


def keeping_dtype(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Where `fn` puts a tensor: `model.to(bfloat16)` must not round what a weight is made of."""
    applied = fn(tensor)
    return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)


class QuantLinear(nn.Module):
    """`y = x @ W.T + bias` with `W = codebook[indices] * S`; a subclass says where indices lie.

    An adapter, if there is one, is part of the weight: `W = codebook[indices] * S + lora_out @
    lora_in`, so that its linear runs the same single matmul.

    Used alone, forward forms `W` and backward pulls its gradient back inside one autograd function.
    In a training step `form_` writes `W` once; every forward until the next `form_` is then a plain
    matmul with it, and as soon as its gradient is complete it is pulled back and freed.

    With an `activation` the product is of the quantized input: `y = read(x) @ W.T + bias`.
    """

    formed: Tensor | None
    turn: Turn | None = None
    """Where it is formed if its layer is formed alone (`qat.nn.step.form_by_layer`)."""
    lora_in: nn.Parameter | None
    activation: ActivationQuantizer | None

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None, spec: LutSpec) -> None:
        super().__init__()
        self.spec = spec
        self.out_features, self.in_features = quantized.shape
        self.codebook = nn.Parameter(quantized.codebook.float().clone())
        for name, tensor in quantized.scales.present().items():
            self.register_parameter(name, nn.Parameter(tensor.float().clone()))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.register_buffer("formed", None, persistent=False)
        self.register_module("activation", None)
        self._joined: tuple[Any, slice] = (None, slice(0))
        self.set_lora(None)

    def source(self) -> PackedIndices | Tensor:
        """Packed indices, or the latent weight that they follow; no gradient."""
        raise NotImplementedError

    def indices(self) -> Tensor:
        """Which level or codeword is taken: `(O, I / d)`, no gradient."""
        raise NotImplementedError

    def levels(self, out: Tensor | None = None) -> Tensor:
        """The codebook as forward computes with it, no gradient; written into `out` if given."""
        return levels_as_stored(self.codebook.detach(), self.spec.level_bits, out=out)

    def scale_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the scale, by name."""
        return {name: self.get_parameter(name) for name in SCALE_NAMES if name in self._parameters}

    def scales_as_stored(self) -> Scales:
        """The scales, rounded as a checkpoint stores them, float32, no gradient."""
        return round_scales(self._raw_scales())

    def _source_scales(self) -> Scales:
        """The scales of the rows of `source`, as they learn, no gradient."""
        return self._raw_scales()

    def _raw_scales(self) -> Scales:
        parts = {name: p.detach() for name, p in self.scale_parameters().items()}
        return Scales(**parts, bits=self.spec.scale_bits)

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """The factors of the adapter, by name; none without one."""
        factors = {name: self._parameters[name] for name in LORA_NAMES}
        return {name: factor for name, factor in factors.items() if factor is not None}

    @property
    def lora_rank(self) -> int:
        """The rank of the adapter; 0 without one."""
        return 0 if self.lora_in is None else self.lora_in.shape[0]

    def lora(self) -> Lora | None:
        """The adapter, rounded as a checkpoint stores it, float32, no gradient."""
        raw = self._raw_lora()
        return None if raw is None else round_lora(raw)

    def set_lora(self, lora: Lora | None) -> None:
        """Put this adapter in the place of the one that there is, if any."""
        for name in LORA_NAMES:
            factor = None if lora is None else nn.Parameter(getattr(lora, name).float().clone())
            self.register_parameter(name, factor)
        self.release_()

    @torch.no_grad()
    def add_lora(self, rank: int, generator: torch.Generator) -> None:
        """Add an adapter that does not change the function yet; `generator` is the CPU's."""
        self.set_lora(random_lora(self._quantized_part(), rank, generator))

    @torch.no_grad()
    def lora_size(self) -> float:
        """The natural size of the adapter's factors (`qat.quant.lora.factor_size`)."""
        return factor_size(self._quantized_part(), self.lora_rank)

    def _raw_lora(self) -> Lora | None:
        factors = self.lora_parameters()
        return Lora(**{name: f.detach() for name, f in factors.items()}) if factors else None

    def _quantized_part(self, *, again: bool = False) -> Tensor:
        """`codebook[indices] * S`, without the adapter, in float32."""
        return self._form(torch.float32, again=again)

    def _form(
        self, dtype: torch.dtype, out: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        """`codebook[indices] * S`, `(O, I)`; `again` if nothing has moved since the last time."""
        return form(*self._made_of(), self._source_scales(), dtype, out=out)

    def _made_of(self) -> tuple[PackedIndices | Tensor, Tensor]:
        """The source and the levels of the last forming."""
        return self.source(), self.levels()

    def quantized(self) -> QuantizedWeight:
        """What a checkpoint would hold now beside the adapter: what forward computes with."""
        return QuantizedWeight(self.indices(), self.levels(), self.scales_as_stored())

    @torch.no_grad()
    def quantized_weight(
        self, dtype: torch.dtype = torch.float32, out: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        """The weight that forward computes with and export writes, `(O, I)`, no gradient.

        `again` says that nothing has moved since it was formed last: codes need not be sought.
        """
        lora = self._raw_lora()
        if lora is None:
            return self._form(dtype, out, again=again)
        weight = add_product_(self._quantized_part(again=again), lora)
        return weight.to(dtype) if out is None else out.copy_(weight)

    @torch.no_grad()
    def form_(self, dtype: torch.dtype) -> None:
        """Write `W` for the coming forwards; what learns gets its gradient through it.

        The memory of the last `W` is used again where dtype and device still fit, so that its
        address stays. If its layer is formed alone, this makes room and the layer calls `write_`.
        """
        self.formed = room_for(
            self.formed,
            self.codebook,
            (self.out_features, self.in_features),
            dtype=dtype,
            take_gradient=self.pull_back_ if self.learns() else None,
            turn=self.turn,
        )
        if self.turn is None:
            self.quantized_weight(dtype, out=self.formed)

    def write_(self, *, again: bool) -> None:
        """Write `W` where `form_` made room; `again` if nothing has moved since the last time."""
        if self.formed is not None:
            self.quantized_weight(self.formed.dtype, out=self.formed.data, again=again)

    def join(self, joined: nn.Module | None, rows: slice) -> None:
        """Let `joined` form this weight, as `rows` of its own; None ends that."""
        self.release_()
        self._joined = (joined, rows)  # a tuple: a submodule would own this one

    def release_(self) -> None:
        """Drop the formed weight: the next forward forms its own."""
        self.formed = None

    def weight_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that the weight is made of, by name; the bias is not among them."""
        return {"codebook": self.codebook, **self.scale_parameters(), **self.lora_parameters()}

    @torch.no_grad()
    def pulled_back(self, dW: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        """The gradient that `dW` implies for each of `weight_parameters` that is `wanted`."""
        with torch.autocast(dW.device.type, enabled=False):
            lora, scales = self._raw_lora(), self._source_scales()
            gradients = {} if lora is None else pull_back_product(dW, lora, wanted)
            return gradients | pull_back(dW, *self._made_of(), scales, wanted=wanted)

    def learns(self) -> bool:
        """Whether anything that the weight is made of gets gradients."""
        return bool(self._learning())

    def _learning(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weight_parameters().items() if p.requires_grad}

    @torch.no_grad()
    def pull_back_(self, dW: Tensor) -> None:
        """Add what `dW` implies to the gradients of what learns."""
        self._add_(self.pulled_back(dW, self._learning()))

    @torch.no_grad()
    def _add_(self, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad += gradient

    def forward(self, x: Tensor) -> Tensor:
        """`(..., I)` to `(..., O)`."""
        return self.product(read(self, x))

    def product(self, x: Tensor) -> Tensor:
        """`x @ W.T + bias` of an input that is quantized already: `(..., I)` to `(..., O)`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight_in(x.dtype), bias)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """The weight that forward multiplies with: the formed one, else one formed now in `dtype`.

        Its gradient is pulled back to what it is made of.
        """
        joined, rows = self._joined
        if joined is not None and joined.formed is not None:
            return cast(Tensor, joined.formed[rows])
        if self.formed is not None:
            return self.formed
        parameters = self.weight_parameters()
        return _FormedWeight.apply(self, tuple(parameters), dtype, *parameters.values())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(partial(keeping_dtype, fn), recurse)

    def extra_repr(self) -> str:
        """Shape and format, for `print(model)`."""
        scale = f"group_size={self.spec.group_size}, scale_bits={self.spec.scale_bits}"
        if self.spec.scale == "low_rank":
            scale = f"rank={self.spec.rank}"
        adapter = f", lora_rank={self.lora_rank}" if self.lora_rank else ""
        spec = self.spec
        vectors = f"vector_size={spec.vector_size}, " if spec.is_vector else ""
        trellis = f"trellis_bits={spec.trellis_bits}, " if spec.is_trellis else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bits={spec.bits}, {vectors}{trellis}codebook={spec.codebook}, {scale}, "
            f"bias={self.bias is not None}{adapter}"
        )


class _FormedWeight(torch.autograd.Function):
    """Form in forward, pull back in backward: the step's three acts for a linear used alone."""

    @staticmethod
    def forward(
        ctx: Any, linear: QuantLinear, names: tuple[str, ...], dtype: torch.dtype, *_: Tensor
    ) -> Tensor:
        ctx.linear, ctx.names = linear, names
        return linear.quantized_weight(dtype)

    @staticmethod
    def backward(ctx: Any, dW: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        wanted = [name for name, is_needed in zip(ctx.names, needed, strict=True) if is_needed]
        gradients = ctx.linear.pulled_back(dW, wanted)
        return None, None, None, *(gradients.get(name) for name in ctx.names)


class FrozenLutLinear(QuantLinear):
    """The form of a checkpoint: `bits` bits per index in memory, a fraction of a latent weight.

    Where no gradient is wanted, vectors of 16 bits are multiplied straight from the packed indices
    if there is a kernel (`qat.kernels.lut_gemm`).
    """

    packed: Tensor
    _stored: tuple[tuple[int, ...], Part] | None

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None, spec: LutSpec) -> None:
        super().__init__(quantized, bias, spec)
        self.register_buffer("packed", pack(quantized.indices, spec.bits, spec.trellis_bits))

    def source(self) -> PackedIndices:
        """The packed indices."""
        spec = self.spec
        return PackedIndices(
            self.packed, spec.bits, self.in_features, spec.vector_size, spec.trellis_bits
        )

    def indices(self) -> Tensor:
        """The stored index of each weight or vector: `(O, I / d)`."""
        return self.source().indices()

    def form_(self, dtype: torch.dtype) -> None:
        """As for any quantized linear."""
        super().form_(dtype)
        self._stored = None  # what learns may change in a recorded graph, which no version tells

    def release_(self) -> None:
        """As for any quantized linear."""
        super().release_()
        self._stored = None

    def product(self, x: Tensor) -> Tensor:
        """As for any quantized linear."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not self._reads_packed(x):
            return super().product(x)
        return lut_gemm(x, [self._as_stored()], self.bias)

    def _reads_packed(self, x: Tensor) -> bool:
        spec = self.spec
        return (
            x.dtype in (torch.bfloat16, torch.float16)
            and self.formed is None
            and self._joined[0] is None
            and not self.lora_rank
            and spec.scale == "group"
            and not spec.is_trellis
            and is_format(spec.bits, spec.vector_size, spec.group_size, self.in_features)
            and use_triton(x)
        )

    def _as_stored(self) -> Part:
        """The weight as a checkpoint stores it: scales are encoded again once they changed."""
        scales = self.get_parameter("scales")
        version = 0 if scales.is_inference() else scales._version
        now = (scales.data_ptr(), version, self.codebook.data_ptr(), self.packed.data_ptr())
        if self._stored is None or self._stored[0] != now:
            encoded = to_stored("scales", self.scales_as_stored().by_group(), self.spec.scale_bits)
            self._stored = now, Part(self.packed, encoded, self.levels(), self.spec.bits)
        return self._stored[1]


class LutLinear(QuantLinear):
    """Codes follow a latent weight; forward uses only weights that the exported model can hold.

    The latent weight keeps the dtype that it is given, float32 or bfloat16. Backward passes the
    gradient of the quantized weight to `weight` unchanged (straight-through
    estimator, arXiv:1308.3432) and the exact gradient to `codebook` and the scales.

    Codewords of vectors and paths through a trellis take long to find: forming leaves their
    indices, a byte or two each, and the levels, and pulling back uses these until the next forming.
    They are freed with the formed weight, and where nothing learns they are not kept.
    """

    _chosen: tuple[PackedIndices, Tensor] | None

    def __init__(
        self, weight: Tensor, quantized: QuantizedWeight, bias: Tensor | None, spec: LutSpec
    ) -> None:
        super().__init__(quantized, bias, spec)
        self.weight = nn.Parameter(weight.detach().clone())
        self._latent_size = rms(weight)

    def source(self) -> PackedIndices | Tensor:
        """The latent weight."""
        return self.get_parameter("weight").detach()  # `qat.nn.sites` may lay another over it

    @torch.no_grad()
    def indices(self) -> Tensor:
        """What is nearest to each latent weight, vector or row under the scales as stored."""
        levels = self.levels()
        source = self._choose(levels)
        if isinstance(source, PackedIndices):
            return source.indices()
        S = expand_scales(round_scales(self._source_scales()), self.in_features)
        return latent_indices(source, S, levels)

    def _choose(self, levels: Tensor, out: PackedIndices | None = None) -> PackedIndices | Tensor:
        scales, k = self._source_scales(), self.spec.trellis_bits
        return choose(self.source(), levels, scales, trellis_bits=k, out=out)

    def _form(
        self, dtype: torch.dtype, out: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        if again:
            return form(*self._made_of(), self._source_scales(), dtype, out=out)
        # both are written over where they lie: a recorded backward reads them there
        room, old_levels = self._chosen or (None, None)
        levels = self.levels(out=old_levels)
        source = self._choose(levels, out=room)
        if isinstance(source, PackedIndices) and self.learns():
            self._chosen = source, levels
        return form(source, levels, self._source_scales(), dtype, out=out)

    def _made_of(self) -> tuple[PackedIndices | Tensor, Tensor]:
        if self._chosen is not None:
            return self._chosen
        levels = self.levels()
        return self._choose(levels), levels

    def release_(self) -> None:
        """Drop the formed weight and what it was formed of."""
        super().release_()
        self._chosen = None

    def latent_size(self) -> float:
        """The natural size of the latent weight: the root mean square that it began with."""
        return self._latent_size

    def weight_parameters(self) -> dict[str, nn.Parameter]:
        """The latent weight, the codebook and the scales, by name."""
        return {"weight": self.weight, **super().weight_parameters()}

    def pulled_back(self, dW: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        """As for any quantized linear; the latent weight gets `dW` itself."""
        straight_through = {"weight": dW} if "weight" in wanted else {}
        return straight_through | super().pulled_back(dW, wanted)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._chosen = None  # no buffer: it would stay on the old device
        return super()._apply(fn, recurse)
