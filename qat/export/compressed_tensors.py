"""Target `compressed-tensors`: symmetric integers in `pack-quantized` form, for vLLM and others."""

from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError
from qat.export.parts import (
    any_model,
    exact,
    lost_by_grid,
    refuse_codewords,
    refuse_low_rank,
    reloaded_logits,
    unquantized_state,
    write_config,
)
from qat.models.stored_state import quantized_modules
from qat.nn.swap import embedding_dtype
from qat.quant.spec import LutSpec

COMPARED = "bits"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = ()
check, read_logits = any_model, reloaded_logits
GRIDS = ("int", "ternary")
HOW_TO_LOAD = """\
```python
# pip install compressed-tensors
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto")
```

or `vllm serve DIR`, where vLLM has a kernel for these bits and groups.
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Integers around zero of 2 to 8 bits, in groups of any size."""
    return lost_by_grid(spec, GRIDS)


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Integers of as many bits in the plan's groups, scales of 8 bits.

    Raises:
        ExportError: one bit, vectors, or scales of low rank.
    """
    refuse_codewords(spec)
    refuse_low_rank(spec)
    if spec.bits == 1:
        raise ExportError("integers around zero need 2 bits at least; name a plan of 2 to 8 bits")
    codebook = "ternary" if spec.codebook == "ternary" else "int"
    return LutSpec(bits=spec.bits, codebook=codebook, group_size=spec.group_size, scale_bits=8)


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer.

    Raises:
        ExportError: a scale does not fit into the dtype.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    dtype = embedding_dtype(model)
    tensors, modules = unquantized_state(model, dtype), quantized_modules(model)
    for name, module in modules.items():
        weight, bits = module.quantized(), module.spec.bits
        integers = (weight.indices.int() + int(weight.codebook[0])).to(torch.int8)
        scale = exact(f"{name}.scales", weight.scales.scales.double(), dtype)
        tensors[f"{name}.weight_packed"] = pack_to_int32(integers, bits)
        tensors[f"{name}.weight_scale"] = scale
        tensors[f"{name}.weight_shape"] = torch.tensor(integers.shape)
    specs = {name: module.spec for name, module in modules.items()}
    settings = config("pack-quantized", _groups(specs))
    save(model, tokenizer, directory, tensors=tensors, settings=settings)


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    *,
    tensors: dict[str, Tensor],
    settings: dict[str, object],
) -> None:
    """Write the tensors, the configuration with these `settings` of quantization, the tokenizer."""
    dtype, extra = embedding_dtype(model), {"quantization_config": settings}
    write_config(model, tokenizer, directory, dtype=dtype, extra=extra)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def config(form: str, groups: list[tuple[list[str], dict[str, object]]]) -> dict[str, object]:
    """The `quantization_config` of weights in that form: names of linears, and how each is held."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": names, "weights": weights}
            for number, (names, weights) in enumerate(groups)
        },
        "ignore": [],
    }


def _groups(specs: dict[str, LutSpec]) -> list[tuple[list[str], dict[str, object]]]:
    """One group of linears for each format."""

    def key(name: str) -> tuple[int, int]:
        return specs[name].bits, specs[name].group_size

    return [
        (
            list(names),
            {
                "num_bits": bits,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": group_size,
                "dynamic": False,
            },
        )
        for (bits, group_size), names in groupby(sorted(specs, key=key), key)
    ]
