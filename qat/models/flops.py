"""Model FLOPs of a training step.

A multiplication and an addition count as two. Recomputation, forming weights and the optimizer
never count: they must show up as a lower MFU. Shapes: S sequence, H heads, D width, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from qat.models.language_model import LanguageModel
from qat.models.swap import linear_names


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per position of one training step, in its three parts."""

    linears: float
    """Of the decoder's linears: 6 per weight that learns, 4 per weight that only passes
    gradients on."""
    head: float
    """4 per weight: logits, and their gradient for the hidden states. The candidates loss alone
    needs K rows of the head only."""
    attention: float
    """Scores and weighted sums of causal attention, forward and backward."""

    @property
    def total(self) -> float:
        """All three."""
        return self.linears + self.head + self.attention


class Objective(Protocol):
    """What of a step's settings decides its FLOPs."""

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of parameter that learn."""

    @property
    def losses(self) -> Collection[str]:
        """Names of the losses."""


def token_flops(
    student: LanguageModel, learning: Collection[str], config: Objective, *, S: int, K: int
) -> TokenFlops:
    """What one position costs when the linears called `learning` train, in sequences of S."""
    model = student.model
    teaches_weights = bool({"weights", "scales", "codebook"} & set(config.kinds))
    linears = 0.0
    for name in linear_names(model):
        linear = model.get_submodule(name)
        per_weight = 6 if teaches_weights and name in learning else 4
        linears += per_weight * linear.out_features * linear.in_features
    V, D = student.head.out_features, student.head.in_features
    rows = K if set(config.losses) == {"candidates"} else V
    return TokenFlops(linears, 4.0 * rows * D, 3 * _attention_flops(student.config, S))


def forward_flops(model: LanguageModel, S: int) -> float:
    """FLOPs per position of a forward pass alone, all logits among them: what a teacher costs."""
    weights = 0
    for name in linear_names(model.model):
        linear = model.model.get_submodule(name)
        weights += linear.out_features * linear.in_features
    head = model.head.out_features * model.head.in_features
    return 2.0 * (weights + head) + _attention_flops(model.config, S)


def _attention_flops(settings: object, S: int) -> float:
    """Scores and weighted sums of a forward pass, per position."""
    keys = sum(_mean_keys(settings, layer, S) for layer in range(settings.num_hidden_layers))
    heads = settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    return 4.0 * heads * head_dim * keys


def _mean_keys(settings: object, layer: int, S: int) -> float:
    """Keys that a query sees on average in one layer: causal, and inside its window."""
    kinds = getattr(settings, "layer_types", None)
    window = getattr(settings, "sliding_window", None)
    is_local = kinds is not None and kinds[layer] == "sliding_attention" and window
    reach = min(S, window) if is_local else S
    return (reach * (reach + 1) / 2 + (S - reach) * reach) / S
