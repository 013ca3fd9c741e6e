"""Settings of `qat export`, and the names of all targets."""

from typing import Literal

from qat.config import Required, Settings

TargetName = Literal[
    "packed",
    "dense",
    "coreml",
    "ane",
    "coreai",
    "mlx",
    "compressed-tensors",
    "nvfp4",
    "mxfp4",
    "modelopt",
    "gguf",
    "torchao",
    "executorch",
    "onnx",
    "openvino",
    "gptq",
    "awq",
    "litert",
    "litertlm",
    "anemll",
]
"""The forms that a student can be exported to; `qat.export.targets` lists their modules."""

LIBRARIES: dict[TargetName, tuple[str, str]] = {
    **dict.fromkeys(("coreml", "ane"), ("coremltools", "coreml")),
    "coreai": ("coreai_torch", "coreai"),
    "mlx": ("mlx_lm", "mlx"),
    "compressed-tensors": ("compressed_tensors", "ship"),
    **dict.fromkeys(("nvfp4", "mxfp4", "modelopt"), ("compressed_tensors", "ship")),
    "gguf": ("gguf", "ship"),
    "torchao": ("torchao", "adam8bit"),
    "executorch": ("executorch.runtime", "executorch"),
    "onnx": ("onnxruntime", "onnx"),
    "openvino": ("openvino", "openvino"),
    "gptq": ("auto_round", "gptq"),
    "awq": ("gptqmodel", "awq"),
    "litert": ("litert_torch", "litert"),
    "litertlm": ("litert_lm_builder", "litert"),
}
"""The library that writes and reads back the files of a target, and the extra that installs it."""


class ExportConfig(Settings):
    """Settings of the deployable form to write."""

    to: Required[TargetName]
    """packed: the checkpoint itself; dense: a plain Hugging Face model that needs no qat; the
    others: files of that program, and only what they hold without loss."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Dtype of dense weights, or of everything that is not packed; auto: the dtype of the
    checkpoint, or fp16, or else fp32, if the target cannot hold it in that dtype."""
