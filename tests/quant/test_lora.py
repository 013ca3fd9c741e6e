"""Low-rank adapters against plain matrix products."""

import pytest
import torch

from qat.quant.lora import (
    LORA_NAMES,
    Lora,
    add_product_,
    factor_size,
    pull_back_product,
    random_lora,
    round_lora,
)


def random_factors(O: int, I: int, R: int) -> Lora:
    return Lora(torch.randn(O, R) * 0.1, torch.randn(R, I) * 0.1)


@pytest.mark.parametrize(("O", "I", "R"), [(1, 1, 1), (7, 13, 3), (32, 8, 8), (65, 130, 16)])
def test_the_product_is_added_and_rounded_once(O: int, I: int, R: int) -> None:
    weight, lora = torch.randn(O, I), random_factors(O, I, R)
    out, into = (factor.half().double() for factor in lora)
    exact = weight.double() + (out[:, :, None] * into[None]).sum(1)
    assert add_product_(weight, lora) is weight
    assert torch.equal(weight, exact.float())


def test_the_order_of_summation_does_not_matter() -> None:
    lora = random_factors(64, 96, 32)
    order = torch.randperm(32)
    shuffled = Lora(lora.lora_out[:, order], lora.lora_in[order])
    weight = torch.randn(64, 96)
    assert torch.equal(add_product_(weight.clone(), lora), add_product_(weight.clone(), shuffled))


@pytest.mark.parametrize("wanted", [(), ("lora_out",), ("lora_in",), LORA_NAMES, ("scales",)])
def test_only_wanted_gradients_and_those_of_autograd(wanted: tuple[str, ...]) -> None:
    lora, dW = random_factors(9, 14, 4), torch.randn(9, 14)
    leaves = Lora(*(factor.double().requires_grad_() for factor in round_lora(lora)))
    (leaves.lora_out @ leaves.lora_in).backward(dW.double())
    found = pull_back_product(dW, lora, wanted)
    assert set(found) == set(wanted) & set(LORA_NAMES)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), getattr(leaves, name).grad)


def test_a_gradient_in_bfloat16_is_summed_in_float32() -> None:
    lora, dW = random_factors(9, 300, 4), torch.randn(9, 300).bfloat16()
    found = pull_back_product(dW, lora, LORA_NAMES)
    expected = pull_back_product(dW.float(), lora, LORA_NAMES)
    assert all(torch.equal(found[name], expected[name]) for name in LORA_NAMES)


@pytest.mark.parametrize("rank", [1, 4, 64])
def test_factors_of_the_natural_size_make_a_product_as_large_as_the_weight(rank: int) -> None:
    weight = torch.randn(300, 200) * 0.02
    size = factor_size(weight, rank)
    product = (torch.randn(300, rank) * size) @ (torch.randn(rank, 200) * size)
    assert product.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.2)


def test_a_new_adapter_is_zero_and_depends_on_the_generator_alone() -> None:
    weight = torch.randn(30, 400) * 0.02
    one, two = (random_lora(weight, 8, torch.Generator().manual_seed(5)) for _ in range(2))
    other = random_lora(weight, 8, torch.Generator().manual_seed(6))
    assert torch.equal(one.lora_in, two.lora_in) and not torch.equal(one.lora_in, other.lora_in)
    assert torch.equal(add_product_(weight.clone(), one), weight)
    assert one.lora_in.std().item() == pytest.approx(factor_size(weight, 8), rel=0.05)
