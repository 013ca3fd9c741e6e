"""Fit sparse attention, layer by layer, to dense attention of the same input; measure its health.

Every layer gets the input that it has in the dense model, so layers do not depend on each other: a
single pass trains all of them. Nothing else is trained. Shapes as in
`qat.extensions.nsa.kernels.select`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from qat.extensions.nsa.attention import Call, NSAAttention
from qat.extensions.nsa.kernels import reference, router
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, masked_softmax, past_blocks, select
from qat.extensions.nsa.swap import attending_with, nsa_config, nsa_modules
from qat.logs import progress
from qat.models.attention import LayerFit
from qat.quant.weight import rms

if TYPE_CHECKING:
    from qat.convert.calibrate import TokenBatch
    from qat.models.language_model import LanguageModel

logger = logging.getLogger(__name__)

LR = 1e-2
"""The peak learning rate, relative to the natural size of each parameter."""
WARM_UP = 0.1
"""Fraction of the steps until the peak; afterwards the rate falls to zero."""
TINY = 1e-12  # keeps logs and quotients of zeros finite
SAME = 1e-4
"""The largest layer error at which nothing is trained, since only rounding is left."""


def fit_attention(
    student: LanguageModel, batches: Sequence[TokenBatch], *, steps: int
) -> list[LayerFit]:
    """Fit gates and pooling weights to dense attention where rows differ, and log the distance.

    Each of the `steps` of AdamW takes a batch in turn. Nothing is fitted without batches, steps or
    parameters (branches merged), or, with a warning, where all rows are within the attention's
    reach.
    """
    config, modules = nsa_config(student.model), nsa_modules(student.model)
    if not batches or not steps or config.mode == "merged":
        return []
    length = batches[0].input_ids.shape[1]
    if length <= config.reach:
        logger.warning(
            "gates are not fitted: calibration rows have %d tokens, and sparse attention reads "
            "rows of up to %d whole; raise --calibration-length",
            length,
            config.reach,
        )
        return []
    learning = {
        parameter: natural_size(name, parameter)
        for module in modules.values()
        for name, parameter in module.nsa.named_parameters()
    }
    before = after = attention_errors(student, batches)
    if max(before.values()) > SAME:
        _train(student, batches, learning, steps)
        after = attention_errors(student, batches)
    logger.info(
        "attention differs from dense by %.4f, before the fit by %.4f",
        *(sum(errors.values()) / len(errors) for errors in (after, before)),
    )
    return [LayerFit(name, before[module], after[module]) for name, module in modules.items()]


def natural_size(name: str, parameter: Tensor) -> float:
    """Return the size of an `NSAParts` parameter, so that a step at rate r moves gates by about r.

    All weights of a gate move at once, mostly in the same direction, so the size of each is one
    over the number of inputs. The size of pooling weights is their RMS.
    """
    if not name.endswith(("gates.weight", "gates.bias")):
        return rms(parameter)
    return 1.0 if parameter.dim() == 1 else 1 / parameter.shape[1]


def attention_errors(
    model: LanguageModel, batches: Sequence[TokenBatch]
) -> dict[NSAAttention, float]:
    """Return `|sparse - dense| / |dense|` of every layer's output for its dense-model input."""
    sums: dict[NSAAttention, Tensor] = {}

    def measure(module: NSAAttention, call: Call) -> Tensor:
        target = reference.attend_densely(module.inputs(call))
        sparse = NSAAttention.attend(module, call)
        sums[module] = sums.get(module, 0) + torch.stack(_squares(module, sparse, target)).double()
        return target

    with torch.no_grad(), attending_with(model.model, measure):
        for batch in batches:
            _read(model, batch)
    return {module: (off / of).sqrt().item() for module, (off, of) in sums.items()}


def _train(
    model: LanguageModel,
    batches: Sequence[TokenBatch],
    sizes: dict[nn.Parameter, float],
    steps: int,
) -> None:
    groups = [{"params": [p], "lr": LR * size} for p, size in sizes.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = max(1, int(WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))
    )

    def learn(module: NSAAttention, call: Call) -> Tensor:
        target = reference.attend_densely(module.inputs(call))
        with torch.enable_grad():
            # computed again, with a gradient
            sparse = NSAAttention.attend(
                module, call._replace(gates=module.nsa.gates_of(call.hidden))
            )
            off, of = _squares(module, sparse, target)
            (off / of.clamp(min=TINY)).backward(inputs=[*module.nsa.parameters()])
        return target

    with progress("fitting sparse attention", steps, "steps") as ticker, torch.no_grad():
        with attending_with(model.model, learn):
            for step in range(steps):
                _read(model, batches[step % len(batches)])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                ticker.advance()


