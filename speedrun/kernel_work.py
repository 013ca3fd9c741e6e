"""The Triton kernels at training shapes: what each is called on, and what it must move.

Data is that of a whole model or of a whole batch, far larger than a GPU's cache: in training each
linear's weight and each batch's tokens come from memory too. Bytes are those of every tensor read
and written once; of rows that are gathered, those of every gather.

Shapes: T tokens, K teacher tokens kept, V vocabulary, D width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qat.bench.batches import random_batch
from qat.bench.run import Setting
from qat.kernels.adamw import Moving, Noise, Rates, stochastic_adamw_
from qat.kernels.dispatch import use_triton
from qat.kernels.head import Head, LogitGradients, chosen_logits, hidden_gradient, other_words
from qat.kernels.topk import Blocks, summarize, top_k_of_blocks
from qat.models.language_model import LanguageModel
from qat.models.swap import to_latent
from qat.nn.quant_linear import QuantLinear
from qat.nn.step import quant_linears
from qat.quant.pack import Packed

TOP_K_TOKENS = 8192
"""Rows of logits that top-k reads at a time."""


@dataclass(frozen=True)
class Work:
    """Calls of one kernel, and what they move and compute."""

    name: str
    run: Callable[[], object]
    calls: int
    num_bytes: int
    flops: float = 0.0
    kernel: str = ""
    """Part of the kernel's name, where `run` runs others beside it: its own time alone counts."""
    counts: bool = True
    """Whether the smallest share of all is looked for here too."""


@dataclass(frozen=True)
class Place:
    """What kernels run in: a student, a batch's size and a compute dtype."""

    setting: Setting
    student: LanguageModel
    dtype: torch.dtype
    sequences: int

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers on the device."""
        device = self.setting.backend.device
        return torch.randn(shape, device=device, dtype=dtype or self.dtype)


def model_work(place: Place) -> Iterator[Work]:
    """The kernels of weights, losses, cache and optimizer; latent weights, which stay, come last.

    Each one's data may be forgotten before the next begins.
    """
    yield from linear_work(place, "packed")
    yield from head_work(place)
    yield from top_k_work(place)
    yield from optimizer_work(place)
    to_latent(place.student.model, [*quant_linears(place.student.model)])
    yield from linear_work(place, "latent")


def linear_work(place: Place, source: str) -> Iterator[Work]:
    """Form and pull back over every linear of the model, by bits."""
    linears = [*quant_linears(place.student.model).values()]
    for bits in sorted({linear.spec.bits for linear in linears}):
        chosen = [linear for linear in linears if linear.spec.bits == bits]
        yield form_work(place, chosen, f"form, {source} {bits}-bit")
        yield pull_back_work(place, chosen, f"pull back, {source} {bits}-bit")


def form_work(place: Place, linears: list[QuantLinear], name: str) -> Work:
    """`form` of each linear into a weight of its own."""
    device = place.setting.backend.device
    weights = [
        torch.empty(linear.out_features, linear.in_features, dtype=place.dtype, device=device)
        for linear in linears
    ]

    def run() -> None:
        for linear, weight in zip(linears, weights, strict=True):
            linear.quantized_weight(place.dtype, out=weight)

    return Work(name, run, len(linears), num_bytes(*weights, *map(read_by, linears)))


def pull_back_work(place: Place, linears: list[QuantLinear], name: str) -> Work:
    """`pull_back` of a gradient of its own for each linear, to scales and codebook."""
    gradients = [place.random(linear.out_features, linear.in_features) for linear in linears]
    wanted = [
        {*linear.scale_parameters(), *(["codebook"] if linear.spec.codebook == "lut" else [])}
        for linear in linears
    ]

    def run() -> None:
        for linear, dW, names in zip(linears, gradients, wanted, strict=True):
            linear.pulled_back(dW, names)

    written = [
        parameter
        for linear, names in zip(linears, wanted, strict=True)
        for name, parameter in linear.weight_parameters().items()
        if name in names
    ]
    total = num_bytes(*gradients, *written, *map(read_by, linears))
    return Work(name, run, len(linears), total)


def read_by(linear: QuantLinear) -> list[Tensor]:
    """What a linear's weight is made of."""
    source = linear.source()
    octets = source.octets if isinstance(source, Packed) else source
    return [octets, linear.codebook, *linear.scale_parameters().values()]


