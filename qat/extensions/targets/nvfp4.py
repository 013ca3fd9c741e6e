"""Target `nvfp4`: weights as E2M1 under an E4M3 scale per 16 and one factor, for vLLM and others.

`W = e2m1 * e4m3 / factor`, as in compressed-tensors' `nvfp4-pack-quantized`. Our 8-bit scales have
3 mantissa bits as E4M3 does, and one exponent bit more: divided by a power of two a scale is an
E4M3 number, unless it is too far below the largest scale.
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor
from transformers import CompressedTensorsConfig, PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError
from qat.export.parts import any_model, reloaded_logits
from qat.extensions.targets import compressed_tensors
from qat.extensions.targets.shared import (
    float_linears,
    group_size_near,
    lost_by_grid,
    narrow_state,
    refuse_all_but_groups,
    write_tensors,
)
from qat.models.stored_state import quantized_modules
from qat.nn.quant_linear import QuantLinear
from qat.quant.codebook import E2M1, fixed_grid
from qat.quant.spec import LutSpec
from qat.quant.weight import SMALLEST, pack

COMPARED = "bits"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None,)
check = any_model
GRIDS = ("e2m1", "seq", "int", "ternary")
"""Codebooks that may consist of E2M1 values."""
GROUP_SIZE = 16
"""Weights of a row that share an E4M3 scale."""
LARGEST = 448.0
"""The largest finite E4M3 value."""
MOST_BITS = 4
"""Bits of E2M1."""
CODEBOOKS = {1: "seq", 2: "seq", 3: "int", 4: "e2m1"}
"""The grid of E2M1 values for each number of bits. At 2 bits seq loses less than int: the embedded
teacher, converted to `q2a2` with calibration, has a KL of 0.109 nats with seq and 0.148 with
int."""
FORM = "nvfp4-pack-quantized"
SETTINGS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": GROUP_SIZE,
    "dynamic": False,
}
HOW_TO_LOAD = """\
`vllm serve DIR`, or

```python
# pip install compressed-tensors
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

config = CompressedTensorsConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto", quantization_config=config)
```
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Grids of E2M1 values in groups of a multiple of 16, with 8-bit scales, lose nothing.
    """
    return lost_as_e2m1(spec, GROUP_SIZE, scale_bits=8)


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return the E2M1 grid of as many bits, or the plan's own if it is one, in groups of 16."""
    return e2m1_scheme(spec, shape, GROUP_SIZE).model_copy(update={"scale_bits": 8})


def lost_as_e2m1(spec: LutSpec, group_size: int, scale_bits: int) -> str | None:
    """Return why a weight is no E2M1 under scales of so many bits, each for `group_size` weights.

    None if it is.
    """
    reason = lost_by_grid(spec, GRIDS)
    if reason is None and not _is_e2m1(spec):
        reason = (
            f"its codebook is {spec.codebook} of {spec.bits} bits, expected levels that are E2M1 "
            "values: e2m1, ternary, int of 2 or 3 bits, seq of 1 or 2"
        )
    if reason is None and spec.group_size % group_size:
        reason = f"FP4 has no groups of {spec.group_size}, expected a multiple of {group_size}"
    if reason is None and spec.scale_bits != scale_bits:
        reason = f"its scales have {spec.scale_bits} bits, expected {scale_bits}"
    return reason


