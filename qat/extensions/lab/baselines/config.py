"""Settings of the quality baselines."""

from typing import Literal

from pydantic import Field, field_validator

from qat.config import Settings
from qat.errors import ConfigError
from qat.losses.config import parse_losses
from qat.quant.spec import role_of

METHODS = ("reference", "torchao_int2", "efficientqat", "edgerazor", "rtn", "gptq")
"""Methods that our recipes are compared with, by their names in the results table."""
PTQ = ("rtn", "gptq")  # methods without training
PLANS = {"q2a4": {"mlp": 2, "attention": 4}, "q2a2": {"mlp": 2, "attention": 2}}
"""Bits of each part of the model, by plan."""
OWN = {
    "reference": {"lr": 5e-5, "warmup_steps": 100},
    "torchao_int2": {"lr": 1e-4, "warmup_steps": 50},
    "efficientqat": {"lr": 1e-4, "warmup_steps": 50},
    "edgerazor": {"lr": 1e-4, "warmup_steps": 50},
}
"""Each method's defaults for settings that are left open."""


class BaselineSettings(Settings):
    """Settings of a baseline: its format, data and training; learning rates are absolute."""

    plan: Literal["q2a4", "q2a2"] = "q2a4"
    """Plan of bits for MLPs and attention."""
    group_size: int = Field(32, gt=0)
    """Weights of a row that share a scale (for the reference, of its initial scales)."""
    max_steps: int = Field(1000, ge=1)
    """Optimizer steps; for efficientqat the cost of both stages together, in full steps."""
    batch_size: int = Field(64, ge=1)
    """Sequences per step."""
    lr: float | None = Field(None, ge=0)
    """Peak learning rate of AdamW; by default the method's own, for the reference as published."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up; by default 100 for the reference and 50 for the others."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Share of the peak learning rate at the end of the cosine schedule."""
    seed: int = Field(0, ge=0)
    """Seed of the data order, as in `qat train`, and of random initial values."""
    loss: str = "tail"
    """Distillation loss of all methods but the reference, at temperature 1."""
    start: Literal["q4", "full_rank"] = "q4"
    """Initial state of the reference: 4 bits at rank 4 and then its converter, or its converter's
    table over scales of the full rank."""
    mlp_only: bool = False
    """Train the reference's scales in the MLPs alone, as its recipe SR-002 does; those in attention
    keep their initial values."""
    factored: bool = True
    """True multiplies rank by rank, as the reference does; false forms the weight first, which
    gives the same numbers faster."""
    int4_share: float = Field(0.5, gt=0, le=1)
    """Fraction of rows that edgerazor keeps in 4 bits, independent of `plan`; the others are
    ternary. It is rounded up to every nth row; published are 0.5 ("2.79 bits") and 0.125 ("1.88
    bits")."""
    activations: Literal["int8"] | None = None
    """Round the inputs of edgerazor's linears to 8 bits, in training and afterwards, with a scale
    per token and group of `group_size` features. By default they are not rounded."""
    kv: Literal["int8"] | None = None
    """Keep edgerazor's keys and values in 8 bits, in training and afterwards, with a scale per
    token and head. By default they are not rounded."""
    block_steps: int | None = Field(None, ge=0)
    """Steps of efficientqat in each block; by default as many as half of max_steps pays for."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, ..."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype of matmuls over float32 parameters; auto is bf16 where it is native."""

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, text: str) -> str:
        parse_losses(text)
        return text

    def bits_of(self, name: str) -> int:
        """Return the bits of the linear called `name`."""
        return PLANS[self.plan]["mlp" if role_of(name) == "mlp" else "attention"]

    def check(self, method: str) -> None:
        """Raise ConfigError for settings that `method` does not support.

        Raises:
            ConfigError: inputs, keys or values are to be rounded by a method that rounds only
                weights, or the MLPs are to be trained alone by one that trains all linears.
        """
        if self.mlp_only and method != "reference":
            raise ConfigError(
                f"mlp_only=true is given for method={method}, expected method=reference, which "
                "alone can leave attention as it is; leave it out"
            )
        for name in ("activations", "kv"):
            value = getattr(self, name)
            if value is not None and method != "edgerazor":
                raise ConfigError(
                    f"{name}={value} is given for method={method}, expected method=edgerazor, "
                    "which alone rounds more than weights; leave it out"
                )

    def filled(self, method: str) -> "BaselineSettings":
        """Return the settings with the method's own defaults in place of None."""
        own = {name: value for name, value in OWN[method].items() if getattr(self, name) is None}
        return self.model_copy(update=own)
