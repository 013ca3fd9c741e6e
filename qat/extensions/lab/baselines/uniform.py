"""Uniform asymmetric grids: `w = (code - zero) * scale` with a scale and a zero point per group.

Shapes: O out_features, I in_features, G groups per row, W weights per group.
"""

import logging
import math
import time
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.convert.calibrate import TokenBatch
from qat.errors import TrainingError
from qat.extensions.lab.baselines.training import (
    FP16_BITS,
    WARMUP_PASSES,
    BaselineJob,
    Deployed,
    PreparedTraining,
    TrainingCost,
    check_groups,
    run_or_uncompile,
)
from qat.logs import progress
from qat.models.language_model import LanguageModel
from qat.models.streamed import BlockInputs, record_block_inputs
from qat.nn.swap import decoder_layers, replace_module
from qat.quant.error_feedback import damped, needed_damping

SMALLEST_SCALE = 1e-5


class Grid(NamedTuple):
    """The scales and zero points that give codes their values."""

    scales: Tensor  # `(O, G)` float32, positive, rounded to float16
    zeros: Tensor  # `(O, G)` float32, whole numbers in the range of the codes


def minmax_grid(weight: Tensor, bits: int, group_size: int) -> Grid:
    """Return the grid from each group's least to its largest weight, extended to include zero.

    Raises:
        ConfigError: the groups do not divide the rows of `weight` `(O, I)`.
    """
    check_groups(weight.shape[1], group_size)
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=SMALLEST_SCALE).half().float()
    return Grid(scales, (-low / scales).round().clamp(0, 2**bits - 1))


def codes_of(weight: Tensor, grid: Grid, bits: int) -> Tensor:
    """Return the nearest codes, `(O, I)` whole numbers from 0 in float32."""
    groups = weight.float().unflatten(1, (grid.scales.shape[1], -1))
    codes = (groups / grid.scales[..., None]).round() + grid.zeros[..., None]
    return codes.clamp(0, 2**bits - 1).flatten(1)


def values_of(codes: Tensor, grid: Grid) -> Tensor:
    """Return the weight that `codes` represent, `(O, I)`."""
    groups = codes.unflatten(1, (grid.scales.shape[1], -1))
    return ((groups - grid.zeros[..., None]) * grid.scales[..., None]).flatten(1)


def uniform_bits(weight: Tensor, bits: int, group_size: int) -> int:
    """Return the bits stored: a code per weight, a float16 scale and a zero point per group."""
    groups = weight.numel() // group_size
    return weight.numel() * bits + groups * (FP16_BITS + bits)


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """Round the weight to its min-max grid, `(O, I)`."""
    grid = minmax_grid(weight, bits, group_size)
    return values_of(codes_of(weight, grid, bits), grid)


# GPTQ (arXiv:2210.17323) on uniform asymmetric grids, in activation order.
#
# The columns are rounded one after the other; the error of each, weighted by the inverse Hessian of
# the layer's inputs, is compensated in the columns not yet rounded. Groups keep their initial
# min-max grid, so that the order of columns costs no bits.
#
# Shapes: O out_features, I in_features, G groups per row.

BLOCK = 128


def gptq(weight: Tensor, hessian: Tensor, bits: int, group_size: int) -> Tensor:
    """Return the weight `(O, I)` on its grid, optimized for `hessian = mean(x x^T)` `(I, I)`.

    Raises:
        ConfigError: the groups do not divide the rows.
    """
    grid = minmax_grid(weight, bits, group_size)
    H = damped(hessian.double(), needed_damping(hessian))
    order = H.diagonal().argsort(descending=True)
    group_of = order // group_size
    each = Grid(grid.scales[:, group_of], grid.zeros[:, group_of])  # one group per column
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H[order][:, order]))
    U = torch.linalg.cholesky(inverse, upper=True).float()  # U^T U = H^-1
    found = sweep(weight.float()[:, order], U, each, bits)
    return found[:, order.argsort()]


def sweep(weight: Tensor, U: Tensor, grid: Grid, bits: int) -> Tensor:
    """Round the columns from left to right, compensating errors in the columns that follow.

    `grid` has a scale and a zero point for every column.
    """
    rest, found = weight.clone(), torch.empty_like(weight)
    for start in range(0, weight.shape[1], BLOCK):
        end = min(start + BLOCK, weight.shape[1])
        errors = torch.empty_like(weight[:, start:end])
        for i in range(start, end):
            own = Grid(grid.scales[:, i : i + 1], grid.zeros[:, i : i + 1])
            found[:, i] = values_of(codes_of(rest[:, i : i + 1], own, bits), own)[:, 0]
            error = (rest[:, i] - found[:, i]) / U[i, i]
            rest[:, i:end] -= error[:, None] * U[i, i:end]
            errors[:, i - start] = error
        rest[:, end:] -= errors @ U[start:end, end:]
    return found


