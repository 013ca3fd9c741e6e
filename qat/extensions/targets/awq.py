"""Target `awq`: codes of 4 bits in the layout of AWQ, its gemm order, for vLLM, SGLang and others.

`W[o, i] = scales[g, o] * (code[i, o] - zero[g, o])`, with zero points of 8. Codes and zero points
lie in 32-bit words along the outputs of a row, the eight of a word in an order of their own. All
weights have one group size, so a larger group repeats its scale. transformers with gptqmodel reads
it on a CPU.

Shapes: O out_features, I in_features, G groups per row.
"""

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import AwqConfig, PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError
from qat.export.parts import any_model, float_model, logits_of, reloaded
from qat.extensions.targets.codes import to_codes
from qat.extensions.targets.gptq import WORD, refuse_float32
from qat.extensions.targets.shared import (
    EVEN_GRIDS,
    even_levels,
    exact,
    float_linears,
    group_size_near,
    lost_by_grid,
    narrow_state,
    refuse_all_but_groups,
    write_tensors,
)
from qat.models.dequantize import AWQ_ORDER
from qat.models.stored_state import quantized_modules
from qat.nn.quant_linear import QuantLinear
from qat.nn.swap import embedding_dtype
from qat.quant.spec import LutSpec
from qat.quant.weight import pack, unpack

COMPARED = "bits"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None,)
check = any_model
BITS, ZERO = 4, 8
GROUP_SIZES = (32, 64, 128)
"""Groups for which engines have kernels."""
HOW_TO_LOAD = """\
```python
# pip install gptqmodel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR")
```

or `vllm serve DIR`.
"""


def code_bits(spec: LutSpec) -> int:
    """Return the bits of the codes that hold the levels; those without a zero take one more."""
    return spec.bits + (spec.codebook == "seq")


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Even levels that codes of 4 bits hold lose nothing, if groups and sizes fill the words.
    """
    reason = lost_by_grid(spec, EVEN_GRIDS)
    if reason is None and code_bits(spec) > BITS:
        reason = (
            f"its {spec.codebook} levels have {spec.bits} bits, expected at most {BITS}, of seq "
            f"{BITS - 1}"
        )
    if reason is None and (spec.group_size % GROUP_SIZES[0] or any(n % WORD for n in shape)):
        reason = (
            f"it has groups of {spec.group_size} in {shape[0]} rows of {shape[1]}, expected "
            f"multiples of {WORD}"
        )
    return reason


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return even levels of as many bits, at most 4, with 8-bit scales in usual groups."""
    refuse_all_but_groups(spec)
    if spec.bits > BITS:
        raise ExportError(f"AWQ has codes of {BITS} bits alone; name a plan of 1 to {BITS} bits")
    size = group_size_near(spec.group_size, GROUP_SIZES, shape[1])
    return even_levels(spec, size, seq_bits=BITS - 1)


def file_bits(spec: LutSpec, shape: tuple[int, int]) -> float:
    """Return the bits of an `(O, I)` weight in the files, if no weight has smaller groups."""
    return math.prod(shape) * (BITS + (16 + BITS) / math.gcd(spec.group_size, GROUP_SIZES[-1]))


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    refuse_float32(model)
    tensors, modules = narrow_state(model), quantized_modules(model)
    size = math.gcd(GROUP_SIZES[-1], *(module.spec.group_size for module in modules.values()))
    for name, module in modules.items():
        tensors |= {f"{name}.{part}": value for part, value in packed(name, module, size).items()}
    settings = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": size,
        "zero_point": True,
        "modules_to_not_convert": float_linears(model),
    }
    extra = {"quantization_config": settings}
    write_tensors(model, tokenizer, directory, tensors=tensors, extra=extra)


def packed(name: str, module: QuantLinear, size: int) -> dict[str, Tensor]:
    """Return the tensors of a linear in groups of `size`, by the last part of their names."""
    found = to_codes(name, module, is_half=False)
    codes = unpack(found.packed, found.bits, module.in_features).int() + ZERO - int(found.zero)
    scales = exact(f"{name}.scales", found.scales.double(), torch.float16, has_choice=False)
    scales = scales.repeat_interleave(found.block // size, 1)
    return {
        "qweight": _words(codes.T),
        "qzeros": _words(torch.full_like(scales.T, ZERO, dtype=torch.int32)),
        "scales": scales.T.contiguous(),
    }


def _words(codes: Tensor) -> Tensor:
    """Return the int32 words `(n, O / 8)` of codes `(n, O)`."""
    order = torch.tensor(AWQ_ORDER).argsort()
    ordered = codes.unflatten(1, (-1, len(order)))[..., order].flatten(1)
    return pack(ordered, BITS).view(torch.int32)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return logits of a copy with the weights that transformers reads and gptqmodel forms.

    Which of its products rounds what depends on the processor; `.ci/engine awq` runs them.
    """
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    how = AwqConfig(backend="torch_awq")
    found = reloaded(model, directory, dtype="auto", quantization_config=how)
    weights = found.state_dict()
    for name in quantized_modules(model):
        parts = [weights.pop(f"{name}.{part}") for part in ("qweight", "qzeros", "scales")]
        formed = dequantize_gemm(*parts, BITS, found.config.quantization_config.group_size)
        weights[f"{name}.weight"] = formed.T.contiguous()
    return logits_of(float_model(model, weights, embedding_dtype(model)), ids)
