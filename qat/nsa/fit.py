"""Fits sparse attention, layer by layer, to what dense attention gives there; and how it fares.

Every layer reads what it reads in the dense model, so layers do not wait for one another: a single
pass trains them all. Nothing else learns. Shapes as in `qat.kernels.nsa.select`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from qat.kernels.nsa import reference, router
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.select import Inputs, masked_softmax, select
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
            # computed anew: its gradient is wanted
            regated = call._replace(gates=call.module.nsa.gates_of(call.hidden))
            off, of = _squares(call.module, _sparse(regated), target)
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


# How sparse attention fares in each layer: what gates say, and what the choice of blocks misses.
#
# Shapes as in `qat.kernels.nsa.select`; G query heads of a group, W keys of a selection block.

ALMOST_ALL = 0.95
"""A branch with this share of a head's gates leaves nothing to the others."""
MOST_SCORES = 2**27
"""Scores of dense attention that exist together: half a gigabyte."""


class GateHealth(NamedTuple):
    """What the gates of one layer say, means over tokens and heads; a share is of their sizes."""

    gate_entropy_frac: float
    """Entropy of the three shares over that of equal ones: 0 where one branch has it all."""
    gate_largest_frac: float
    """The largest share."""
    compressed_frac: float
    """Share of the compressed branch."""
    selected_frac: float
    """Share of the selected branch: 1 where `residual` begins."""
    window_frac: float
    """Share of the sliding branch."""
    collapse_frac: float
    """How many have a branch with almost all (`ALMOST_ALL`): 1 where `residual` begins."""


class SelectionHealth(NamedTuple):
    """What the choice of blocks of one layer misses."""

    limit_frac: float
    """Share of queries, by group, that do not read every block of their past."""
    recall_frac: float
    """Dense attention mass inside the blocks that those read, mean over them; 1 without any."""


class LayerHealth(NamedTuple):
    """One layer of sparse attention on some text."""

    layer: int
    route: router.Route
    is_fallback: bool
    """Whether something else computes than the configuration's sizes or the device deserve."""
    gates: GateHealth | None
    """None where branches are merged."""
    selection: SelectionHealth

    def values(self) -> dict[str, int | str | bool | float]:
        """All of it by name."""
        gates = {} if self.gates is None else self.gates._asdict()
        route = {"route": self.route.backend, "is_fallback": self.is_fallback}
        return {"layer": self.layer, **route, **self.selection._asdict(), **gates}


def attention_health(model: LanguageModel, batch: TokenBatch) -> list[LayerHealth]:
    """Runs `model` on a batch and looks at every sparse layer; nothing of it for a dense model.

    Compiled layers would not notice: run it inside `qat.models.regions.as_written`.

    Time and memory are a little more than those of dense attention.
    """
    found: list[LayerHealth] = []

    def look(call: Call) -> Tensor:
        inputs, config = call.inputs(), call.module.nsa.config
        route, selection = (
            call.module.route(inputs.length, inputs.query.device),
            select(inputs, config),
        )
        is_other = route.backend == "dense" and inputs.length > config.reach
        is_slow = route.backend == "reference" and inputs.query.device.type == "cuda"
        found.append(
            LayerHealth(
                layer=call.module.layer_idx,
                route=route,
                is_fallback=is_other or (is_slow and route.requested == "auto"),
                gates=None if call.gates is None else gate_health(call.gates),
                selection=selection_health(inputs, selection, config),
            )
        )
        return router.attend(inputs, config, route, selection)

    with torch.no_grad(), attending_with(model.model, look):
        model.hidden(batch.input_ids.to(model.device), batch.position_ids.to(model.device))
    return found


def health_numbers(layers: list[LayerHealth]) -> dict[str, object]:
    """Means over layers, the lowest recall, and all layers, under names that begin with `nsa_`."""
    values = [layer.values() for layer in layers]
    names = [name for name in values[0] if name.endswith("_frac")]
    means = {f"nsa_{name}": sum(each[name] for each in values) / len(values) for name in names}
    lowest = min(layer.selection.recall_frac for layer in layers)
    fallbacks = sum(layer.is_fallback for layer in layers)
    counts = {"nsa_recall_least_frac": lowest, "nsa_fallbacks": fallbacks}
    return {**means, **counts, "nsa_layers": values}


def gate_health(gates: Tensor) -> GateHealth:
    """From the gates of one layer, `(B, S, H, 3)` (compressed, selected, window); any sign."""
    sizes = gates.detach().float().abs()
    shares = sizes / sizes.sum(-1, keepdim=True).clamp(min=TINY)
    entropy = -(shares * shares.clamp(min=TINY).log()).sum(-1) / math.log(3)
    largest = shares.amax(-1)
    means = [entropy.mean(), largest.mean(), *shares.flatten(0, -2).mean(0)]
    return GateHealth(*torch.stack([*means, (largest > ALMOST_ALL).float().mean()]).tolist())


@torch.no_grad()
def selection_health(inputs: Inputs, selection: Tensor, config: NSAConfig) -> SelectionHealth:
    """Compares a choice of blocks, `(B, K, T, N)` bool, with dense attention of the same inputs.

    Time is that of dense attention; never more than `MOST_SCORES` scores exist together.
    """
    B, H, S, _ = inputs.query.shape
    rows = max(1, MOST_SCORES // (B * H * S))
    device = inputs.query.device
    counts = torch.zeros(3, dtype=torch.float64, device=device)
    for start in range(0, S, rows):
        places = torch.arange(start, min(start + rows, S), device=device)
        with torch.autocast(device.type, enabled=False):
            mass, misses = kept_mass(inputs, selection, config, places)
        heads = misses[:, :, None].expand_as(mass)
        counts += torch.stack([misses.sum(), heads.sum(), (mass * heads).sum()]).double()
    queries, heads, mass = counts.tolist()
    recall = mass / heads if heads else 1.0
    return SelectionHealth(queries / (B * inputs.key.shape[1] * S), recall)


def kept_mass(
    inputs: Inputs, selection: Tensor, config: NSAConfig, places: Tensor
) -> tuple[Tensor, Tensor]:
    """What some queries' choice of blocks holds, and whether it lacks any.

    Args:
        inputs: see there.
        selection: `(B, K, T, N)` bool.
        config: the sizes.
        places: `(Q,)`, which queries.

    Returns:
        `(B, K, G, Q)` float32, dense attention mass inside the selected blocks; `(B, K, Q)` bool,
        whether there is a block of the query's past that is not selected.
    """
    first = inputs.beginnings()[:, places, None]
    keys = torch.arange(inputs.length, device=places.device)
    mask = (keys <= places[:, None]) & (keys >= first)
    chosen = selection[:, :, places // config.select_tile]
    query = inputs.query[:, :, places].unflatten(1, (-1, inputs.group)).float()
    logits = inputs.scale * query @ inputs.key[:, :, None].float().mT
    shares = masked_softmax(logits, mask[:, None, None])
    missing = selection.shape[-1] * config.select_block - inputs.length
    by_block = pad(shares, (0, missing)).unflatten(-1, (-1, config.select_block))
    mass = (by_block.sum(-1) * chosen[:, :, None]).sum(-1)
    blocks = torch.arange(selection.shape[-1], device=places.device)
    own = places[:, None] // config.select_block
    is_past = (blocks >= first // config.select_block) & (blocks <= own)
    return mass, (is_past[:, None] & ~chosen).any(-1)
