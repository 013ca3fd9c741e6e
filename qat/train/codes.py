"""How many codes change while latent weights move."""

import torch
from torch import Tensor, nn

from qat.backend.device import on
from qat.nn.lut_linear import LutLinear
from qat.nn.step import quant_linears
from qat.quant.pack import pack, unpack

PREFIX = "codes."


class CodeWatch:
    """Remembers, packed, which codes the latent weights took when it was last asked."""

    def __init__(self, model: nn.Module) -> None:
        linears = quant_linears(model).items()
        self._linears = {name: m for name, m in linears if isinstance(m, LutLinear)}
        self._last: dict[str, Tensor] = {}

    def flipped_frac(self) -> float | None:
        """Share of codes that differ from when it was last asked, in [0, 1].

        None the first time, and where no weight is latent. Counts where training ended up: a code
        that went and came back has not flipped. Waits for the device.
        """
        flipped, codes = [], 0
        for name, linear in self._linears.items():
            indices, bits = linear.indices(), linear.spec.bits
            if name in self._last:
                before = unpack(self._last[name], bits, linear.in_features)
                flipped.append((indices != before).sum())
                codes += indices.numel()
            self._last[name] = pack(indices, bits)
        if not flipped:
            return None
        total = torch.stack(flipped).sum()
        backend = on(total.device)
        backend.step_end()
        return backend.read([total])[0] / codes

    def state(self) -> dict[str, Tensor]:
        """The codes that it remembers, for a checkpoint."""
        return {PREFIX + name: octets for name, octets in self._last.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Remember what a checkpoint's `state` did."""
        for name, linear in self._linears.items():
            if PREFIX + name in state:
                self._last[name] = state[PREFIX + name].to(linear.codebook.device)
