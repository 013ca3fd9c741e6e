"""Random quantized weights and models for the tests: no fitting, any values will do."""

from typing import Any

import torch
from tiny import tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.models.document_attention import set_kv
from qat.models.stored_state import quantized_modules
from qat.nn.activation import ActivationQuantizer
from qat.nn.quant_linear import FrozenLutLinear, LutLinear, QuantLinear, quant_linears
from qat.nn.swap import ascending, linear_names, replace_module
from qat.quant.codebook import fixed_grid
from qat.quant.error_feedback import fit_all_to_inputs
from qat.quant.spec import ACTIVATION_KINDS, ActivationKind, ActivationSpec, KvSpec, LutSpec
from qat.quant.weight import QuantizedWeight, Scales, as_stored, index_dtype

SPECS = {
    "lut1": LutSpec(bits=1, group_size=8),
    "lut2": LutSpec(bits=2, group_size=16),
    "lut3": LutSpec(bits=3, group_size=32),
    "lut4": LutSpec(bits=4, group_size=8),
    "seq1": LutSpec(bits=1, codebook="seq", group_size=16),
    "seq2": LutSpec(bits=2, codebook="seq", group_size=16),
    "int3": LutSpec(bits=3, codebook="int", group_size=8),
    "ternary": LutSpec(bits=2, codebook="ternary", group_size=16),
    "e2m1": LutSpec(bits=4, codebook="e2m1", group_size=16, scale_bits=8),
    "lut2_s8": LutSpec(bits=2, group_size=8, scale_bits=8),
    "int3_s8": LutSpec(bits=3, codebook="int", group_size=16, scale_bits=8),
    "lut2_r4": LutSpec(bits=2, scale="low_rank", rank=4, group_size=16),
    "lut4_r1": LutSpec(bits=4, scale="low_rank", rank=1, group_size=8),
    "int4_r3": LutSpec(bits=4, codebook="int", scale="low_rank", rank=3, group_size=8),
    "ternary_r2": LutSpec(bits=2, codebook="ternary", scale="low_rank", rank=2, group_size=8),
    "pairs6": LutSpec(bits=6, vector_size=2, group_size=16),
    "fours8_s8": LutSpec(bits=8, vector_size=4, group_size=16, scale_bits=8),
    "sparse": LutSpec(bits=5, vector_size=4, codebook="ternary", group_size=16, scale_bits=8),
    "eights3": LutSpec(bits=3, vector_size=8, group_size=8),
    "fours10_r2": LutSpec(bits=10, vector_size=4, scale="low_rank", rank=2, group_size=8),
}

KINDS = ("lut1", "seq2", "int3_s8", "e2m1", "lut2_r4", "ternary_r2", "pairs6", "fours10_r2")
"""A format of each kind of levels and scales, for tests of what all formats pass alike."""


def e5m3_values() -> Tensor:
    """The finite values of 5 exponent and 3 mantissa bits, ascending, `(248,)` float64."""
    subnormal = [m * 2.0**-17 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 15) for e in range(1, 31) for m in range(8)]
    return torch.tensor(subnormal + normal, dtype=torch.float64)


def nearest_e5m3(scales: Tensor, bits: int = 8) -> Tensor:
    """The finite value nearest to each scale's float16, the one of even mantissa for a tie.

    With 5 bits it is a power of two, the larger one for a tie, or zero.
    """
    values = e5m3_values().to(scales.device)[:: 1 if bits == 8 else 8]
    distance = (scales.half().double()[..., None] - values).abs()
    near = (distance == distance.amin(-1, keepdim=True)).double()
    if bits == 8:
        near[..., ::2] *= 2
    else:
        near[..., 1:] *= torch.arange(1, len(values), device=values.device) / 1.5
    return values[near.argmax(-1)].float()


def random_codebook(spec: LutSpec) -> Tensor:
    """Ascending levels of the spec's kind, or codewords."""
    if spec.vector_size > 1 and spec.codebook == "lut":
        return torch.randn(spec.codebook_shape)
    if spec.codebook == "lut":
        return torch.randn(spec.num_levels).sort().values
    if spec.codebook in ("ternary", "e2m1"):
        return fixed_grid(spec)
    half = 2 ** (spec.bits - 1)
    levels = torch.arange(-half, half).float()
    return levels if spec.codebook == "int" else levels + 0.5


