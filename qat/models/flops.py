"""Model FLOPs of a training step.

A multiplication and an addition count as two. Recomputation, forming weights and the optimizer
never count: they must show up as a lower MFU. Shapes: S sequence, H heads, D width, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from qat.models.attention import sparse_attention
from qat.models.language_model import LanguageModel
from qat.nn.sites import experts_of
from qat.nn.swap import head_dim, layer_config, linear_names


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per position of one training step, in its parts."""

    linears: float
    """Linears of the decoder: 6 per weight that learns, 4 per weight that only propagates
    gradients."""
    head: float
    """The head, 4 per weight: logits and their gradient for the hidden states. The candidates loss
    alone only needs K rows of the head."""
    attention: float
    """Scores and weighted sums of causal attention, forward and backward."""
    teacher: float = 0.0
    """The forward pass of a teacher that runs in the same step."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.linears + self.head + self.attention + self.teacher


WITHOUT_SCORES = ("linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp")
"""Layer types in configurations that have no attention scores."""
CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
"""Names in configurations for the number of experts per token."""


class Objective(Protocol):
    """The settings of a step that determine its FLOPs."""

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of parameter that learn."""

    @property
    def losses(self) -> Collection[str]:
        """Names of the losses."""


def token_flops(
    student: LanguageModel, learning: Collection[str], config: Objective, *, S: int, K: int
) -> TokenFlops:
    """Return the FLOPs of one position when the linears in `learning` train, in sequences of S."""
    teaches_weights = bool({"weights", "scales", "codebook"} & set(config.kinds))
    linears = 0.0
    for name, weights in weights_used(student).items():
        linears += (6 if teaches_weights and name in learning else 4) * weights
    V, D = student.head.out_features, student.head.in_features
    rows = K if set(config.losses) == {"candidates"} else V
    return TokenFlops(linears, 4.0 * rows * D, 3 * _attention_flops(student, S))


def forward_flops(model: LanguageModel, S: int) -> float:
    """Return the FLOPs per position of a forward pass with all logits, as a teacher runs it."""
    weights = sum(weights_used(model).values())
    head = model.head.out_features * model.head.in_features
    return 2.0 * (weights + head) + _attention_flops(model, S)


def linear_weights(model: LanguageModel) -> dict[str, float]:
    """Return the number of weights of each linear of the decoder."""
    linears = {name: model.model.get_submodule(name) for name in linear_names(model.model)}
    return {name: float(each.out_features * each.in_features) for name, each in linears.items()}


def weights_used(model: LanguageModel) -> dict[str, float]:
    """Return the weights of each linear that a token uses; for experts, those of chosen ones."""
    used = linear_weights(model)
    for name in used:
        owner, _, key = name.rpartition(".")
        if experts := experts_of(model.model.get_submodule(owner), key):
            chosen = (getattr(model.config, key, None) for key in CHOSEN_EXPERTS)
            used[name] *= next(filter(None, chosen), 1) / experts
    return used


def _attention_flops(model: LanguageModel, S: int) -> float:
    """Return the FLOPs per position of scores and weighted sums in a forward pass."""
    sparse, flops = sparse_attention(model.model), 0.0
    swapped, keys_there = (), 0.0
    if sparse is not None:
        swapped = sparse.layers(model.model.config)
        keys_there = sparse.mean_keys(model.model.config, S)
    kinds = getattr(model.config, "layer_types", None)
    for layer in range(model.config.num_hidden_layers):
        settings = layer_config(model.config, layer)
        heads = getattr(settings, "num_attention_heads", None)
        if heads is None or (kinds is not None and kinds[layer] in WITHOUT_SCORES):
            continue
        keys = keys_there if layer in swapped else _mean_keys(settings, layer, S)
        flops += 4.0 * heads * head_dim(settings) * keys
    return flops


def _mean_keys(settings: object, layer: int, S: int) -> float:
    """Return the average number of keys per query in one layer: causal, and inside its window."""
    kinds = getattr(settings, "layer_types", None)
    window = getattr(settings, "sliding_window", None)
    is_local = kinds is not None and kinds[layer] == "sliding_attention" and window
    return mean_within(window if is_local else S, S)


def mean_within(reach: int, S: int) -> float:
    """Return how many of the last `reach` keys a causal query sees on average."""
    reach = min(S, reach)
    return (reach * (reach + 1) / 2 + (S - reach) * reach) / S
