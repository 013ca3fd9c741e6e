"""Runs a model with something else in the place of its sparse attention's innermost function.

Shapes: B rows, S positions, H query heads, D head width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from qat.kernels.nsa.inputs import Inputs
from qat.nsa.attention import Heads, NSAAttention
from qat.nsa.rows import Rows
from qat.nsa.swap import nsa_modules


class Call(NamedTuple):
    """One call of a layer's attention over whole rows."""

    module: NSAAttention
    hidden: Tensor
    """`(B, S, hidden_size)`, the module's input."""
    heads: Heads
    gates: Tensor | None
    angles: tuple[Tensor, Tensor]
    """Cosines and sines."""
    rows: Rows

    def inputs(self) -> Inputs:
        """What a backend computes from."""
        return self.module.inputs(self.heads, self.gates, self.angles, self.rows)

    def regated(self) -> "Call":
        """The same with its gates computed anew, for whoever wants their gradient."""
        return self._replace(gates=self.module.nsa.gates_of(self.hidden))


Attend = Callable[[Call], Tensor]
"""From a call to `(B, S, H, D)`, tokens in the order of `Call.inputs`."""


@contextmanager
def attending_with(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Run a block in which every sparse attention of `model` computes `attend`.

    Layers that are compiled would not notice: see `qat.models.regions.as_written`.
    """
    modules = nsa_modules(model).values()
    kept = [vars(module).get("forward") for module in modules]
    for module in modules:
        _divert(module, attend)
    try:
        yield
    finally:
        for module, forward in zip(modules, kept, strict=True):
            del module.forward, module.attend
            if forward is not None:
                module.forward = forward


def _divert(module: NSAAttention, attend: Attend) -> None:
    forward, seen = module.forward, []

    def noting(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        seen[:] = [hidden_states]
        return forward(hidden_states, *args, **kwargs)

    def instead(
        heads: Heads, gates: Tensor | None, angles: tuple[Tensor, Tensor], rows: Rows
    ) -> Tensor:
        return rows.back(attend(Call(module, seen.pop(), heads, gates, angles, rows)), 1)

    module.forward, module.attend = noting, instead
