"""The reference's training from its formula: rank by rank, without forming the weight.

Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5: `y = sum_r g_r A_r * ((x * B_r) @ Q.T)`, with
unit columns in A and unit rows in B, normalised in every forward; MLP rank 32, attention rank 8.
Below rank 16 the matmuls run one after the other, from there on as one batch of ranks. The loss
gathers the rows of the head for all candidates. It always uses gradient checkpointing, as
published.

Shapes: O out_features, I in_features, R rank, T tokens, K teacher tokens kept, D width.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.backend.base import DTYPES
from qat.extensions.bench.config import MeasureConfig
from qat.extensions.lab.baselines.config import BaselineSettings
from qat.extensions.lab.baselines.training import (
    FP16_BITS,
    BaselineJob,
    Deployed,
    PlainStep,
    PreparedTraining,
    check_groups,
    dense_copy,
)
from qat.losses.formulas import Targets
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import QuantLinear
from qat.nn.swap import replace_module
from qat.quant.spec import role_of
from qat.quant.weight import chosen_levels, expand_scales

# Initialization: the largest absolute weight of each group, repeated over the group, is
# approximated at low rank by SVD; each weight then takes the nearest value of an evenly spaced
# table of L entries times `S = A diag(g) B`. The converter reduces the table from 16 to 4 entries
# by k-means over the entries, adds ranks of noise to the scale, and chooses all levels again.

Q4_BITS, Q4_RANK = 4, 4
NEW_GAIN, NEW_STD = 0.01, 0.01
GAIN_FLOOR = 0.01
KMEANS_ROUNDS = 20
TINY = 1e-6


class LowRank(NamedTuple):
    """A scale for every weight, `normalize(A) diag(g) normalize(B)`."""

    A: Tensor  # `(O, R)`
    g: Tensor  # `(R,)`
    B: Tensor  # `(R, I)`

    def unit(self) -> "LowRank":
        """Return the same scale with unit columns in A and unit rows in B."""
        A = self.A / self.A.norm(dim=0, keepdim=True).clamp_min(TINY)
        return LowRank(A, self.g, self.B / self.B.norm(dim=1, keepdim=True).clamp_min(TINY))

    def formed(self) -> Tensor:
        """Return the scale as a matrix `(O, I)`, of either sign."""
        A, g, B = self.unit()
        return (A * g) @ B


def svd_scale(weight: Tensor, rank: int, group_size: int) -> LowRank:
    """Return the best approximation of rank `rank` to the largest absolute weight of each group.

    Gains are at least a hundredth of the largest one, and at least 0.01.

    Raises:
        ConfigError: the groups do not divide the rows.
    """
    check_groups(weight.shape[1], group_size)
    largest = weight.float().unflatten(1, (-1, group_size)).abs().amax(2)
    U, s, V = torch.linalg.svd(largest.repeat_interleave(group_size, 1), full_matrices=False)
    R = min(rank, len(s))
    floor = max(GAIN_FLOOR * s[0].item(), GAIN_FLOOR)
    return LowRank(U[:, :R].contiguous(), s[:R].clamp(min=floor), V[:R].contiguous())


def even_lut(entries: int) -> Tensor:
    """Return evenly spaced values from -1 to 1, rounded to float16, `(L,)` float32."""
    return torch.linspace(-1, 1, entries, dtype=torch.float16).float()


def fewer_entries(lut: Tensor, entries: int) -> Tensor:
    """Reduce `lut` by k-means over its entries, initialized at its quantiles; ties go down."""
    L = len(lut)
    centres = lut[torch.arange(1, entries + 1) * L // (entries + 1)]
    for _ in range(KMEANS_ROUNDS):
        owner = (lut[:, None] - centres).abs().argmin(1)
        centres = torch.stack([lut[owner == c].mean() for c in range(entries)])
    return centres


def more_ranks(scale: LowRank, rank: int, generator: torch.Generator) -> LowRank:
    """Return the scale with added ranks of random direction and a gain of 0.01."""
    (O, R), I = scale.A.shape, scale.B.shape[1]
    here = {"generator": generator, "device": generator.device}
    A = NEW_STD * torch.randn(O, rank - R, **here).to(scale.A)
    B = NEW_STD * torch.randn(rank - R, I, **here).to(scale.B)
    g = scale.g.new_full((rank - R,), NEW_GAIN)
    return LowRank(torch.cat([scale.A, A], 1), torch.cat([scale.g, g]), torch.cat([scale.B, B]))


def nearest_entries(weight: Tensor, scale: LowRank, lut: Tensor) -> Tensor:
    """Return the entry of `lut` nearest to each weight over its scale, `(O, I)` float32."""
    S = scale.formed()
    lut = lut.to(weight.device)
    levels = torch.where(S == 0, 0.0, weight.float() / S)
    return lut[torch.bucketize(levels, (lut[1:] + lut[:-1]) / 2)]


MLP_RANK, ATTENTION_RANK, BATCHED_FROM = 32, 8, 16
TEMPERATURE = 2.0


class RankByRank(nn.Module):
    """A linear of fixed levels `Q` with a trained scale `A diag(g) B`."""

    def __init__(self, Q: Tensor, scale: LowRank, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("Q", Q)
        self.register_buffer("bias", bias)
        self.A, self.g, self.B = map(nn.Parameter, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., I)` to `(..., O)`."""
        A, g, B = LowRank(self.A, self.g, self.B).unit()
        gained = A * g
        if len(B) >= BATCHED_FROM:
            products = F.linear(x[..., None, :] * B, self.Q)
            y = (products * gained.T).sum(-2)
        else:
            y = sum(gained[:, r] * F.linear(x * B[r], self.Q) for r in range(len(B)))
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def deployed(self, bits: int) -> Deployed:
        """Return the exported weight: gains in A, factors in float16, a table of `2**bits`."""
        A, g, B = LowRank(self.A, self.g, self.B).unit()
        S = (A * g).half().float() @ B.half().float()
        numbers = A.numel() + B.numel() + 2**bits
        return Deployed(self.Q.float() * S, self.Q.numel() * bits + FP16_BITS * numbers)


