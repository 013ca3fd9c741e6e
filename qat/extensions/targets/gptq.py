"""Target `gptq`: integers in the layout of GPTQ, for vLLM, gptqmodel, auto-round and others.

`W[o, i] = scales[g, o] * (code[i, o] - zero)`, where the zero point is half of the codes and is
stored less one, as the first version of the layout does. Codes lie in 32-bit words along the
inputs of a column, zero points along the outputs of a row. transformers with auto-round reads it
on a CPU.

Shapes: O out_features, I in_features, G groups per row.
"""

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoRoundConfig, PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError
from qat.export.parts import DtypeError, any_model, logits_of, reloaded
from qat.extensions.targets.shared import (
    exact,
    float_linears,
    group_size_near,
    lost_by_grid,
    narrow_state,
    refuse_all_but_groups,
    write_tensors,
)
from qat.models.stored_state import quantized_modules
from qat.nn.quant_linear import QuantLinear
from qat.nn.swap import embedding_dtype
from qat.quant.spec import LutSpec
from qat.quant.weight import pack

COMPARED = "sums"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None,)
check = any_model
GRIDS = ("int", "ternary")
STORED_BITS = (2, 3, 4, 8)
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
WORD = 32
"""Bits of a word; both sizes of a weight must be a multiple."""
HOW_TO_LOAD = """\
```python
# pip install auto-round (on a CPU; with gptqmodel and optimum leave out quantization_config)
from transformers import AutoModelForCausalLM, AutoRoundConfig

model = AutoModelForCausalLM.from_pretrained("DIR", quantization_config=AutoRoundConfig())
```

or `vllm serve DIR`, where vLLM has a kernel for these bits and groups.
"""


def stored_bits(spec: LutSpec) -> int:
    """Return the bits of the codes that hold the levels."""
    return next(bits for bits in STORED_BITS if spec.bits <= bits)


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Integers in usual groups lose nothing, if both sizes fill whole words.
    """
    reason = lost_by_grid(spec, GRIDS)
    if reason is None and (spec.group_size not in GROUP_SIZES or any(n % WORD for n in shape)):
        reason = (
            f"it has groups of {spec.group_size} in {shape[0]} rows of {shape[1]}, expected groups "
            f"of {', '.join(map(str, GROUP_SIZES))} and sizes that are multiples of {WORD}"
        )
    return reason


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return integers of as many bits, at least two, with 8-bit scales in usual groups."""
    refuse_all_but_groups(spec)
    if spec.bits == 1:
        raise ExportError("integers around zero need 2 bits at least; name a plan of 2 to 8 bits")
    codebook = "ternary" if spec.codebook == "ternary" else "int"
    size = group_size_near(spec.group_size, GROUP_SIZES, shape[1])
    return LutSpec(bits=spec.bits, codebook=codebook, group_size=size, scale_bits=8)


def refuse_float32(model: PreTrainedModel) -> None:
    """Refuse a model in float32."""
    if embedding_dtype(model) == torch.float32:
        raise DtypeError(
            "readers of this layout multiply in 16 bits, not in fp32, expected float16 or "
            "bfloat16; export with --dtype fp16 or bf16"
        )


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    refuse_float32(model)
    tensors, modules = narrow_state(model), quantized_modules(model)
    for name, module in modules.items():
        tensors |= {f"{name}.{part}": value for part, value in packed(name, module).items()}
    extra = {"quantization_config": _config(modules, float_linears(model))}
    write_tensors(model, tokenizer, directory, tensors=tensors, extra=extra)


def packed(name: str, module: QuantLinear) -> dict[str, Tensor]:
    """Return the tensors of a linear, by the last part of their names."""
    weight, spec = module.quantized(), module.spec
    bits, (O, I) = stored_bits(spec), weight.indices.shape
    zero = 2 ** (bits - 1)
    codes = weight.indices.int() + int(weight.codebook[0]) + zero
    scales = exact(f"{name}.scales", weight.scales.scales.double(), torch.float16, has_choice=False)
    zeros = torch.full((I // spec.group_size, O), zero - 1)
    return {
        "qweight": pack(codes, bits).view(torch.int32).T.contiguous(),
        "qzeros": pack(zeros, bits).view(torch.int32),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(I, dtype=torch.int32) // spec.group_size,
    }


def _config(modules: dict[str, QuantLinear], left: list[str]) -> dict[str, object]:
    """Return the `quantization_config`: the most frequent form, and what differs by name."""
    forms = {n: (stored_bits(m.spec), m.spec.group_size) for n, m in modules.items()}
    (usual, _), *_ = Counter(forms.values()).most_common(1)
    others = {
        f"+:^{re.escape(name)}$": {"bits": bits, "group_size": size}
        for name, (bits, size) in forms.items()
        if (bits, size) != usual
    }
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": usual[0],
        "group_size": usual[1],
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
        "dynamic": others | {f"-:^{re.escape(name)}$": {} for name in left},
    }


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the logits of what transformers reads with auto-round, in float32."""
    how = AutoRoundConfig(backend="torch")
    found = reloaded(model, directory, dtype="auto", quantization_config=how)
    # transformers' own `to` refuses to cast quantized models
    return logits_of(nn.Module.to(found, torch.float32), ids)
