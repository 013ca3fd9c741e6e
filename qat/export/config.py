"""Settings of `qat export`, and the names of all targets."""

from typing import Literal

from qat.config import Required, Settings

TargetName = Literal[
    "packed",
    "dense",
    "coreml",
    "mlx",
    "compressed-tensors",
    "nvfp4",
    "modelopt",
    "gguf",
    "torchao",
    "executorch",
    "anemll",
]
"""What a student can be shipped as; `qat.export.targets` says where each is written."""


class ExportConfig(Settings):
    """Which deployable form to write."""

    to: Required[TargetName]
    """packed: the checkpoint itself; dense: a plain Hugging Face model that needs no qat; the
    others: files of that program, and only what they hold without loss."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the dense weights, or of what is not packed; auto: the one the checkpoint was saved in,
    or where the target cannot hold it in that one, fp16, or else fp32."""
