"""Target `mxfp4`: weights as E2M1 under a power of two per 32, as gpt-oss and OCP's MX formats.

The experts of gpt-oss go out as in its own checkpoints, which transformers, vLLM and llama.cpp's
converter read: `_blocks` and `_scales` of each projection. There other linears are written in
floating point, which holds E2M1 times a power of two. Models of linears become compressed-tensors'
`mxfp4-pack-quantized`.

Shapes: E experts, O out_features, I in_features, G groups of 32 inputs.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import Mxfp4Config, PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError
from qat.export.parts import reloaded_logits
from qat.extensions.targets import compressed_tensors, nvfp4
from qat.extensions.targets.shared import float_linears, narrow_state, write_tensors
from qat.models.stored_state import quantized_modules
from qat.nn.quant_linear import QuantLinear
from qat.nn.sites import odd_site
from qat.nn.swap import embedding_dtype
from qat.quant.fit import POWERS
from qat.quant.spec import LutSpec
from qat.quant.weight import pack

COMPARED = "bits"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None,)
GROUP_SIZE = 32
"""Weights of a row that share a scale."""
OWN = "gpt_oss"
"""The model type whose experts have a form of their own."""
IN_FLOATS = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
"""The modules that a gpt-oss keeps in floating point, as its configuration names them."""
BIAS = 127
"""The byte of a scale of 1: E8M0 holds an exponent and this."""
FORM = "mxfp4-pack-quantized"
SETTINGS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP_SIZE,
    "scale_dtype": "torch.uint8",
    "dynamic": False,
}
HOW_TO_LOAD = """\
`vllm serve DIR`, or

```python
# pip install compressed-tensors
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto")
```
"""


def check(model: PreTrainedModel) -> None:
    """Refuse matrices outside of linears, except the experts of gpt-oss."""
    site = None if model.config.model_type == OWN else odd_site(model)
    if site is not None:
        raise ExportError(
            f"mxfp4 cannot hold {type(model).__name__}: {site}, expected linears or the experts of "
            "gpt-oss; export --to dense, or keep the packed checkpoint"
        )


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Grids of E2M1 values in groups of a multiple of 32, with powers of two as scales, lose nothing.
    """
    return nvfp4.lost_as_e2m1(spec, GROUP_SIZE, scale_bits=POWERS)


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return the E2M1 grid of as many bits in groups of 32, under powers of two."""
    found = nvfp4.e2m1_scheme(spec, shape, GROUP_SIZE)
    return found.model_copy(update={"scale_bits": POWERS})


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer.

    Raises:
        ExportError: it is a gpt-oss with experts in floating point.
    """
    tensors, modules = narrow_state(model), quantized_modules(model)
    if model.config.model_type != OWN:
        for name, module in modules.items():
            tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = _packed(module)
        groups = [(list(modules), {"weights": SETTINGS})]
        settings = compressed_tensors.config(FORM, groups, float_linears(model))
    else:
        tensors |= _with_experts(modules, model)
        settings = {"quant_method": "mxfp4", "modules_to_not_convert": IN_FLOATS}
    extra = {"quantization_config": settings}
    write_tensors(model, tokenizer, directory, tensors=tensors, extra=extra)


def _with_experts(modules: dict[str, QuantLinear], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the quantized weights of a gpt-oss: experts in blocks, others in floating point."""
    left = [name for name in float_linears(model) if ".experts." in name]
    if left:
        raise ExportError(
            f"mxfp4 cannot hold {left[0]} in floating point, expected all experts in 4 bits, as "
            "gpt-oss has them; convert with a rule for them"
        )
    tensors, E = {}, model.config.num_local_experts
    for name, module in modules.items():
        if ".experts." in name:
            values, scales = _packed(module)
            shape = E, -1, scales.shape[1]
            tensors[f"{name}_blocks"] = values.view(*shape, GROUP_SIZE // 2)
            tensors[f"{name}_scales"] = scales.view(shape)
        else:
            weight = module.quantized_weight().detach()
            tensors[f"{name}.weight"] = weight.to(embedding_dtype(model)).contiguous()
    return tensors


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return logits of the model that transformers reads, in floating point."""
    if model.config.model_type != OWN:
        return nvfp4.read_logits(model, directory, ids)
    config = Mxfp4Config(dequantize=True)
    return reloaded_logits(model, directory, ids, quantization_config=config)


def _packed(module: QuantLinear) -> tuple[Tensor, Tensor]:
    """Return E2M1 values `(O, I / 2)` and the bytes of E8M0 scales `(O, G)`, both uint8.

    The even feature is in the lower half of a byte. A group whose scale is zero has values of zero
    under a scale of 1.
    """
    scales = nvfp4.e2m1_scales(module, GROUP_SIZE)
    codes = nvfp4.e2m1_codes(module).view(*scales.shape, GROUP_SIZE)
    codes = torch.where(scales[..., None] == 0, 0, codes).flatten(1)
    exponents = torch.where(scales == 0, 1.0, scales).frexp().exponent - 1
    return pack(codes, 4), (exponents + BIAS).to(torch.uint8)
