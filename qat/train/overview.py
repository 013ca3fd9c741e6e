"""Describe a run before its first step: lines for its user, and its FLOPs."""

from typing import TYPE_CHECKING

from qat.models.devices import device_called
from qat.models.flops import forward_flops, token_flops
from qat.train.learnable import linears_in_scope

if TYPE_CHECKING:
    from qat.train.loop import Trainer


def intention(trainer: "Trainer") -> list[str]:
    """Return lines that tell the user what the run will do."""
    config, count = trainer.config, trainer.cache.num_sequences("train")
    sequences = config.sequences_per_step * trainer.ranks.size
    linears = len(linears_in_scope(trainer.student.model, config.scope, config.kinds))
    where = {"mlp": "in the MLPs", "attention": "in the attention", "e2e": "in all blocks"}
    devices = f"{trainer.ranks.size} x " if trainer.ranks.size > 1 else ""
    left = config.max_steps - trainer.step
    steps = f"{left:,} steps left of {config.max_steps:,}" if trainer.step else f"{left:,} steps"
    lines = [
        f"training on {devices}{trainer.backend.name()} in {config.dtype}: "
        f"{trainer.optimizer.num_learnable():,} values learn "
        f"({', '.join(trainer.optimizer.kinds)} of {linears} linears {where[config.scope]})",
        f"{steps}, each of "
        f"{sequences * trainer.cache.sequence_length:,} tokens ({sequences} sequences of "
        f"{trainer.cache.sequence_length}): {left * sequences / count:.3g} passes "
        f"over the {count:,} sequences of {trainer.cache.directory}",
    ]
    if trainer.rollouts is not None:
        own = config.own_rows * sequences // config.batch_size
        every = f"{config.rollout_every} steps" if config.rollout_every > 1 else "step"
        lines.append(
            f"{own} of the {sequences} sequences of a step are prompts that the student goes "
            f"on with, by {trainer.rollouts.longest} tokens at most, anew every {every}"
        )
    return lines


def flops_share(trainer: "Trainer") -> float | None:
    """Return the peak's share that one position a second takes; None for an unknown device."""
    student, config, S = trainer.student, trainer.config, trainer.cache.sequence_length
    names = linears_in_scope(student.model, config.scope, config.kinds)
    K = trainer.cache.manifest.settings.top_k
    flops = token_flops(student, names, config, S=S, K=K).total
    if trainer.teacher is not None:
        share = config.on_policy if config.on_policy and config.reads_cache else 1.0
        flops += share * forward_flops(trainer.teacher, S)
    device = device_called(trainer.backend.name())
    peak = None if device is None else device.peak_flops(config.dtype)
    return None if peak is None else flops / peak