def _squares(module: NSAAttention, sparse: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared norms of the difference and of `target`, after the output projection."""
    out = module.o_proj(target.flatten(2)).float()
    return (module.o_proj(sparse.flatten(2)).float() - out).square().sum(), out.square().sum()


def _read(model: LanguageModel, batch: TokenBatch) -> None:
    model.hidden(batch.input_ids.to(model.device), batch.position_ids.to(model.device))


# The health of sparse attention in each layer: gate values, and mass that the selection misses.

ALMOST_ALL = 0.95
"""The share of a head's gates from which on a branch leaves nothing to the others."""
MOST_SCORES = 2**27
"""The most scores of dense attention in memory at a time: half a gigabyte."""


class GateHealth(NamedTuple):
    """Gate statistics of one layer, means over tokens and heads; shares are of absolute values."""

    gate_entropy_frac: float
    """Entropy of the three shares over that of equal shares: 0 if one branch has everything."""
    gate_largest_frac: float
    """The largest of the three shares."""
    compressed_frac: float
    """The share of the compressed branch."""
    selected_frac: float
    """The share of the selected branch: 1 at the start of `residual`."""
    window_frac: float
    """The share of the sliding branch."""
    collapse_frac: float
    """Fraction of gates with a branch above `ALMOST_ALL`: 1 at the start of `residual`."""


class SelectionHealth(NamedTuple):
    """The quality of one layer's selection of blocks."""

    limit_frac: float
    """Fraction of queries, by group, that do not read every block of their past."""
    recall_frac: float
    """The mean dense attention mass inside the blocks that those queries read; 1 without any."""
    blocks_read: float
    """The mean number of blocks in a selection."""
    blocks_predicted: float
    """The mean number by the definition: those of a document so far, at most `num_selected`."""
    full_frac: float
    """Fraction of selections with `num_selected` blocks."""


class LayerHealth(NamedTuple):
    """Statistics of one layer of sparse attention on some text."""

    layer: int
    route: router.Route
    is_fallback: bool
    """True if a slower or different function runs than the sizes and the device would allow."""
    gates: GateHealth | None
    """Gate statistics; None if branches are merged."""
    gates_learn: bool
    selection: SelectionHealth

    def values(self) -> dict[str, int | str | bool | float]:
        """Return all fields by name."""
        gates = {} if self.gates is None else self.gates._asdict()
        route = {"route": self.route.backend, "is_fallback": self.is_fallback}
        learn = {"gates_learn": self.gates_learn} if gates else {}
        return {"layer": self.layer, **route, **self.selection._asdict(), **gates, **learn}


def attention_health(model: LanguageModel, batch: TokenBatch) -> list[LayerHealth]:
    """Run `model` on a batch and return the health of every sparse layer; empty for a dense model.

    Compiled layers are not intercepted: call it inside `qat.models.regions.as_written`.

    Time and memory are slightly more than those of dense attention.
    """
    found: list[LayerHealth] = []

    def look(module: NSAAttention, call: Call) -> Tensor:
        inputs, config = module.inputs(call), module.nsa.config
        route = module.route(inputs.length, inputs.query.device)
        selection = select(inputs, config)
        is_other = route.backend == "dense" and inputs.length > config.reach
        is_slow = route.backend == "reference" and inputs.query.device.type == "cuda"
        found.append(
            LayerHealth(
                layer=module.layer_idx,
                route=route,
                is_fallback=is_other or (is_slow and route.requested == "auto"),
                gates=None if call.gates is None else gate_health(call.gates),
                gates_learn=call.gates is not None and module.nsa.gates.weight.requires_grad,
                selection=selection_health(inputs, selection, config),
            )
        )
        return router.attend(inputs, config, route, selection)

    with torch.no_grad(), attending_with(model.model, look):
        _read(model, batch)
    return found


def health_numbers(layers: list[LayerHealth]) -> dict[str, object]:
    """Return means over layers, the lowest recall, and all layers, with names starting `nsa_`."""
    values = [layer.values() for layer in layers]
    names = [name for name in values[0] if name.endswith(("_frac", "_read", "_predicted"))]
    means = {f"nsa_{name}": sum(each[name] for each in values) / len(values) for name in names}
    lowest = min(layer.selection.recall_frac for layer in layers)
    fallbacks = sum(layer.is_fallback for layer in layers)
    counts = {"nsa_recall_least_frac": lowest, "nsa_fallbacks": fallbacks}
    return {**means, **counts, "nsa_layers": values}


def gate_health(gates: Tensor) -> GateHealth:
    """Return statistics of gates `(B, S, H, 3)`: compressed, selected, window, of any sign."""
    sizes = gates.detach().float().abs()
    shares = sizes / sizes.sum(-1, keepdim=True).clamp(min=TINY)
    entropy = -(shares * shares.clamp(min=TINY).log()).sum(-1) / math.log(3)
    largest = shares.amax(-1)
    means = [entropy.mean(), largest.mean(), *shares.flatten(0, -2).mean(0)]
    return GateHealth(*torch.stack([*means, (largest > ALMOST_ALL).float().mean()]).tolist())


@torch.no_grad()
def selection_health(inputs: Inputs, selection: Tensor, config: NSAConfig) -> SelectionHealth:
    """Compare a selection of blocks, `(B, K, T, N)` bool, with dense attention of the same inputs.

    Time is that of dense attention; at most `MOST_SCORES` scores are in memory at a time.
    """
    B, H, S, _ = inputs.query.shape
    rows = max(1, MOST_SCORES // (B * H * S))
    device = inputs.query.device
    counts = torch.zeros(3, dtype=torch.float64, device=device)
    for start in range(0, S, rows):
        places = torch.arange(start, min(start + rows, S), device=device)
        with torch.autocast(device.type, enabled=False):
            mass, misses = _kept_mass(inputs, selection, config, places)
        heads = misses[:, :, None].expand_as(mass)
        counts += torch.stack([misses.sum(), heads.sum(), (mass * heads).sum()]).double()
    queries, heads, mass = counts.tolist()
    recall = mass / heads if heads else 1.0
    limit_frac = queries / (B * inputs.key.shape[1] * S)
    return SelectionHealth(limit_frac, recall, *block_counts(inputs, selection, config))


def block_counts(
    inputs: Inputs, selection: Tensor, config: NSAConfig
) -> tuple[float, float, float]:
    """Return `blocks_read`, `blocks_predicted` and `full_frac` of a selection `(B, K, T, N)`."""
    read = selection.sum(-1).float()
    predicted = past_blocks(inputs, config).clamp(max=config.num_selected).float()  # (B, T)
    is_full = (read >= config.num_selected).float()
    return (read.mean().item(), predicted.mean().item(), is_full.mean().item())


def _kept_mass(
    inputs: Inputs, selection: Tensor, config: NSAConfig, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the queries at `places` `(Q,)` keep of dense attention.

    Returns:
        `(B, K, G, Q)` float32, the mass inside the selected blocks; `(B, K, Q)` bool, true if a
        block of the query's past is not selected.
    """
    first = inputs.document_starts()[:, places, None]
    keys = torch.arange(inputs.length, device=places.device)
    mask = (keys <= places[:, None]) & (keys >= first)
    chosen = selection[:, :, places // config.select_tile]
    query = inputs.query[:, :, places].unflatten(1, (-1, inputs.group)).float()
    logits = inputs.scale * query @ inputs.key[:, :, None].float().mT  # (B, K, G, Q, S)
    shares = masked_softmax(logits, mask[:, None, None])
    missing = selection.shape[-1] * config.select_block - inputs.length
    by_block = pad(shares, (0, missing)).unflatten(-1, (-1, config.select_block))
    mass = (by_block.sum(-1) * chosen[:, :, None]).sum(-1)
    blocks = torch.arange(selection.shape[-1], device=places.device)
    own = places[:, None] // config.select_block
    is_past = (blocks >= first // config.select_block) & (blocks <= own)
    return mass, (is_past[:, None] & ~chosen).any(-1)