class Formed(RankByRank):
    """The same linear with its weight formed in every forward: the same numbers with one matmul."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., I)` to `(..., O)`."""
        with torch.autocast(x.device.type, enabled=False):
            weight = self.Q * LowRank(self.A, self.g, self.B).formed()
        return F.linear(x, weight, self.bias)


class GatheredCandidates:
    """KL over the teacher's K tokens, from K gathered rows of the head per token."""

    def __init__(self, head: Tensor) -> None:
        self._head = head

    def __call__(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Map `(T, D)` hidden states to the sum over valid tokens; materialises `(T, K, D)`."""
        rows_TKD = self._head[targets.topk_ids]
        logits_TK = torch.einsum("td,tkd->tk", hidden, rows_TKD).float()
        log_q = torch.log_softmax(logits_TK / TEMPERATURE, 1)
        log_p = torch.log_softmax(targets.topk_logprobs / TEMPERATURE, 1)
        loss = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)
        return TEMPERATURE**2 * torch.where(targets.mask, loss, 0.0).sum()


def reference_step(
    student: LanguageModel, names: Collection[str], config: MeasureConfig
) -> PlainStep:
    """Return a step that trains the scales of the linears called `names`, rank by rank."""
    model = dense_copy(student, DTYPES[config.dtype])
    learning = []
    for name in names:
        rank = MLP_RANK if role_of(name) == "mlp" else ATTENTION_RANK
        linear = rank_by_rank(student.model.get_submodule(name), rank, DTYPES[config.dtype])
        replace_module(model, name, linear)
        learning += linear.parameters()
    loss = GatheredCandidates(model.get_output_embeddings().weight)
    return PlainStep(model, learning, loss, is_compiled=False, is_checkpointed=True)


@torch.no_grad()
def rank_by_rank(linear: QuantLinear, rank: int, dtype: torch.dtype) -> RankByRank:
    """Return the levels of a quantized linear with a random scale of about the same size.

    The scale's values are not the student's, which does not affect speed.
    """
    quantized = linear.quantized()
    Q = chosen_levels(quantized).to(dtype)
    (O, I), here = Q.shape, {"dtype": dtype, "device": Q.device}
    size = expand_scales(quantized.scales, I).abs().mean().item()
    R = min(rank, O, I)
    scale = LowRank(
        A=torch.rand(O, R, **here) + 0.5,
        g=torch.full((R,), size * (O * I) ** 0.5 / R, **here),
        B=torch.rand(R, I, **here) + 0.5,
    )
    return RankByRank(Q, scale, linear.bias)


def reference_training(job: BaselineJob) -> PreparedTraining:
    """Prepare training of the scales of all linears, or with `mlp_only` of those in MLPs.

    Levels and tables stay as initialized.
    """
    settings, learning = job.settings, []
    kind = RankByRank if settings.factored else Formed
    generator = torch.Generator().manual_seed(settings.seed)
    for name in job.names:
        linear = job.model.get_submodule(name)
        Q, scale = start_of(linear.weight.detach(), name, settings, generator)
        module = kind(Q, scale, None if linear.bias is None else linear.bias.detach())
        replace_module(job.model, name, module)
        if not settings.mlp_only or role_of(name) == "mlp":
            learning += module.parameters()
    head = job.model.get_output_embeddings().weight.detach().to(job.dtype)
    step = job.step(
        learning,
        GatheredCandidates(head),
        steps=settings.max_steps,
        is_compiled=not settings.factored,
        is_checkpointed=settings.factored,
    )
    modules = {name: job.model.get_submodule(name) for name in job.names}
    return PreparedTraining(
        step,
        lambda: {name: m.deployed(settings.bits_of(name)) for name, m in modules.items()},
        settings.max_steps,
    )


def start_of(
    weight: Tensor, name: str, settings: BaselineSettings, generator: torch.Generator
) -> tuple[Tensor, LowRank]:
    """Return the table entry of each weight of a linear `(O, I)`, and its initial scale."""
    bits, size = settings.bits_of(name), settings.group_size
    rank = min(MLP_RANK if bits == 2 else ATTENTION_RANK, *weight.shape)
    if settings.start == "q4":  # the 4-bit stage of rank 4, then the converter
        scale = more_ranks(svd_scale(weight, min(Q4_RANK, rank), size), rank, generator)
    else:
        scale = svd_scale(weight, rank, size)
    lut = even_lut(2**Q4_BITS)
    if bits < Q4_BITS:  # the converter reduces the table of the 4-bit stage
        lut = fewer_entries(lut, 2**bits)
    return nearest_entries(weight, scale, lut), scale
