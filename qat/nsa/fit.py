"""Fits gates and pooling of sparse attention layer by layer, to what dense attention gives there.

Every layer reads what it reads in the dense model, so layers do not wait for one another: a single
pass trains them all. Nothing else learns. Shapes as in `qat.kernels.nsa.select`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qat.kernels.nsa import reference, router
from qat.logs import progress
from qat.nsa.attention import NSAAttention
from qat.nsa.swap import Call, attending_with, nsa_modules
from qat.quant.weight import rms

if TYPE_CHECKING:
    from qat.convert.calibrate import TokenBatch
    from qat.models.language_model import LanguageModel

LR = 1e-2
"""Peak learning rate, relative to the natural size of each parameter."""
WARM_UP = 0.1
"""Share of the steps until the peak; the rest falls to zero."""
TINY = 1e-12
SAME = 1e-4
"""Where no layer is farther from dense attention there is nothing to learn but rounding."""


@dataclass(frozen=True)
class LayerFit:
    """How far one layer's attention is from dense attention of the same input."""

    name: str
    error_before: float
    """`|sparse - dense| / |dense|` of the attention's output, Frobenius, over all tokens."""
    error_after: float


def fit_attention(
    model: LanguageModel, batches: Sequence[TokenBatch], *, steps: int, lr: float = LR
) -> list[LayerFit]:
    """Train gates and pooling weights for `steps` steps of AdamW, a batch each, in turns.

    Nothing is to be done without parameters (branches merged), nor where all rows are within the
    attention's reach, so that it is dense.

    Args:
        model: with sparse attention.
        batches: at least one.
        steps: of the optimizer.
        lr: see `LR`.
    """
    modules = nsa_modules(model.model)
    learning = {
        parameter: natural_size(name, parameter)
        for module in modules.values()
        for name, parameter in module.nsa.named_parameters()
    }
    before = attention_errors(model, batches)
    after = before
    if learning and steps and max(before.values()) > SAME:
        _train(model, batches, learning, steps=steps, lr=lr)
        after = attention_errors(model, batches)
    return [LayerFit(name, before[module], after[module]) for name, module in modules.items()]


def natural_size(name: str, parameter: Tensor) -> float:
    """How large a parameter of `NSAParts` is: so that a step at rate r moves gates by about r.

    All weights of a gate move at once, and mostly together: each is one of as many as there are
    inputs. Weights of a pool are as large as they are.
    """
    if not name.endswith(("gates.weight", "gates.bias")):
        return rms(parameter)
    return 1.0 if parameter.dim() == 1 else 1 / parameter.shape[1]


def attention_errors(
    model: LanguageModel, batches: Sequence[TokenBatch]
) -> dict[NSAAttention, float]:
    """`|sparse - dense| / |dense|` of every layer's output, on what it reads in the dense model."""
    sums: dict[NSAAttention, Tensor] = {}

    def measure(call: Call) -> Tensor:
        target = reference.attend_densely(call.inputs())
        found = torch.stack(_squares(call.module, _sparse(call), target))
        sums[call.module] = sums.get(call.module, 0) + found.double()
        return target

    with torch.no_grad(), attending_with(model.model, measure):
        for batch in batches:
            _read(model, batch)
    return {module: (off / of).sqrt().item() for module, (off, of) in sums.items()}


def _train(
    model: LanguageModel,
    batches: Sequence[TokenBatch],
    sizes: dict[nn.Parameter, float],
    *,
    steps: int,
    lr: float,
) -> None:
    groups = [{"params": [p], "lr": lr * size} for p, size in sizes.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = max(1, int(WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))
    )

    def learn(call: Call) -> Tensor:
        target = reference.attend_densely(call.inputs())
        with torch.enable_grad():
            off, of = _squares(call.module, _sparse(call.regated()), target)
            (off / of.clamp(min=TINY)).backward(inputs=[*call.module.nsa.parameters()])
        return target

    with progress("fitting sparse attention", steps, "steps") as ticker, torch.no_grad():
        with attending_with(model.model, learn):
            for step in range(steps):
                _read(model, batches[step % len(batches)])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                ticker.advance()


def _sparse(call: Call) -> Tensor:
    inputs, config = call.inputs(), call.module.nsa.config
    return router.attend(inputs, config, call.module.route(inputs.length, inputs.query.device))


def _squares(module: NSAAttention, sparse: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norms of the difference and of `target`, behind the output projection."""
    out = module.o_proj(target.flatten(2)).float()
    return (module.o_proj(sparse.flatten(2)).float() - out).square().sum(), out.square().sum()


def _read(model: LanguageModel, batch: TokenBatch) -> None:
    model.hidden(batch.input_ids.to(model.device), batch.position_ids.to(model.device))
