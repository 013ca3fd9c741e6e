"""Settings of the quality baselines."""

from typing import Literal

from pydantic import Field, field_validator

from qat.config import Settings
from qat.errors import ConfigError
from qat.losses.config import parse_losses
from qat.quant.spec import role_of

METHODS = ("reference", "torchao_int2", "efficientqat", "edgerazor", "rtn", "gptq")
"""What our recipes are compared with, by the names that a table carries."""
PTQ = ("rtn", "gptq")
"""Those that train nothing."""
PLANS = {"q2a4": {"mlp": 2, "attention": 4}, "q2a2": {"mlp": 2, "attention": 2}}
"""Bits of each part by plan."""
OWN = {
    "reference": {"lr": 5e-5, "warmup_steps": 100},
    "torchao_int2": {"lr": 1e-4, "warmup_steps": 50},
    "efficientqat": {"lr": 1e-4, "warmup_steps": 50},
    "edgerazor": {"lr": 1e-4, "warmup_steps": 50},
}
"""What a method trains with where the settings leave it open."""


class BaselineSettings(Settings):
    """How a baseline is trained, on what, and what it becomes; learning rates are absolute."""

    plan: Literal["q2a4", "q2a2"] = "q2a4"
    """Bits of MLPs and attention."""
    group_size: int = Field(32, gt=0)
    """Weights of a row that share a scale (for the reference: those that its scales start from)."""
    max_steps: int = Field(1000, ge=1)
    """Optimizer steps; for efficientqat what both stages cost together, in whole steps."""
    batch_size: int = Field(64, ge=1)
    """Sequences in a step."""
    lr: float | None = Field(None, ge=0)
    """Peak learning rate of AdamW; by default the method's own, for the reference as published."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear rise; by default 100 for the reference and 50 for the others."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Where the cosine ends, as a share of the peak."""
    seed: int = Field(0, ge=0)
    """Decides the order of the data, as in `qat train`, and random starts."""
    loss: str = "tail"
    """Distillation loss at temperature 1 of all methods but the reference."""
    temperature: float = Field(2.0, gt=0)
    """Of the reference's candidates loss."""
    hard_top1: float = Field(0.0, ge=0)
    """Weight of the reference's cross-entropy with the teacher's likeliest token (it ships 0.2)."""
    start: Literal["q4", "from_scratch", "full_rank"] = "q4"
    """Where the reference starts: at 4 bits and rank 4, then its converter; from scratch with its
    evenly spaced table; or with its converter's table over scales of the whole rank."""
    factored: bool = True
    """Whether the reference multiplies rank by rank as published, or by the formed weight: the same
    numbers, faster."""
    int4_share: float = Field(0.5, gt=0, le=1)
    """Share of rows that edgerazor keeps in 4 bits, the others being ternary, whatever `plan` says.
    It is rounded up to every nth row; published are 0.5 ("2.79 bits") and 0.125 ("1.88 bits")."""
    activations: Literal["int8"] | None = None
    """Let edgerazor, in training and after it, round what linears read to 8 bits: a scale for each
    token and group of `group_size` features. By default they read what there is."""
    kv: Literal["int8"] | None = None
    """Let edgerazor, in training and after it, keep keys and values in 8 bits: a scale for each
    head of a token. By default they are kept as they are."""
    block_steps: int | None = Field(None, ge=0)
    """Steps of efficientqat in each block; by default what half of max_steps pays for."""
    block_lr: float = Field(1e-4, ge=0)
    """Peak learning rate of the weights in efficientqat's blocks."""
    block_lr_scales: float = Field(1e-4, ge=0)
    """Peak learning rate of scales and zero points in efficientqat's blocks."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """What matmuls compute in over float32 parameters; auto is bf16 where it is native."""

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, text: str) -> str:
        parse_losses(text)
        return text

    def bits_of(self, name: str) -> int:
        """Bits of the linear called `name`."""
        return PLANS[self.plan]["mlp" if role_of(name) == "mlp" else "attention"]

    def check(self, method: str) -> None:
        """Refuse what `method` would not do.

        Raises:
            ConfigError: it rounds weights alone, and inputs, keys or values are to be rounded.
        """
        for name in ("activations", "kv"):
            asked = getattr(self, name)
            if asked is not None and method != "edgerazor":
                raise ConfigError(
                    f"{name}={asked} is given for method={method}, expected method=edgerazor, "
                    "which alone rounds more than weights; leave it out"
                )

    def filled(self, method: str) -> "BaselineSettings":
        """The settings with the method's own values where they leave something open."""
        own = {name: value for name, value in OWN[method].items() if getattr(self, name) is None}
        return self.model_copy(update=own)
