"""The modules of a prepared student: each forms its weight where it reads it.

`put_in_loop` changes the class of a model's quantized modules, and `take_out` changes it back;
parameters and their names stay what they are. `join` lets projections of the same input be one
product, as `qat train` does where it compiles.
"""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.errors import ConfigError
from qat.extensions.integrations.operator import formed
from qat.models.regions import join_projections, part_projections
from qat.nn.activation import read
from qat.nn.lut_embedding import QuantEmbedding, QuantHead
from qat.nn.quant_linear import QuantLinear
from qat.nn.quant_weight import QuantWeight, quant_weights
from qat.nn.step import JoinedLinears


class LoopWeight(QuantWeight):
    """A weight that every forward forms, from its parameters as they are then."""

    own_class: ClassVar[type[QuantWeight]]
    """The class that it had before."""

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, in autocast's dtype where that is on.

        Raises:
            ConfigError: a parameter was cast, so that this is not the weight that is exported.
        """
        kind = self.codebook.device.type
        is_cast = torch.is_autocast_enabled(kind)
        return self.formed_in(torch.get_autocast_dtype(kind) if is_cast else dtype)

    def formed_in(self, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
        """Return the weight in `dtype`, or its `rows` `(N,)`; see `weight_in`."""
        if self.codebook.dtype != torch.float32:
            raise ConfigError(
                f"the parameters of quantized weights are {self.codebook.dtype}, expected float32, "
                "because rounded ones give other codes; leave mixed precision to "
                "qat.prepare(dtype=...), without a policy of the wrapper's"
            )
        return formed(self, dtype, rows)


class LoopLinear(LoopWeight, QuantLinear):
    """A linear of a prepared student."""

    def product(self, x: Tensor) -> Tensor:
        """See `QuantLinear`; nothing reads packed indices, whose scales may have moved."""
        return QuantLinear.product(self, x)


class LoopJoined(JoinedLinears):
    """Linears of a prepared student that are one product; each still forms its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., I)` to `(..., O)`: the concatenated results of the linears."""
        x = read(self.linears[0], x)
        return self.product(x, torch.cat([each.weight_in(x.dtype) for each in self.linears]))


class LoopEmbedding(LoopWeight, QuantEmbedding):
    """An embedding of a prepared student."""

    def _looked_up(self, ids: Tensor) -> Tensor:
        return self.formed_in(self.dtype, ids)


LOOP: dict[type[QuantWeight], type[LoopWeight]] = {
    QuantLinear: LoopLinear,
    QuantEmbedding: LoopEmbedding,
    QuantHead: LoopWeight,
}
"""The classes above by what they stand for."""


def put_in_loop(model: nn.Module) -> None:
    """Let every quantized weight of `model` be formed by the forward that reads it."""
    for weight in quant_weights(model).values():
        weight.release_()
        weight.__class__ = _loop_class(type(weight))


def join(model: PreTrainedModel) -> None:
    """Run the layers of `model`, which is in a loop, by the products and kernels of a GPU's run."""
    join_projections(model)
    for module in model.modules():
        if isinstance(module, JoinedLinears):
            module.__class__ = LoopJoined


def take_out(model: PreTrainedModel) -> None:
    """Undo `put_in_loop` and `join`."""
    part_projections(model)
    for weight in quant_weights(model).values():
        if isinstance(weight, LoopWeight):
            weight.__class__ = weight.own_class


@cache
def _loop_class(own: Any) -> type[LoopWeight]:
    kind = next(loop for kind, loop in LOOP.items() if issubclass(own, kind))
    return type(own.__name__, (kind, own), {"__doc__": own.__doc__, "own_class": own})
