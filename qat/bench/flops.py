"""Model FLOPs of a training step, and how fast this device really is.

A multiplication and an addition count as two. Recomputation, forming weights and the optimizer
never count: they must show up as a lower MFU. Shapes: S sequence, H heads, D width, V vocabulary.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from qat.backend import DTYPES, Backend
from qat.bench.config import MeasureConfig
from qat.bench.devices import device_called
from qat.models.language_model import LanguageModel
from qat.models.swap import linear_names

LARGEST, SHORTEST_S, REPEATS = 8192, 2e-3, 10


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


def token_flops(
    student: LanguageModel, learning: Collection[str], config: MeasureConfig, *, S: int, K: int
) -> TokenFlops:
    """What one position costs when the linears called `learning` train, in sequences of S."""
    model, settings = student.model, student.config
    teaches_weights = bool({"weights", "scales", "codebook"} & set(config.kinds))
    linears = 0.0
    for name in linear_names(model):
        linear = model.get_submodule(name)
        per_weight = 6 if teaches_weights and name in learning else 4
        linears += per_weight * linear.out_features * linear.in_features
    V, D = student.head.out_features, student.head.in_features
    rows = K if set(config.losses) == {"candidates"} else V
    H, head_dim = settings.num_attention_heads, settings.head_dim
    keys = sum(_mean_keys(settings, layer, S) for layer in range(settings.num_hidden_layers))
    return TokenFlops(linears, 4.0 * rows * D, 3 * 4.0 * H * head_dim * keys)


def _mean_keys(settings: object, layer: int, S: int) -> float:
    """Keys that a query sees on average in one layer: causal, and inside its window."""
    kinds = getattr(settings, "layer_types", None)
    window = getattr(settings, "sliding_window", None)
    is_local = kinds is not None and kinds[layer] == "sliding_attention" and window
    reach = min(S, window) if is_local else S
    return (reach * (reach + 1) / 2 + (S - reach) * reach) / S


@dataclass(frozen=True)
class Roofline:
    """How fast the device is, by its data sheet and by what was measured on the spot."""

    sheet_flops: float | None
    """Peak FLOP/s in the compute dtype, or None for a device outside the table."""
    matmul_flops: float
    """FLOP/s of a large square matmul in the compute dtype."""
    copy_bytes: float
    """Bytes per second read and written by a large copy."""

    def mfu(self, flops_per_s: float) -> dict[str, float | None]:
        """The share of each peak that `flops_per_s` is."""
        sheet = self.sheet_flops
        return {
            "mfu_frac": None if sheet is None else flops_per_s / sheet,
            "mfu_of_matmul_frac": flops_per_s / self.matmul_flops,
        }


def measure_roofline(backend: Backend, dtype: str) -> Roofline:
    """Peaks of the device for the compute dtype called `dtype`."""
    device = device_called(backend.name())
    with backend.matmul_precision(dtype):
        matmul = _measure_matmul(backend, DTYPES[dtype])
    sheet = None if device is None else device.peak_flops(dtype)
    return Roofline(sheet, matmul, _measure_copy(backend))


def _measure_matmul(backend: Backend, dtype: torch.dtype) -> float:
    n, best = 256, math.inf
    while True:
        a, b = (torch.randn(n, n, device=backend.device).to(dtype) for _ in range(2))
        out = a @ b
        best = _fastest(backend, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        if best >= SHORTEST_S or n >= LARGEST:
            return 2 * n**3 / best
        n *= 2


def _measure_copy(backend: Backend) -> float:
    count = 2**20
    while True:
        source = torch.ones(count, device=backend.device)
        target = torch.empty_like(source)
        best = _fastest(backend, lambda t=target, s=source: t.copy_(s))
        if best >= SHORTEST_S or count >= 2**28:
            return 2 * source.nbytes / best
        count *= 4


def _fastest(backend: Backend, run: object) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        first = backend.mark()
        run()
        times.append(backend.seconds_between(first, backend.mark()))
    return min(times)
