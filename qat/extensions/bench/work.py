"""The work of a training step, from which its seconds on another device are estimated.

Shapes: D width, V vocabulary.
"""

from dataclasses import dataclass

from qat.models.flops import TokenFlops, linear_weights, weights_used
from qat.models.language_model import LanguageModel


@dataclass(frozen=True)
class StepWork:
    """The work of a training step on a device, per position unless stated otherwise."""

    matmul_flops: float
    """FLOPs of the decoder's linears and the head, with recomputation."""
    attention_flops: float
    elements: float
    """Numbers read and written by the linears; traffic of norms, gates, rotations and the loss is a
    multiple of them."""
    weights: float
    """Weights of the linears; they are moved once per step, however many positions it has."""
    layers: int
    """Decoder layers; in a small step their launch overhead dominates."""


def step_work(student: LanguageModel, flops: TokenFlops, *, recompute: float = 0.0) -> StepWork:
    """Return the work of a step of cost `flops` that repeats a fraction `recompute` of the forward.

    Args:
        student: the model that trains.
        flops: FLOPs of the student's step, at the length of its sequences.
        recompute: 1 with gradient checkpointing, 0 without.
    """
    used, D = weights_used(student), student.head.in_features
    elements = flops.head / (4 * D) + D
    for name, weights in used.items():
        linear = student.model.get_submodule(name)
        elements += weights / linear.in_features + weights / linear.out_features
    return StepWork(
        matmul_flops=flops.linears + flops.head + recompute * 2 * sum(used.values()),
        attention_flops=flops.attention * (1 + recompute / 3),
        elements=elements * (1 + recompute / 3),
        weights=sum(linear_weights(student).values()),
        layers=student.config.num_hidden_layers,
    )