def e2m1_scheme(spec: LutSpec, shape: tuple[int, int], group_size: int) -> LutSpec:
    """Return the E2M1 grid of as many bits, or the plan's own if it is one, in groups of a size."""
    refuse_all_but_groups(spec)
    if spec.bits > MOST_BITS:
        raise ExportError(
            f"FP4 has no weights of {spec.bits} bits; name a plan of at most {MOST_BITS} bits"
        )
    codebook = spec.codebook if _is_e2m1(spec) else CODEBOOKS[spec.bits]
    size = group_size_near(group_size, (group_size,), shape[1])
    return LutSpec(bits=spec.bits, codebook=codebook, group_size=size)


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer.

    All weights share one factor, because vLLM takes the largest for linears that it joins (q, k and
    v).

    Raises:
        ExportError: the scales span too wide a range.
    """
    weights, factor = quantized_weights(model)
    tensors = narrow_state(model)
    for name, (values, scales) in weights.items():
        tensors[f"{name}.weight_packed"] = values
        tensors[f"{name}.weight_scale"] = scales
        tensors[f"{name}.weight_global_scale"] = factor[None].clone()
    groups = [(list(weights), {"weights": SETTINGS})]
    extra = {"quantization_config": compressed_tensors.config(FORM, groups, float_linears(model))}
    write_tensors(model, tokenizer, directory, tensors=tensors, extra=extra)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return logits of the model that transformers reads, decompressed by compressed-tensors."""
    # without it the weights would always be bfloat16
    config = CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")  # intended
        return reloaded_logits(model, directory, ids, quantization_config=config)


def quantized_weights(model: PreTrainedModel) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Return E2M1 values and E4M3 scales by the name of each linear, and their common factor.

    Values are `(O, I / 2)` uint8 with the even feature in the lower half, scales are `(O, I / 16)`.

    Raises:
        ExportError: the scales span too wide a range.
    """
    modules = quantized_modules(model)
    scales = {name: e2m1_scales(module, GROUP_SIZE) for name, module in modules.items()}
    largest = torch.stack([scale.max() for scale in scales.values()]).max().clamp_min(SMALLEST)
    # a power of two, so exact, that scales the largest into E4M3's range
    factor = 2.0 ** (LARGEST / largest).log2().floor()
    weights = {}
    for name, module in modules.items():
        weights[name] = pack(e2m1_codes(module), 4), _e4m3(name, scales[name], factor)
    return weights, factor


def e2m1_codes(module: QuantLinear) -> Tensor:
    """Return the 4 bits of each weight, `(O, I)` uint8."""
    codes, _ = _nibbles(module.levels())
    return codes[module.indices().int()]


def e2m1_scales(module: QuantLinear, group_size: int) -> Tensor:
    """Return the multipliers of E2M1 values, `(O, I / group_size)` float32."""
    scales, levels = module.scales_as_stored().by_group(), module.levels().detach()
    return (scales * _unit(levels)).repeat_interleave(module.spec.group_size // group_size, 1)


def _unit(levels: Tensor) -> Tensor:
    """Return the multiplier of E2M1 values at which 1/2 is the smallest nonzero level."""
    return 2 * levels[levels != 0].abs().min()


def _nibbles(levels: Tensor) -> tuple[Tensor, bool]:
    """Return each level over the unit as 4 bits `(C,)` uint8, and True if all are E2M1 values."""
    values = levels / _unit(levels)
    codes = torch.searchsorted(E2M1, values.abs()).clamp_max(len(E2M1) - 1)
    is_held = torch.equal(E2M1[codes], values.abs())
    return (codes + len(E2M1) * (values < 0)).to(torch.uint8), is_held


def _is_e2m1(spec: LutSpec) -> bool:
    levels = fixed_grid(spec)
    return levels is not None and _nibbles(levels)[1]


def _e4m3(name: str, scales: Tensor, factor: Tensor) -> Tensor:
    """Return `scales * factor` in E4M3, exactly."""
    found = (scales * factor).to(torch.float8_e4m3fn)
    is_held = found.float() == scales * factor
    if not is_held.all():
        raise ExportError(
            f"{name} has a scale of {scales[~is_held][0].item():.4g} in a model whose largest is "
            f"at most {LARGEST / factor.item():.4g}, expected scales that E4M3 holds times one "
            "power of two; lower --lr-scales and train again, or leave the linear with the largest "
            "in floating point by a rule of its own in a plan"
        )
    return found
