"""The reference's training step, from its formula: rank by rank, never forming the weight.

Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5: `y = sum_r g_r A_r * ((x * B_r) @ Q.T)`, with
unit columns in A and unit rows in B, normalised anew in every forward; MLP rank 32, attention rank
8. Below rank 16 one matmul after the other, from there on all ranks at once. Its loss gathers
the head's rows of all candidates. Always with gradient checkpointing, as it was published.

Shapes: O out_features, I in_features, R rank, T tokens, K teacher tokens kept, D width.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.backend import DTYPES
from qat.bench.baselines.plain import PlainStep, dense_copy
from qat.bench.config import MeasureConfig
from qat.losses.targets import Targets
from qat.models.language_model import LanguageModel
from qat.models.swap import replace_module
from qat.nn.quant_linear import QuantLinear
from qat.quant.weight import chosen_levels, expand_scales

MLP_RANK, ATTENTION_RANK, BATCHED_FROM = 32, 8, 16
TEMPERATURE = 2.0
TINY = 1e-6


class RankByRank(nn.Module):
    """A linear of fixed levels `Q` whose scale `A diag(g) B` trains."""

    def __init__(self, Q: Tensor, scale: float, rank: int) -> None:
        super().__init__()
        (O, I), here = Q.shape, {"dtype": Q.dtype, "device": Q.device}
        self.register_buffer("Q", Q)
        self.A = nn.Parameter(torch.rand(O, rank, **here) + 0.5)
        self.B = nn.Parameter(torch.rand(rank, I, **here) + 0.5)
        self.g = nn.Parameter(torch.full((rank,), scale * (O * I) ** 0.5 / rank, **here))

    def forward(self, x: Tensor) -> Tensor:
        """`(..., I)` to `(..., O)`."""
        A = self.A / self.A.norm(dim=0, keepdim=True).clamp_min(TINY)
        B = self.B / self.B.norm(dim=1, keepdim=True).clamp_min(TINY)
        gained = A * self.g
        if len(B) >= BATCHED_FROM:
            products = F.linear(x[..., None, :] * B, self.Q)
            return (products * gained.T).sum(-2)
        return sum(gained[:, r] * F.linear(x * B[r], self.Q) for r in range(len(B)))


class GatheredCandidates:
    """KL over the teacher's K tokens at temperature 2, from K gathered rows of the head a token."""

    def __init__(self, head: Tensor) -> None:
        self._head = head

    def __call__(self, hidden: Tensor, targets: Targets) -> Tensor:
        """`(T, D)` hidden states to the sum over valid tokens; `(T, K, D)` exists meanwhile."""
        rows_TKD = self._head[targets.topk_ids]
        logits_TK = torch.einsum("td,tkd->tk", hidden, rows_TKD).float()
        log_q = torch.log_softmax(logits_TK / TEMPERATURE, 1)
        log_p = torch.log_softmax(targets.topk_logprobs / TEMPERATURE, 1)
        loss = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)
        return TEMPERATURE**2 * torch.where(targets.mask, loss, 0.0).sum()


def reference_step(
    student: LanguageModel, names: Collection[str], config: MeasureConfig
) -> PlainStep:
    """The linears called `names`, rank by rank, their scales training."""
    model = dense_copy(student, DTYPES[config.dtype])
    learning = []
    for name in names:
        rank = MLP_RANK if ".mlp." in name else ATTENTION_RANK
        linear = rank_by_rank(student.model.get_submodule(name), rank, DTYPES[config.dtype])
        replace_module(model, name, linear)
        learning += linear.parameters()
    loss = GatheredCandidates(model.get_output_embeddings().weight)
    return PlainStep(model, learning, loss, is_compiled=False, is_checkpointed=True)


@torch.no_grad()
def rank_by_rank(linear: QuantLinear, rank: int, dtype: torch.dtype) -> RankByRank:
    """The levels of a quantized linear under a scale of about its own size.

    The scale's values are not the student's: they change no speed.
    """
    quantized = linear.quantized()
    Q = chosen_levels(quantized).to(dtype)
    scale = expand_scales(quantized.scales, Q.shape[1]).abs().mean().item()
    return RankByRank(Q, scale, min(rank, *Q.shape))
