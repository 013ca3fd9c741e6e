"""Learning-rate schedules: pure functions from a step to a share of the peak."""

import math
from typing import Literal

DECAY_FRAC = 0.2


def lr_share(
    step: int,
    max_steps: int,
    *,
    schedule: Literal["cosine", "constant", "wsd"],
    warmup_steps: int,
    min_ratio: float,
) -> float:
    """The learning rate of optimizer step `step` (from 0) as a share of its peak.

    Rises linearly over `warmup_steps`; then `constant` stays at 1, `cosine` falls to `min_ratio` at
    the end, and `wsd` (warm-up, stable, decay) stays at 1 and falls linearly over the last fifth.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        decay_steps = max(1, round(DECAY_FRAC * max_steps))
        done = max(0.0, 1 - (max_steps - 1 - step) / decay_steps)
        return 1 - (1 - min_ratio) * done
    done = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * done)) / 2
