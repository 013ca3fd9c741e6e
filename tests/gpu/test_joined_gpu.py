"""The operators on joined projections on a GPU, at Qwen3-0.6B's shape. Run with `-m gpu`."""

from collections import defaultdict

import pytest
import torch
from joined_attention_case import joined_case
from quantized import SPECS, tiny_quantized
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qat.kernels.glu import silu_mul
from qat.kernels.joined_attention import joined_attention, joined_fits_tile, joined_tile_attention
from qat.models.document_attention import attend
from qat.models.language_model import LanguageModel
from qat.models.regions import Regions
from qat.nn.step import form_weights

pytestmark = pytest.mark.gpu

SHAPES = [(512, 64, 16, 8, 128), (7, 61, 16, 8, 128), (5, 128, 32, 8, 64), (3, 100, 4, 4, 32)]
BLOCKS = [(9, 512, 14, 2, 64), (3, 1000, 4, 4, 32), (2, 129, 6, 6, 64)]
"""Shapes of rows that are attended to block by block."""


def value_and_gradient(unit, joined: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = joined.clone().requires_grad_()
    out = unit(leaf)
    out.backward(grad)
    return out.detach(), leaf.grad


def plain_silu_mul(joined: Tensor) -> Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("tokens", [(512, 64), (1, 13)])
@pytest.mark.parametrize("width", [3072, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_silu_mul_errs_no_more_than_eager(tokens, width, dtype) -> None:
    joined = (4 * torch.randn(*tokens, 2 * width, device="cuda")).to(dtype)
    grad = torch.randn(*tokens, width, device="cuda").to(dtype)
    kernel = value_and_gradient(silu_mul, joined, grad)
    eager = value_and_gradient(plain_silu_mul, joined, grad)
    exact = value_and_gradient(plain_silu_mul, joined.double(), grad.double())
    for one, plain, truth in zip(kernel, eager, exact, strict=True):
        assert one.is_contiguous()
        slack = torch.finfo(dtype).eps * truth.abs().max().item()
        assert_no_worse_than_eager(one, plain, truth, slack=slack)


@pytest.mark.parametrize("length", [64, 192, 1088])
def test_gradients_under_a_mask_stay_finite_where_scores_are_low(length: int) -> None:
    """PyTorch 2.11 on an H100: cuDNN gives NaN (pytorch/pytorch#196678)."""
    q, k, v = (0.1 * torch.randn(1, 2, length, 64, device="cuda") for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120 * 64**0.5
    leaves = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").tril()
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 1, True
    out, _ = attend(module, *leaves, mask, scaling=64**-0.5)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*exact, mask).transpose(1, 2).backward(grad.double())
    for one, truth in zip(leaves, exact, strict=True):
        assert one.grad.isfinite().all()
        # in channel 0, whose keys are -960, the query's gradient is what rounding leaves of a zero
        error = (one.grad - truth.grad)[..., 1:].norm()
        assert error <= 0.03 * truth.grad[..., 1:].norm()


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("shape", SHAPES + BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_joined_attention_errs_no_more_than_eager(shape, has_norms, dtype) -> None:
    case = joined_case(*shape, has_norms=has_norms, dtype=dtype).in_(dtype, "cuda")
    assert joined_fits_tile(case.qkv, shape[-1])
    kernel = case.value_and_gradients(joined_tile_attention)
    eager = case.value_and_gradients(joined_attention)
    exact = case.in_(torch.float64, "cuda").value_and_gradients(joined_attention)
    assert kernel[1].is_contiguous()
    for one, plain, truth in zip(kernel, eager, exact, strict=True):
        slack = torch.finfo(dtype).eps * truth.abs().max().item()
        assert_no_worse_than_eager(one, plain, truth, slack=slack)


@pytest.mark.parametrize("shape", [SHAPES[0], BLOCKS[0]])
def test_the_same_input_gives_the_same_gradient(shape) -> None:
    # backward turns gradients in place: a race would show
    case = joined_case(*shape, has_norms=True, dtype=torch.bfloat16).in_(torch.bfloat16, "cuda")
    first = case.value_and_gradients(joined_tile_attention)
    for _ in range(5):
        again = case.value_and_gradients(joined_tile_attention)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_compiled_layers_use_both(architecture) -> None:
    model = LanguageModel(tiny_quantized(architecture, SPECS["lut2"]).cuda().bfloat16())
    ids = torch.randint(300, (4, 32), device="cuda")
    positions = (torch.arange(32, device="cuda") % 20).expand(4, 32)
    weights = torch.randn(4, 32, 32, device="cuda")

    def gradients(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        model.model.to(dtype).zero_grad()
        form_weights(model.model, dtype)
        hidden = model.hidden(ids, positions)
        (hidden * weights).sum().backward()
        found = defaultdict(list)
        for name, parameter in model.model.named_parameters():
            if parameter.grad is not None:
                found[name.rpartition(".")[2]].append(parameter.grad.double().flatten())
        return hidden.detach(), {kind: torch.cat(parts) for kind, parts in found.items()}

    _, exact = gradients(torch.float32)
    expected, eager = gradients(torch.bfloat16)
    way = Regions(model.model, is_compiled=True, recompute_every=None)
    way.install()
    with torch.profiler.profile() as seen:
        actual, compiled = gradients(torch.bfloat16)
    way.remove()
    names = {event.key for event in seen.key_averages()}
    assert {"qat::silu_mul", "qat::joined_tile_attention"} <= names
    assert (actual - expected).norm() <= 0.05 * expected.norm()
    for kind, value in exact.items():
        assert (compiled[kind] - value).norm() <= 1.5 * (eager[kind] - value).norm(), kind
