"""The distillation losses; `qat.losses.register` adds a loss of your own."""

from qat.losses.config import register

__all__ = ["register"]
