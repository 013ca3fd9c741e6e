"""Weights `W = codebook[indices] * S`, plus a LoRA adapter if there is one: formed, pulled back.

`QuantWeight` is the common base of linears, embeddings and heads: it forms `W` and pulls the
gradient of `W` back to the parameters. `d_codebook[c]` sums `dW * S` over the weights with index
`c`; the gradient of a group's scale sums `dW * codebook[indices]` over the group. A `PackedWeight`
has packed indices; a `LatentWeight` has a latent weight that determines the indices and receives
`dW` unchanged. A formed weight is an autograd leaf whose hook passes its gradient on and then frees
it: `weight_buffer`.

Shapes: O out_features (words of a table), I in_features, C codebook entries.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from qat.kernels.lut_weight import choose, form, levels_as_stored, pull_back
from qat.nn.activation import ActivationQuantizer, keeping_dtype
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
)

KIND_OF = {  # of each parameter of a quantized weight, as named in the setting `learn`
    "weight": "weights",
    "codebook": "codebook",
    **dict.fromkeys(SCALE_NAMES, "scales"),
    **dict.fromkeys(LORA_NAMES, "lora"),
}


PIECE = 2**24  # weights of a table that plain PyTorch computes at a time


class SharedBuffer(NamedTuple):
    """The memory of one formed weight, which weights of other layers use in turn."""

    buffers: dict[tuple[object, ...], Tensor]
    number: int  # index among the weights of this shape in its layer

    def tensor(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return this weight's buffer as a separate tensor.

        Autograd's version check does not see that other layers overwrite the memory; the saved
        values are written again before backward reads them.
        """
        kind = (self.number, shape, dtype, device)
        if kind not in self.buffers:
            self.buffers[kind] = torch.empty(shape, dtype=dtype, device=device)
        return self.buffers[kind].data


def weight_buffer(
    old: Tensor | None,
    like: Tensor,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype,
    take_gradient: Callable[[Tensor], None] | None,
    shared_buffer: SharedBuffer | None,
) -> Tensor:
    """Return the tensor to write a weight to: `old` if it fits, so that its address stays, or new.

    With `take_gradient` the weight requires a gradient, which is passed to that function as soon as
    it is complete and freed before another weight's; None if no parameter of the weight learns.
    With `shared_buffer` the memory is shared with other layers.
    """
    learns = take_gradient is not None
    kind = (shape, dtype, like.device, learns)
    if old is not None and (tuple(old.shape), old.dtype, old.device, old.requires_grad) == kind:
        return old
    made = torch.empty if shared_buffer is None else shared_buffer.tensor
    buffer = made(shape, dtype=dtype, device=like.device).requires_grad_(learns)
    if take_gradient is not None:

        def pass_gradient(weight: Tensor) -> None:
            dW, weight.grad = weight.grad, None
            if dW is not None:  # None if nothing differentiable reads the weight
                take_gradient(dW)

        buffer.register_post_accumulate_grad_hook(pass_gradient)
    return buffer


