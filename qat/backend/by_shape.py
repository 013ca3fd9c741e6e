"""What devices have in common whose work is compiled for each shape, whoever drives them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from qat.backend.device import Backend
from qat.errors import ConfigError


@dataclass(frozen=True)
class CompiledByShape(Backend):
    """A device, such as a TPU, on which a new shape costs so much that few should exist."""

    CALLED: ClassVar[str]
    """The devices, in a message."""

    def dtype_name(self, name: str) -> str:
        """See `Backend`; `auto` is bf16, which TPUs multiply in."""
        if name in ("fp16", "tf32"):
            raise ConfigError(
                f"dtype={name}, but {self.CALLED} have no such units; use --dtype bf16"
            )
        return "bf16" if name == "auto" else name

    def has_bf16(self) -> bool:
        """See `Backend`."""
        return True

    def load_map(self) -> None:
        """See `Backend`: weights are read on the host, for moving them breaks ties."""

    def place(self, model: nn.Module) -> None:
        """See `Backend`."""
        model.to(self.device)
        model.tie_weights()

    def fixed_shapes(self) -> bool:
        """See `Backend`."""
        return True

    def generator(self, seed: int) -> torch.Generator:
        """See `Backend`: the host's."""
        return torch.Generator().manual_seed(seed)

    def compares(self) -> bool:
        """See `Backend`: such operators would run on the host, or were tried by nobody."""
        return True