# EfficientQAT (arXiv:2407.11062) on a teacher cache: block by block first, then scales end to end.
#
# Stage 1 trains weights, scales and zero points of one decoder block after the other: on the
# outputs of the already quantized blocks it must reproduce the outputs of the float model (mean
# squared error). Stage 2 keeps codes and zero points and trains the scales alone, here with the
# distillation loss.
#
# Cost: a block's step covers 1 / num_layers of the model, so S steps in every block cost S full
# steps. Half of `max_steps` goes to stage 1, minus its two forward passes over its sequences (a
# third of a step each).
#
# Shapes: O out_features, I in_features, G groups per row, W weights per group, B sequences.

logger = logging.getLogger(__name__)

MOST_SEQUENCES = 4096  # most sequences in stage 1, as published
POOL_SHARE = 8  # stage 1 uses at most `max_steps` / POOL_SHARE different batches
FORWARD_SHARE = 1 / 3  # cost of a forward pass in steps
BLOCK_LR, BLOCK_MIN_LR_RATIO = 1e-4, 0.05
"""Peak learning rate in a block, and the last one as a fraction of it."""


class BlockLinear(nn.Module):
    """Stage 1: a trained weight on a trained grid, rounded straight-through."""

    def __init__(self, linear: nn.Linear, bits: int, group_size: int) -> None:
        super().__init__()
        self.bits = bits
        grid = minmax_grid(linear.weight.detach(), bits, group_size)
        self.weight = nn.Parameter(linear.weight.detach().float().clone())
        self.scales, self.zeros = map(nn.Parameter, grid)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def quantized_weight(self) -> Tensor:
        """Return the quantized weight `(O, I)`, differentiable in weight, scales and zeros."""
        groups = self.weight.unflatten(1, (self.scales.shape[1], -1))
        scales = self.scales.clamp(min=SMALLEST_SCALE)[..., None]
        highest = 2**self.bits - 1
        zeros = round_through(self.zeros).clamp(0, highest)[..., None]
        codes = (round_through(groups / scales) + zeros).clamp(0, highest)
        return ((codes - zeros) * scales).flatten(1)

    @torch.no_grad()
    def grid(self) -> Grid:
        """Return the current scales and rounded zero points."""
        highest = 2**self.bits - 1
        zeros = self.zeros.round().clamp(0, highest)
        return Grid(self.scales.clamp(min=SMALLEST_SCALE).clone(), zeros)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., I)` to `(..., O)`."""
        return F.linear(x, self.quantized_weight(), self.bias)


class ScaledLinear(nn.Module):
    """Stage 2: fixed codes and zero points, trained scales."""

    def __init__(self, linear: BlockLinear) -> None:
        super().__init__()
        grid = linear.grid()
        self.bits = linear.bits
        self.register_buffer("codes", codes_of(linear.weight.detach(), grid, linear.bits))
        self.register_buffer("zeros", grid.zeros)
        self.register_buffer("bias", linear.bias)
        self.scales = nn.Parameter(grid.scales)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., I)` to `(..., O)`."""
        weight = values_of(self.codes, Grid(self.scales, self.zeros))
        return F.linear(x, weight, self.bias)

    @torch.no_grad()
    def deployed(self) -> Deployed:
        """Return the weight with scales in float16."""
        weight = values_of(self.codes, Grid(self.scales.half().float(), self.zeros))
        size = weight.shape[1] // self.scales.shape[1]
        return Deployed(weight, uniform_bits(weight, self.bits, size))


def round_through(x: Tensor) -> Tensor:
    """Round `x` with the gradient of the identity."""
    return x.detach().round() + (x - x.detach())


def efficientqat_training(job: BaselineJob) -> PreparedTraining:
    """Run stage 1 and prepare stage 2; `settings.block_steps` of 0 skips stage 1.

    Raises:
        ConfigError: the groups do not divide the rows.
        TrainingError: a block's error is not finite.
    """
    budget = Budget.of(job)
    original = deepcopy(job.model) if budget.block_steps else job.model
    for name in job.names:
        linear = job.model.get_submodule(name)
        bits = job.settings.bits_of(name)
        replace_module(job.model, name, BlockLinear(linear, bits, job.settings.group_size))
    cost = TrainingCost()
    if budget.block_steps:
        cost = _train_blocks(job, LanguageModel(original), budget)
    for name in job.names:
        replace_module(job.model, name, ScaledLinear(job.model.get_submodule(name)))
    modules = {name: job.model.get_submodule(name) for name in job.names}
    step = job.step([m.scales for m in modules.values()], job.kd_loss(), steps=budget.steps)
    return PreparedTraining(
        step,
        lambda: {name: module.deployed() for name, module in modules.items()},
        budget.steps,
        cost,
    )


class Budget(NamedTuple):
    """The division of `max_steps` between the stages."""

    num_batches: int  # different batches in stage 1
    block_steps: int  # steps in each block
    steps: int  # steps of stage 2

    @classmethod
    def of(cls, job: BaselineJob) -> "Budget":
        """Give each stage half, unless the settings fix the steps per block."""
        settings = job.settings
        sequences = min(MOST_SEQUENCES, job.cache.num_sequences("train"))
        batches = min(sequences // settings.batch_size, settings.max_steps // POOL_SHARE)
        batches = max(1, batches)
        forwards = math.ceil(2 * FORWARD_SHARE * batches)
        block_steps = settings.block_steps
        if block_steps is None:
            block_steps = max(0, settings.max_steps // 2 - forwards)
        used = block_steps + forwards if block_steps else 0
        return cls(batches, block_steps, max(1, settings.max_steps - used))


def _train_blocks(job: BaselineJob, original: LanguageModel, budget: Budget) -> TrainingCost:
    blocks = _Blocks(job, original, budget)
    job.backend.reset_peak_memory()
    seconds = 0.0
    layers = list(zip(decoder_layers(original.model), decoder_layers(job.model), strict=True))
    with progress("training block by block", len(layers), "blocks") as ticker:
        for index, (float_layer, layer) in enumerate(layers):
            blocks.warm_up(layer, index)
            began = time.perf_counter()
            error = blocks.train(float_layer, layer, index)
            job.backend.synchronize()
            seconds += time.perf_counter() - began
            if not math.isfinite(error):
                raise TrainingError(
                    f"block {index} has an error of {error}, expected a number; try dtype = 'fp32'"
                )
            logger.info("block %d: mean squared error %.4g", index, error)
            ticker.advance()
    used = job.settings.max_steps - budget.steps
    return TrainingCost(used, seconds, job.backend.memory_use().peak_gib or 0.0)


class _Blocks:
    def __init__(self, job: BaselineJob, original: LanguageModel, budget: Budget) -> None:
        self._job = job
        self._steps = budget.block_steps
        layers = decoder_layers(original.model)
        self._calls: list[BlockInputs] = []
        for number in range(budget.num_batches):
            batch = job.batch(number)
            tokens = TokenBatch(batch.input_ids, batch.position_ids)
            with torch.no_grad():
                self._calls.append(record_block_inputs(original, layers, tokens))
        self._targets = [call.hidden for call in self._calls]
        self._states = list(self._targets)

    def warm_up(self, layer: nn.Module, index: int) -> None:
        """Compile the block outside the clock, without changing it."""
        layer.requires_grad_(False)
        for linear in _linears(layer):
            linear.requires_grad_(True)
        if self._job.backend.compiles:
            layer.forward = torch.compile(layer.forward)

        def run() -> None:
            for _ in range(WARMUP_PASSES):
                self._error(layer, index, 0).backward()
                layer.zero_grad(set_to_none=True)

        run_or_uncompile(run, lambda: vars(layer).pop("forward", None))
        self._job.backend.synchronize()

    def train(self, float_layer: nn.Module, layer: nn.Module, index: int) -> float:
        """Train the block, then advance all states past it; return the last step's error."""
        self._targets = self._moved(float_layer, self._targets, index)
        learning = [p for m in _linears(layer) for p in (m.weight, m.scales, m.zeros)]
        adamw = torch.optim.AdamW(learning, lr=BLOCK_LR, weight_decay=0.0, fused=True)
        for step in range(self._steps):
            done = step / max(1, self._steps - 1)
            share = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
            share = BLOCK_MIN_LR_RATIO + (1 - BLOCK_MIN_LR_RATIO) * share
            for group in adamw.param_groups:
                group["lr"] = BLOCK_LR * share
            error = self._error(layer, index, step % len(self._states))
            error.backward()
            adamw.step()
            adamw.zero_grad(set_to_none=True)
        layer.requires_grad_(False)
        vars(layer).pop("forward", None)  # without gradients it would be compiled again
        self._states = self._moved(layer, self._states, index)
        return error.item()

    def _error(self, layer: nn.Module, index: int, number: int) -> Tensor:
        """Return the mean squared error of one batch against the float block's output."""
        output = self._output(layer, self._states[number], index, number=number)
        return F.mse_loss(output, self._targets[number])

    @torch.no_grad()
    def _moved(self, layer: nn.Module, states: list[Tensor], index: int) -> list[Tensor]:
        return [self._output(layer, x, index, number=i) for i, x in enumerate(states)]

    def _output(self, layer: nn.Module, hidden: Tensor, index: int, *, number: int) -> Tensor:
        """Return the output of block `index` for batch `number`, `(B, S, D)` float32."""
        with self._job.backend.autocast(self._job.dtype):
            output = layer(hidden, **self._calls[number].kwargs[index])
        return (output[0] if isinstance(output, tuple) else output).float()


def _linears(layer: nn.Module) -> list[BlockLinear]:
    return [module for module in layer.modules() if isinstance(module, BlockLinear)]
