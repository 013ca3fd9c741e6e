"""Settings of `qat export`."""

from typing import Literal

from qat.config import Settings


class ExportConfig(Settings):
    """Which deployable form to write."""

    to: Literal["packed", "dense"]
    """packed: the checkpoint itself; dense: a plain Hugging Face model that needs no qat."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the dense weights, or of what is not packed; auto: the one the checkpoint was saved in."""