class QuantWeight(nn.Module):
    """A weight `W = codebook[indices] * S`; subclasses define the indices, and what reads `W`.

    An adapter, if there is one, is part of the weight: `W = codebook[indices] * S + lora_out @
    lora_in`, so that a linear still runs a single matmul.

    Used alone, forward forms `W` and backward pulls its gradient back inside one autograd function.
    In a training step `form_` writes `W` once; every forward until the next `form_` then reads that
    tensor, and as soon as its gradient is complete it is pulled back and freed.
    """

    formed: Tensor | None
    shared_buffer: SharedBuffer | None = None
    """Shared memory for `formed` if the layer is formed on its own
    (`qat.nn.by_layer.form_by_layer`).
    """
    lora_in: nn.Parameter | None
    activation: ActivationQuantizer | None
    """The quantizer of what is multiplied by the weight; None without one."""

    def __init__(self, quantized: QuantizedWeight, spec: LutSpec) -> None:
        super().__init__()
        self.spec = spec
        self.out_features, self.in_features = quantized.shape
        self.codebook = nn.Parameter(quantized.codebook.float().clone())
        for name, tensor in quantized.scales.present().items():
            self.register_parameter(name, nn.Parameter(tensor.float().clone()))
        self.register_buffer("formed", None, persistent=False)
        self.register_module("activation", None)
        self.set_lora(None)

    def own(self) -> tuple[Any, ...]:
        """Return what the constructor takes behind the quantized weight, for another class."""
        raise NotImplementedError

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that forward uses: the formed one, or one formed now in `dtype`.

        Its gradient is pulled back to the parameters.
        """
        if self.formed is not None:
            return self.formed
        parameters = self.weight_parameters()
        return _FormedWeight.apply(self, tuple(parameters), dtype, *parameters.values())

    def release_(self) -> None:
        """Drop the formed weight; the next forward forms its own."""
        self.formed = None

    def source(self) -> PackedIndices | Tensor:
        """Return the packed indices, or the latent weight that determines them; no gradient."""
        raise NotImplementedError

    def indices(self) -> Tensor:
        """Return the index of each weight (for vectors, codeword), `(O, I / d)`, no gradient."""
        raise NotImplementedError

    def levels(self, out: Tensor | None = None) -> Tensor:
        """Return the codebook as forward uses it, no gradient; written into `out` if given."""
        return levels_as_stored(self.codebook.detach(), self.spec.level_bits, out=out)

    def scale_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the scales by name."""
        return {name: self.get_parameter(name) for name in SCALE_NAMES if name in self._parameters}

    def scales_as_stored(self) -> Scales:
        """Return the scales, rounded as a checkpoint stores them, float32, no gradient."""
        return round_scales(self._raw_scales())

    def _source_scales(self) -> Scales:
        """Return the unrounded scales for the rows of `source`, no gradient."""
        return self._raw_scales()

    def _raw_scales(self) -> Scales:
        parts = {name: p.detach() for name, p in self.scale_parameters().items()}
        return Scales(**parts, bits=self.spec.scale_bits)

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """Return the adapter's factors by name; empty without an adapter."""
        factors = {name: self._parameters[name] for name in LORA_NAMES}
        return {name: factor for name, factor in factors.items() if factor is not None}

    @property
    def lora_rank(self) -> int:
        """The rank of the adapter; 0 without one."""
        return 0 if self.lora_in is None else self.lora_in.shape[0]

    def lora(self) -> Lora | None:
        """Return the adapter, rounded as a checkpoint stores it, float32, no gradient."""
        raw = self._raw_lora()
        return None if raw is None else round_lora(raw)

    def set_lora(self, lora: Lora | None) -> None:
        """Replace the adapter, if any, by this one."""
        for name in LORA_NAMES:
            factor = None if lora is None else nn.Parameter(getattr(lora, name).float().clone())
            self.register_parameter(name, factor)
        self.release_()

    @torch.no_grad()
    def add_lora(self, rank: int, generator: torch.Generator) -> None:
        """Add an adapter that leaves the function unchanged; `generator` is a CPU generator."""
        self.set_lora(random_lora(self._quantized_part(), rank, generator))

    @torch.no_grad()
    def lora_size(self) -> float:
        """Return the natural size of the adapter's factors (`qat.quant.lora.factor_size`)."""
        return factor_size(self._quantized_part(), self.lora_rank)

    def _raw_lora(self) -> Lora | None:
        factors = self.lora_parameters()
        return Lora(**{name: f.detach() for name, f in factors.items()}) if factors else None

    def _quantized_part(self, *, again: bool = False) -> Tensor:
        """Return `codebook[indices] * S`, without the adapter, in float32."""
        return self._form(torch.float32, again=again)

    def _form(
        self, dtype: torch.dtype, out: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        """Return `codebook[indices] * S`, `(O, I)`; `again` if no parameter has changed since."""
        return form(*self._made_of(), self._source_scales(), dtype, out=out)

    def _made_of(self) -> tuple[PackedIndices | Tensor, Tensor]:
        """Return the source and the levels that the weight was last formed from."""
        return self.source(), self.levels()

    def quantized(self) -> QuantizedWeight:
        """Return the weight as a checkpoint stores it and forward uses it, without the adapter."""
        return QuantizedWeight(self.indices(), self.levels(), self.scales_as_stored())

    @torch.no_grad()
    def quantized_weight(
        self, dtype: torch.dtype = torch.float32, out: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        """Return the weight that forward computes with and export writes, `(O, I)`, no gradient.

        With `again`, no parameter has changed since the last forming, so the codes are not searched
        again.
        """
        lora = self._raw_lora()
        if lora is None:
            return self._form(dtype, out, again=again)
        weight = add_product_(self._quantized_part(again=again), lora)
        return weight.to(dtype) if out is None else out.copy_(weight)

    @torch.no_grad()
    def form_(self, dtype: torch.dtype) -> None:
        """Write `W` for the coming forwards; its gradient is pulled back to what learns.

        The memory of the last `W` is reused where dtype and device still match, so that its address
        stays. If the layer is formed on its own, this only allocates, and the layer calls `write_`.
        """
        self.formed = weight_buffer(
            self.formed,
            self.codebook,
            (self.out_features, self.in_features),
            dtype=dtype,
            take_gradient=self.pull_back_ if self.learns() else None,
            shared_buffer=self.shared_buffer,
        )
        if self.shared_buffer is None:
            self.quantized_weight(dtype, out=self.formed)

    def write_(self, *, again: bool) -> None:
        """Write `W` into the tensor from `form_`; `again` if no parameter has changed since."""
        if self.formed is not None:
            self.quantized_weight(self.formed.dtype, out=self.formed.data, again=again)

    def weight_parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters of the weight by name, without the bias."""
        return {"codebook": self.codebook, **self.scale_parameters(), **self.lora_parameters()}

    @torch.no_grad()
    def pulled_back(self, dW: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        """Return the gradients of the `wanted` parameters of the weight, given `dW`."""
        with torch.autocast(dW.device.type, enabled=False):
            lora, scales = self._raw_lora(), self._source_scales()
            gradients = {} if lora is None else pull_back_product(dW, lora, wanted)
            return gradients | pull_back(dW, *self._made_of(), scales, wanted=wanted)

    def learns(self) -> bool:
        """Return whether any parameter of the weight gets gradients."""
        return bool(self._learning())

    def _learning(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weight_parameters().items() if p.requires_grad}

    @torch.no_grad()
    def pull_back_(self, dW: Tensor) -> None:
        """Add the gradients that follow from `dW` to the parameters that learn."""
        self._add_(self.pulled_back(dW, self._learning()))

    @torch.no_grad()
    def _add_(self, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad += gradient

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(partial(keeping_dtype, fn), recurse)


class _FormedWeight(torch.autograd.Function):
    """Form in forward, pull back in backward, for a weight used outside a training step."""

    @staticmethod
    def forward(
        ctx: Any, owner: QuantWeight, names: tuple[str, ...], dtype: torch.dtype, *_: Tensor
    ) -> Tensor:
        ctx.owner, ctx.names = owner, names
        return owner.quantized_weight(dtype)

    @staticmethod
    def backward(ctx: Any, dW: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        wanted = [name for name, is_needed in zip(ctx.names, needed, strict=True) if is_needed]
        gradients = ctx.owner.pulled_back(dW, wanted)
        return None, None, None, *(gradients.get(name) for name in ctx.names)


class PackedWeight(QuantWeight):
    """A weight as stored in a checkpoint: `bits` bits per index in memory, no latent weight."""

    packed: Tensor

    def __init__(self, quantized: QuantizedWeight, *own: Any) -> None:  # noqa: ANN401
        super().__init__(quantized, *own)
        self.register_buffer("packed", pack(quantized.indices, self.spec.bits))

    def source(self) -> PackedIndices:
        """Return the packed indices."""
        spec = self.spec
        return PackedIndices(self.packed, spec.bits, self.in_features, spec.vector_size)

    def indices(self) -> Tensor:
        """Return the stored index of each weight or vector, `(O, I / d)`."""
        return self.source().indices()


class LatentWeight(QuantWeight):
    """A weight whose indices follow a latent weight; forward uses only exportable weights.

    The latent weight keeps its dtype, float32 or bfloat16. Backward passes the gradient of the
    quantized weight to `weight` unchanged (straight-through estimator, arXiv:1308.3432) and the
    exact gradient to `codebook` and the scales.

    Codewords of vectors are slow to find. For these, forming keeps their indices (a byte or two
    each) and the levels, and pulling back reuses them until the next forming. They are freed with
    the formed weight, and not kept where nothing learns.
    """

    _chosen: tuple[PackedIndices, Tensor] | None

    def __init__(self, weight: Tensor, quantized: QuantizedWeight, *own: Any) -> None:  # noqa: ANN401
        super().__init__(quantized, *own)
        self.weight = nn.Parameter(weight.detach().clone())
        self._latent_size = rms(weight)

    def source(self) -> PackedIndices | Tensor:
        """Return the latent weight."""
        return self.get_parameter("weight").detach()  # `qat.nn.sites` may shadow `weight`

    @torch.no_grad()
    def indices(self) -> Tensor:
        """Return the nearest index of each latent weight or vector under stored scales."""
        levels = self.levels()
        source = self._choose(levels)
        if isinstance(source, PackedIndices):
            return source.indices()
        scales, found = round_scales(self._source_scales()), []
        size = max(1, PIECE // self.in_features)
        for which in (slice(start, start + size) for start in range(0, len(source), size)):
            S = expand_scales(scales.of_rows(which), self.in_features)
            found.append(latent_indices(source[which], S, levels))
        return torch.cat(found)

    def _choose(self, levels: Tensor, out: PackedIndices | None = None) -> PackedIndices | Tensor:
        return choose(self.source(), levels, self._source_scales(), out=out)

    def _form(
        self, dtype: torch.dtype, out: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        if again:
            return form(*self._made_of(), self._source_scales(), dtype, out=out)
        # both are overwritten in place: a captured backward reads them at these addresses
        room, old_levels = self._chosen or (None, None)
        levels = self.levels(out=old_levels)
        source = self._choose(levels, out=room)
        if isinstance(source, PackedIndices) and self.learns():
            self._chosen = source, levels
        return form(source, levels, self._source_scales(), dtype, out=out)

    def _made_of(self) -> tuple[PackedIndices | Tensor, Tensor]:
        return self._chosen or super()._made_of()

    def release_(self) -> None:
        """Drop the formed weight and the indices it was formed from."""
        super().release_()
        self._chosen = None

    def latent_size(self) -> float:
        """Return the natural size of the latent weight: its root mean square at the start."""
        return self._latent_size

    def weight_parameters(self) -> dict[str, nn.Parameter]:
        """Return the latent weight, the codebook, the scales and the adapter's factors by name."""
        return {"weight": self.weight, **super().weight_parameters()}

    def pulled_back(self, dW: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        """See `QuantWeight`; the latent weight gets `dW` itself."""
        straight_through = {"weight": dW} if "weight" in wanted else {}
        return straight_through | super().pulled_back(dW, wanted)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._chosen = None  # not a buffer: it would stay on the old device
        return super()._apply(fn, recurse)


def quant_weights(model: nn.Module) -> dict[str, QuantWeight]:
    """Return the model's quantized weights by name: linears, embedding and head, in order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantWeight)}
