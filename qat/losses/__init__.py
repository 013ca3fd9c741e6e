"""What a student learns from, and the way in for a loss of your own: `qat.losses.register`."""

from qat.losses.config import register

__all__ = ["register"]
