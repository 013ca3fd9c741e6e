"""Target `modelopt`: the tensors of `nvfp4` under the names of NVIDIA's Model-Optimizer.

For engines that read its checkpoints (TensorRT-LLM, SGLang, vLLM). `W = e2m1 * e4m3 *
weight_scale_2`, called `W4A16_NVFP4` there (`modelopt/torch/export` of
github.com/NVIDIA/Model-Optimizer, release 0.47).
"""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat import __version__
from qat.export.parts import any_model, float_model, logits_of
from qat.extensions.targets import nvfp4
from qat.extensions.targets.shared import float_linears, narrow_state, write_tensors
from qat.nn.swap import embedding_dtype

COMPARED = "bits"
HOLDS_ADAPTERS = False
HOLDS_TABLES = False
HOLDS_ACTIVATIONS = (None,)
check = any_model
lost, scheme = nvfp4.lost, nvfp4.scheme
ALGORITHM = "W4A16_NVFP4"
HOW_TO_LOAD = """\
`vllm serve DIR`, on an NVIDIA GPU, or another engine that reads NVIDIA's Model-Optimizer:
`trtllm-serve DIR`, `python -m sglang.launch_server --model-path DIR`.
"""


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, hf_quant_config.json, model.safetensors and the tokenizer."""
    weights, factor = nvfp4.quantized_weights(model)
    tensors = narrow_state(model)
    for name, (values, scales) in weights.items():
        tensors[f"{name}.weight"] = values
        tensors[f"{name}.weight_scale"] = scales
        tensors[f"{name}.weight_scale_2"] = 1 / factor  # exact: a power of two
    left = float_linears(model)
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.GROUP_SIZE}
    producer = {"name": "qat", "version": __version__}
    settings = {
        "quant_method": "modelopt",
        "quant_algo": ALGORITHM,
        "config_groups": {"group_0": {"weights": group, "targets": ["Linear"]}},
        "ignore": left,
        "producer": producer,
    }
    extra = {"quantization_config": settings}
    write_tensors(model, tokenizer, directory, tensors=tensors, extra=extra)
    quantization = {
        "quant_algo": ALGORITHM,
        "kv_cache_quant_algo": None,
        "group_size": nvfp4.GROUP_SIZE,
        "exclude_modules": left,
    }
    text = json.dumps({"producer": producer, "quantization": quantization}, indent=2) + "\n"
    (directory / "hf_quant_config.json").write_text(text, encoding="utf-8")


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return logits of a copy with the weights of the file, decompressed by compressed-tensors.

    The weights are renamed to its own names, because no engine that reads these files runs here.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    compressor = BaseCompressor.get_value_from_registry(nvfp4.FORM)
    scheme = QuantizationScheme(targets=["Linear"], weights=nvfp4.SETTINGS)
    tensors = load_file(directory / "model.safetensors")
    for key in [key for key in tensors if key.endswith(".weight_scale_2")]:
        name = key.removesuffix("_scale_2")
        parts = {
            "weight_packed": tensors.pop(name),
            "weight_scale": tensors.pop(f"{name}_scale"),
            "weight_global_scale": 1 / tensors.pop(key)[None],
        }
        tensors[name] = compressor.decompress(parts, scheme)["weight"]
    return logits_of(float_model(model, tensors, embedding_dtype(model)), ids)
