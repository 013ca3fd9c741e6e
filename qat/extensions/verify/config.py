"""Settings of `qat verify-export`."""

from pathlib import Path

from pydantic import Field

from qat.config import Device, HowMuch, Judged, Settings, Speed


class VerifyConfig(Settings):
    """The text that two models are compared on, and the distance that passes."""

    text: HowMuch[Path | None] = None
    """Text to compare both models on; docstrings of Python's library by default."""
    context: HowMuch[int] = Field(256, ge=4)
    """Tokens that are read at once, or as many as the model has positions for, if these are
    fewer; predictions of the second half are compared."""
    contexts: HowMuch[int] = Field(4, ge=1)
    """The first contexts of the text that are compared."""
    max_kl: Judged[float] = Field(1e-3, ge=0)
    """Nats per token that FILE may be away from REFERENCE. The default is for exports that lose
    nothing; a float model and its 4-bit file are 0.01 to 0.4 apart."""
    min_top1: Judged[float] = Field(0.995, ge=0, le=1)
    """Fraction of tokens on whose likeliest successor both must agree."""
    worst: Judged[int] = Field(8, ge=1)
    """Tensors in the table of those that differ most."""
    device: Speed[Device] = "cpu"
    """Where both models run: auto, cpu, cuda, cuda:1, ..."""