def random_scales(O: int, I: int, spec: LutSpec) -> Scales:
    """Scales of the spec's form: a low-rank `S` has both signs."""
    if spec.scale == "group":
        return Scales(torch.rand(O, I // spec.group_size) * 0.1 + 0.01, bits=spec.scale_bits)
    R = spec.rank
    A, g, B = torch.randn(O, R) * 0.3, torch.rand(R), torch.randn(R, I) * 0.3
    return Scales(None, A, g, B, bits=spec.scale_bits)


def random_indices(O: int, I: int, spec: LutSpec) -> Tensor:
    """Any indices that the spec can hold."""
    shape, dtype = (O, I // spec.vector_size), index_dtype(spec.num_levels)
    return torch.randint(spec.num_levels, shape, dtype=dtype)


def random_weight(O: int, I: int, spec: LutSpec) -> QuantizedWeight:
    """A quantized weight of random indices, levels and scales, as a checkpoint stores them."""
    indices = random_indices(O, I, spec)
    return as_stored(QuantizedWeight(indices, random_codebook(spec), random_scales(O, I, spec)))


def frozen_linear(O: int, I: int, spec: LutSpec, bias: bool = False) -> FrozenLutLinear:
    """A random linear with packed indices."""
    return FrozenLutLinear(random_weight(O, I, spec), torch.randn(O) if bias else None, spec)


def latent_linear(O: int, I: int, spec: LutSpec, bias: bool = False) -> LutLinear:
    """A random linear with a latent weight."""
    quantized = random_weight(O, I, spec)
    return LutLinear(torch.randn(O, I) * 0.1, quantized, torch.randn(O) if bias else None, spec)


def with_random_codes(model: PreTrainedModel, spec: LutSpec) -> PreTrainedModel:
    """The same model, whose block linears are all quantized at random."""
    for name in linear_names(model):
        linear: nn.Linear = model.get_submodule(name)
        bias = None if linear.bias is None else torch.randn_like(linear.bias)
        quantized = random_weight(*linear.weight.shape, spec)
        replace_module(model, name, FrozenLutLinear(quantized, bias, spec).eval())
    return model


def tiny_quantized(architecture: str, spec: LutSpec, **overrides: object) -> PreTrainedModel:
    """A tiny model with random codes."""
    return with_random_codes(tiny_model(architecture, **overrides), spec)


def with_adapter(linear: QuantLinear, rank: int = 3) -> QuantLinear:
    """The same linear with an adapter that does something."""
    linear.add_lora(rank, torch.Generator().manual_seed(0))
    with torch.no_grad():
        linear.lora_out.normal_(0, 0.1)
    return linear


def tiny_adapted(architecture: str, spec: LutSpec, **overrides: object) -> PreTrainedModel:
    """Return a `tiny_quantized` in which each linear has an adapter of rank 3 with an effect."""
    model = tiny_quantized(architecture, spec, **overrides)
    for linear in quant_linears(model).values():
        with_adapter(linear)
    return model


SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""The linear of the same layer that reads the same tensor, by name."""


ROUNDINGS = [*((kind, 32) for kind in ACTIVATION_KINDS), ("int8-static", 16)]
"""Ways to round an input: a kind, and the bits of a static scale."""


def rounding(
    kind: ActivationKind, scale: float = 0.02, scale_bits: int = 32
) -> ActivationQuantizer:
    """Return a quantizer of inputs; `scale`, in `scale_bits` bits, is for static kinds."""
    spec = ActivationSpec(kind=kind, scale_bits=scale_bits)
    return ActivationQuantizer(spec, torch.tensor(scale) if spec.is_static else None)


def with_rounded_inputs(
    model: PreTrainedModel, kind: ActivationKind, scale_bits: int = 32
) -> PreTrainedModel:
    """The same model, whose quantized linears and tables round what they read.

    Each static scale is another one; no 16 bits hold them as they are.
    """
    modules = quantized_modules(model)
    for number, (name, module) in enumerate(modules.items()):
        owner, _, own = name.rpartition(".")
        module.activation = rounding(kind, 0.0123 * (1 + number), scale_bits)
        if own in SAME_INPUT:
            module.activation = modules[f"{owner}.{SAME_INPUT[own]}"].activation
    return model


def with_kv(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """The same model, which keeps keys and values in so many bits."""
    set_kv(model, KvSpec(bits=bits))
    return model


def to_frozen(model: nn.Module) -> None:
    """Replace every `LutLinear` by the `FrozenLutLinear` of the same weight, bit for bit."""
    for name, module in quant_linears(model).items():
        if isinstance(module, LutLinear):
            frozen = FrozenLutLinear(ascending(module.quantized()), module.bias, module.spec)
            frozen.set_lora(module.lora())
            frozen.activation = module.activation
            replace_module(model, name, frozen.train(module.training))


def fit_to_inputs(weight: Tensor, spec: LutSpec, hessian: Tensor) -> QuantizedWeight:
    """One weight, fitted to the inputs behind `hessian` `(I, I)`."""
    (fit,) = fit_all_to_inputs([weight], spec, hessian)
    return fit.quantized


def gradients(model: Any, ids: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return hidden states of a LanguageModel, and the gradients by name of a weighed sum."""
    model.model.zero_grad()
    hidden = model.hidden(ids, positions)
    # not its square: behind the last norm that is the same for all
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    named = model.model.named_parameters()
    return hidden.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}