def head_work(place: Place) -> Iterator[Work]:
    """The losses' passes over the head: chosen words, and all others."""
    data = place.setting.data
    device = place.setting.backend.device
    ids = random_batch(data, place.sequences, torch.Generator(device).manual_seed(0))
    ids = ids.topk_ids.flatten(0, 1)
    head = place.student.head_in(place.dtype)
    (T, K), D = ids.shape, head.weight.shape[1]
    hidden, out = place.random(T, D), place.random(T, D)
    g_chosen = place.random(T, K, dtype=torch.float32)
    gathered = T * K * D * head.weight.element_size()
    yield Work(
        "gather-dot",
        lambda: chosen_logits(hidden, head, ids),
        calls=1,
        num_bytes=gathered + num_bytes(hidden, ids, g_chosen),  # logits as large as their gradient
    )
    g_logits = LogitGradients(ids, g_chosen, K)
    yield Work(
        "gather-sum",
        lambda: hidden_gradient(g_logits, None, head.weight, out=out),
        calls=1,
        num_bytes=gathered + num_bytes(out, ids, g_chosen),
    )
    yield from other_words_work(hidden * D**-0.5, head, ids)


def other_words_work(hidden: Tensor, head: Head, ids: Tensor) -> Iterator[Work]:
    """The exact loss's pass: its softmax kernel alone, and with its two matmuls a tile."""
    T, (V, D) = hidden.shape[0], head.weight.shape

    def run() -> None:
        other_words(hidden, head, ids, want_slope=True)

    logits_bytes = hidden.element_size()
    if use_triton(hidden):
        from qat.kernels.head_triton import FLOAT32_LOGITS

        logits_bytes = 4 if FLOAT32_LOGITS else logits_bytes
    moved = T * V * (logits_bytes + hidden.element_size())
    if use_triton(hidden):
        yield Work("softmax tile", run, 1, moved, kernel="softmax_tile")
    yield Work("other words", run, 1, moved, flops=4.0 * T * V * D, counts=False)


def top_k_work(place: Place) -> Iterator[Work]:
    """The cache's pass over logits, and what picks the top K from its blocks."""
    tokens = min(TOP_K_TOKENS, place.sequences * place.setting.data.seq_len)
    K, V = place.setting.data.top_k, place.student.head.weight.shape[0]
    logits = place.random(tokens, V)
    blocks: Blocks = summarize(logits)
    yield Work(
        "top-k, block pass",
        lambda: summarize(logits),
        calls=1,
        num_bytes=num_bytes(logits, *blocks),
    )
    read = num_bytes(*blocks) + tokens * K * 64 * logits.element_size()
    yield Work(
        "top-k, selection",
        lambda: top_k_of_blocks(logits, K, blocks),
        calls=1,
        num_bytes=read + tokens * K * 12,
        counts=False,  # the cache's, and bound by comparisons
    )


def optimizer_work(place: Place) -> Iterator[Work]:
    """AdamW on bfloat16 latent weights of the model's linears."""
    shapes = [(m.out_features, m.in_features) for m in quant_linears(place.student.model).values()]
    half = torch.bfloat16
    moving = [
        Moving(*(place.random(*shape, dtype=half).abs_().mul_(0.01) for _ in range(4)))
        for shape in shapes
    ]
    shared = torch.tensor([1.0, 0.5, 0.5], device=place.setting.backend.device)
    rates = Rates(lr=0.0, decay=0.0, beta1=0.9, beta2=0.95, eps=1e-12)

    def run() -> None:
        for index, tensors in enumerate(moving):
            stochastic_adamw_(tensors, shared, rates, Noise(seed=0, step=0, index=index))

    written = [t for m in moving for t in (m.parameter, m.exp_avg, m.exp_avg_sq)]
    total = num_bytes(*written, *(t for m in moving for t in m))
    yield Work("AdamW, stochastic rounding", run, len(moving), total)


def num_bytes(*tensors: Tensor | list[Tensor]) -> int:
    """Bytes that tensors hold, one by one or in lists."""
    flat = [t for item in tensors for t in (item if isinstance(item, list) else [item])]
    return sum(tensor.numel() * tensor.element_size() for tensor in flat)
