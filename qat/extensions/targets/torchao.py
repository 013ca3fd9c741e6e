"""Target `torchao`: evenly spaced levels in torchao's integer tensors, for transformers."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.export.parts import any_model, logits_of, reloaded
from qat.extensions.targets.shared import (
    EVEN_GRIDS,
    affine,
    even_levels,
    exact,
    float_linears,
    lost_by_grid,
    narrow_state,
    refuse_all_but_groups,
    write_tensors,
)
from qat.models.stored_state import quantized_modules
from qat.nn.quant_weight import QuantWeight
from qat.nn.swap import embedding_dtype
from qat.quant.spec import LutSpec

COMPARED = "bits32"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None, "int8-asymmetric")
check = any_model
READS_INT8 = "int8_asym_per_token"
"""torchao's name for inputs of kind int8-asymmetric."""
HOW_TO_LOAD = """\
```python
# pip install torchao
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto")
```

Each weight takes a byte in this form, whatever its bits: it is what torchao lowers from.
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Evenly spaced levels of 1 to 8 bits, in groups of any size, lose nothing.
    """
    return lost_by_grid(spec, EVEN_GRIDS)


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return even levels without a zero up to 4 bits, integers above, in the plan's groups."""
    refuse_all_but_groups(spec)
    return even_levels(spec, spec.group_size)


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    dtype = embedding_dtype(model)
    state = narrow_state(model)
    for name, module in quantized_modules(model).items():
        state[f"{name}.weight"] = _tensor(name, module, dtype)
    tensors, metadata = flatten_tensor_state_dict(state)
    extra = {"quantization_config": _config(model)}
    write_tensors(model, tokenizer, directory, tensors=tensors, extra=extra, metadata=metadata)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return logits of what transformers reads with torchao, in float32."""
    found = reloaded(model, directory, dtype="auto")
    # transformers' own `to` refuses to cast quantized models
    return logits_of(nn.Module.to(found, torch.float32), ids)


def _tensor(name: str, module: QuantWeight, dtype: torch.dtype) -> Tensor:
    """Return `W = (integer - zero_point) * scale`."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    weight, spec = affine(module), module.spec
    lowest = 2 ** (spec.bits - 1)
    scale = exact(f"{name}.scales", weight.scale, dtype)
    grid = module.codebook.detach().double()
    zero = -lowest - float(grid[0] / (grid[1] - grid[0]))  # in floating point: "seq" has halves
    return IntxUnpackedToInt8Tensor(
        (weight.codes.int() - lowest).to(torch.int8),
        scale,
        torch.full_like(scale, zero),
        getattr(torch, f"int{spec.bits}"),
        (1, spec.group_size),
        dtype,
        None if module.activation is None else READS_INT8,
    )


def _config(model: PreTrainedModel) -> dict[str, object]:
    """Return the `quantization_config`; the format of each tensor is in the file itself."""
    from torchao.core.config import config_to_dict
    from torchao.quantization import (
        FqnToConfig,
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    formats = {}
    for name, module in quantized_modules(model).items():
        bits, size = getattr(torch, f"int{module.spec.bits}"), PerGroup(module.spec.group_size)
        reads_int8 = module.activation is not None
        made = Int8DynamicActivationIntxWeightConfig if reads_int8 else IntxWeightOnlyConfig
        formats[name] = made(bits, size)
    return {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(FqnToConfig(formats))},
        "modules_to_not_convert": float_linears(model),
        "include_input_output_embeddings": False,
    }
