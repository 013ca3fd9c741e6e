"""Model FLOPs of a training step.

A multiplication and an addition count as two. Recomputation, forming weights and the optimizer
never count: they must show up as a lower MFU. Shapes: S sequence, H heads, D width, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from qat.kernels.nsa.config import NSAConfig
from qat.models.language_model import LanguageModel
from qat.nn.swap import linear_names
from qat.nsa.swap import nsa_config


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
    return TokenFlops(linears, 4.0 * rows * D, 3 * _attention_flops(student, S))


def forward_flops(model: LanguageModel, S: int) -> float:
    """FLOPs per position of a forward pass alone, all logits among them: what a teacher costs."""
    weights = 0
    for name in linear_names(model.model):
        linear = model.model.get_submodule(name)
        weights += linear.out_features * linear.in_features
    head = model.head.out_features * model.head.in_features
    return 2.0 * (weights + head) + _attention_flops(model, S)


def _attention_flops(model: LanguageModel, S: int) -> float:
    """Scores and weighted sums of a forward pass, per position.

    Of sparse attention those of its branches; the few queries that select are left out.
    """
    settings, sparse = model.config, nsa_config(model.model)
    layers = range(settings.num_hidden_layers)
    swapped = () if sparse is None else layers if sparse.layers is None else sparse.layers
    keys = sum(_mean_keys(settings, layer, S) for layer in layers if layer not in swapped)
    if sparse is not None:
        keys += len(swapped) * _mean_sparse_keys(sparse, S)
    heads = settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    return 4.0 * heads * head_dim * keys


def _mean_keys(settings: object, layer: int, S: int) -> float:
    """Keys that a query sees on average in one layer: causal, and inside its window."""
    kinds = getattr(settings, "layer_types", None)
    window = getattr(settings, "sliding_window", None)
    is_local = kinds is not None and kinds[layer] == "sliding_attention" and window
    return _mean_within(window if is_local else S, S)


def _mean_sparse_keys(config: NSAConfig, S: int) -> float:
    """Keys, pooled ones among them, that a query of sparse attention sees on average."""
    selected = _mean_within(config.selected_keys, S)
    if config.mode == "merged":
        return selected
    compressed = sum(config.num_compressed(length) for length in range(1, S + 1)) / S
    return selected + _mean_within(config.window, S) + compressed


def _mean_within(reach: int, S: int) -> float:
    """Keys of the last `reach` that a causal query sees on average."""
    reach = min(S, reach)
    return (reach * (reach + 1) / 2 + (S - reach) * reach) / S
