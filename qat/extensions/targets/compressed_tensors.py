"""Target `compressed-tensors`: symmetric integers in `pack-quantized` form, for vLLM and others."""

from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError
from qat.export.parts import any_model, logits_of, reloaded
from qat.extensions.targets.shared import (
    exact,
    float_linears,
    lost_by_grid,
    narrow_state,
    refuse_all_but_groups,
    write_tensors,
)
from qat.models.checkpoint import quiet_transformers
from qat.models.stored_state import has_input_scale, quantized_modules
from qat.nn.activation import ActivationQuantizer
from qat.nn.quant_linear import QuantLinear
from qat.nn.swap import embedding_dtype
from qat.quant.spec import ACTIVATION_KINDS, ActivationKind, ActivationSpec, LutSpec

COMPARED = "bits"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None, *ACTIVATION_KINDS)
check = any_model
GRIDS = ("int", "ternary")
INPUTS: dict[ActivationKind, dict[str, object]] = {
    kind: {
        "num_bits": 8,
        "type": "float" if kind == "fp8" else "int",
        "symmetric": kind != "int8-asymmetric",
        "strategy": "tensor" if kind == "int8-static" else "token",
        "dynamic": kind != "int8-static",
    }
    for kind in ACTIVATION_KINDS
}
"""The `input_activations` of each kind."""
HOW_TO_LOAD = """\
```python
# pip install compressed-tensors
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto")
```

or `vllm serve DIR`, where vLLM has a kernel for these bits and groups.
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Symmetric integers of 2 to 8 bits, in groups of any size, lose nothing.
    """
    return lost_by_grid(spec, GRIDS)


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return integers of as many bits, at least two, in the plan's groups, with 8-bit scales."""
    refuse_all_but_groups(spec)
    if spec.bits == 1:
        raise ExportError("integers around zero need 2 bits at least; name a plan of 2 to 8 bits")
    codebook = "ternary" if spec.codebook == "ternary" else "int"
    return LutSpec(bits=spec.bits, codebook=codebook, group_size=spec.group_size, scale_bits=8)


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    dtype = embedding_dtype(model)
    tensors, modules = narrow_state(model), quantized_modules(model)
    for name, module in modules.items():
        weight, bits = module.quantized(), module.spec.bits
        integers = (weight.indices.int() + int(weight.codebook[0])).to(torch.int8)
        scale = exact(f"{name}.scales", weight.scales.scales.double(), dtype)
        tensors[f"{name}.weight_packed"] = pack_to_int32(integers, bits)
        tensors[f"{name}.weight_scale"] = scale
        tensors[f"{name}.weight_shape"] = torch.tensor(integers.shape)
        if has_input_scale(module):
            tensors[f"{name}.input_scale"] = module.activation.stored_scale().clone().view(1)
    settings = config("pack-quantized", _groups(modules), float_linears(model))
    extra = {"quantization_config": settings}
    write_tensors(model, tokenizer, directory, tensors=tensors, extra=extra)


def config(
    form: str, groups: list[tuple[list[str], dict[str, object]]], left: list[str]
) -> dict[str, object]:
    """Return the `quantization_config` of linears stored as `form`.

    `groups` are names of linears and how they are stored; `left` names the linears in floating
    point.
    """
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": names, "format": form, **held}
            for number, (names, held) in enumerate(groups)
        },
        "ignore": left,
    }


def _groups(modules: dict[str, QuantLinear]) -> list[tuple[list[str], dict[str, object]]]:

    def key(name: str) -> tuple[int, int, str]:
        spec, reads = modules[name].spec, modules[name].activation
        return spec.bits, spec.group_size, "" if reads is None else reads.spec.kind

    found = []
    for (bits, group_size, kind), names in groupby(sorted(modules, key=key), key):
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": group_size,
            "dynamic": False,
        }
        inputs = {"input_activations": INPUTS[kind]} if kind else {}
        found.append((list(names), {"weights": weights, **inputs}))
    return found


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return logits with the weights that transformers reads with compressed-tensors.

    Inputs are rounded as the configuration says, and in the way of vLLM's kernels:
    compressed-tensors uses a formula of its own (docs/export.md).
    """
    found = reloaded(model, directory, dtype=embedding_dtype(model))
    with safe_open(directory / "model.safetensors", framework="pt") as stored:
        for name, linear in found.named_modules():
            scheme = getattr(linear, "quantization_scheme", None)
            if scheme is None or scheme.input_activations is None:
                continue
            said = scheme.input_activations.model_dump(mode="json", include={*INPUTS["int8"]})
            kind = next(kind for kind, inputs in INPUTS.items() if inputs == said)
            # read from the file, because transformers rounds it to the dtype of the model
            scale = stored.get_tensor(f"{name}.input_scale") if kind == "int8-static" else None
            reads = ActivationQuantizer(ActivationSpec(kind=kind), scale)
            linear.register_forward_pre_hook(lambda _module, args, reads=reads: (reads(args[0]),))
            linear.quantization_enabled = False  # per linear, because many share one scheme
    with quiet_transformers():
        return logits_of(found, ids)  # the first call decompresses the weights
