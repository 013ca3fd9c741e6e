"""Each loss as a function of all logits, by name: what the tests of formulas call."""

from functools import partial

from torch import Tensor

from qat.losses.config import ON_CACHE
from qat.losses.formulas import Targets, loss_from_logits


def _loss(name: str, logits: Tensor, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    return loss_from_logits(logits, targets, {name: 1.0}, temperature=temperature)["loss"]


FROM_LOGITS = {name: partial(_loss, name) for name in ON_CACHE}
