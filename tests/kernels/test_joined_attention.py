"""Joined attention: the reference against transformers' own module, the kernel against it."""

import pytest
import torch
from covering import covering
from joined_attention_case import joined_case
from three_way import assert_no_worse_than_eager
from tiny import tiny_model
from torch.nn import functional as F

from qat.kernels.attention import document_mask
from qat.kernels.dispatch import computing_by
from qat.kernels.joined_attention import (
    joined_attention,
    joined_fits_tile,
    joined_tile_attention,
    joined_tile_operator,
)

SHAPES = [
    (2, 64, 4, 2, 32),
    (1, 17, 6, 2, 64),
    (2, 100, 2, 2, 32),
    (3, 1, 2, 1, 128),
    (1, 3, 12, 6, 32),
    (2, 130, 4, 1, 32),  # block by block
    (1, 200, 6, 2, 64),
]


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_reference_is_what_transformers_computes(architecture) -> None:
    model = tiny_model(architecture, num_attention_heads=4, num_key_value_heads=2)
    module = model.model.layers[0].self_attn
    has_norms = hasattr(module, "q_norm")
    norms = [module.q_norm.weight, module.k_norm.weight] if has_norms else [None, None]
    for norm in norms:
        if norm is not None:
            norm.data.uniform_(0.5, 2)
    positions = (torch.arange(9) % 5).expand(2, 9)
    x = torch.randn(2, 9, model.config.hidden_size)
    angles = model.model.rotary_emb(x, positions)
    expected, _ = module(x, position_embeddings=angles, attention_mask=document_mask(positions))
    parts = [linear(x) for linear in (module.q_proj, module.k_proj, module.v_proj)]
    eps = model.config.rms_norm_eps
    found = joined_attention(torch.cat(parts, -1), *angles, *norms, positions, 32**-0.5, eps, 4)
    torch.testing.assert_close(F.linear(found.flatten(2), module.o_proj.weight), expected)


@pytest.mark.parametrize(("shape", "has_norms"), covering(SHAPES, [True, False]))
def test_kernel_errs_no_more_than_eager(shape, has_norms) -> None:
    pytest.importorskip("triton")
    # the interpreter knows no bfloat16 products: see tests/gpu
    case = joined_case(*shape, has_norms=has_norms)
    kernel = case.value_and_gradients(joined_tile_attention)
    eager = case.value_and_gradients(joined_attention)
    exact = case.in_(torch.float64).value_and_gradients(joined_attention)
    assert len(kernel) == (4 if has_norms else 2)
    for one, plain, truth in zip(kernel, eager, exact, strict=True):
        assert one.dtype == plain.dtype
        assert_no_worse_than_eager(one, plain, truth, slack=2e-3 * truth.abs().max().item())


def test_norms_that_do_not_learn_cost_nothing() -> None:
    pytest.importorskip("triton")
    case = joined_case(2, 17, 4, 2, 32, has_norms=True)
    learned = case.value_and_gradients(joined_tile_attention)
    qkv = case.qkv.clone().requires_grad_()
    joined_tile_attention(qkv, *case[1:-1]).backward(case.grad)
    assert torch.equal(qkv.grad, learned[1])


@pytest.mark.slow
def test_operator_keeps_its_promises_to_the_compiler() -> None:
    pytest.importorskip("triton")
    for has_norms, length in ((True, 5), (False, 5), (True, 130)):
        qkv, *rest = joined_case(1, length, 2, 1, 32, has_norms=has_norms)[:-1]
        torch.library.opcheck(joined_tile_operator, (qkv.requires_grad_(), *rest))


def test_blocks_of_other_documents_count_for_nothing() -> None:
    pytest.importorskip("triton")
    case = joined_case(1, 300, 2, 1, 32, has_norms=False)
    starts = torch.tensor([0, 70, 256])  # inside a block, and at its beginning
    places = torch.arange(300)
    first = starts[torch.bucketize(places, starts, right=True) - 1]
    case = case._replace(positions=(places - first)[None])
    found, d_qkv = case.value_and_gradients(joined_tile_attention)
    for start, stop in ((0, 70), (70, 256), (256, 300)):
        part = slice(start, stop)
        named = ("qkv", "cos", "sin", "positions", "grad")
        alone = case._replace(**{name: getattr(case, name)[:, part] for name in named})
        by_itself = alone.value_and_gradients(joined_attention)
        for whole, one in zip((found, d_qkv), by_itself, strict=True):
            torch.testing.assert_close(whole[:, part], one, rtol=1e-2, atol=1e-2)


def test_only_half_precision_and_rows_that_kernels_take_fit_on_a_gpu() -> None:
    qkv = torch.zeros(1, 1025, 4 * 128, dtype=torch.float16)
    assert not joined_fits_tile(qkv[:, :4], 128)
    with computing_by(True):
        assert not joined_fits_tile(qkv[:, :4].float(), 128)
        lengths = [(S, D) for S in (128, 129, 1024, 1025) for D in (64, 128)
                   if joined_fits_tile(qkv[:, :S], D)]  # fmt: skip
    assert lengths == [(S, D) for S in (128, 129, 1024) for D in (64, 128)]
