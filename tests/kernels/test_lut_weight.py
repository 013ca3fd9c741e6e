"""Form and pull back, three ways: the kernel, eager autograd, and autograd in float64."""

import pytest
import torch
from quantized import SPECS, random_weight
from torch import Tensor

from qat.kernels.lut_weight import form, pull_back
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight, Scales, expand_scales

SHAPES = [(1, 1), (7, 3), (33, 5)]
"""`(O, groups per row)`."""


def assert_no_worse_than_eager(kernel: Tensor, eager: Tensor, exact: Tensor, slack: float) -> None:
    """The kernel may err by what eager PyTorch errs in the same dtype, plus `slack`, no more."""
    excess = ((kernel.double() - exact).abs() - (eager.double() - exact).abs()).max().item()
    assert excess <= slack, f"worse than eager by {excess:.3g}, allowed {slack:.3g}"


def textbook(weight: QuantizedWeight, parts: dict[str, Tensor]) -> Tensor:
    """`codebook[indices] * S`, written out, with gradients."""
    O, I = weight.indices.shape
    if "scales" in parts:
        group_size = I // parts["scales"].shape[1]
        S = parts["scales"][:, torch.arange(I) // group_size]
    else:
        S = torch.einsum("or,r,ri->oi", parts["scale_out"], parts["rank_gain"], parts["scale_in"])
    return parts["codebook"][weight.indices.long()] * S


def gradients(weight: QuantizedWeight, dW: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight and all gradients by autograd, in the dtype of `dW`."""
    tensors = {"codebook": weight.codebook, **weight.scales.present()}
    parts = {name: t.to(dW.dtype, copy=True).requires_grad_() for name, t in tensors.items()}
    W = textbook(weight, parts)
    W.backward(dW)
    return W.detach(), {name: part.grad for name, part in parts.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_no_worse_than_eager(spec: LutSpec, shape: tuple[int, int]) -> None:
    O, I = shape[0], shape[1] * spec.group_size
    weight = random_weight(O, I, spec)
    dW = torch.randn(O, I)
    eager_W, eager = gradients(weight, dW)
    exact_W, exact = gradients(weight, dW.double())
    assert_no_worse_than_eager(form(weight, torch.float32), eager_W, exact_W, 1e-6)
    pulled = pull_back(dW, weight, exact.keys())
    assert pulled.keys() == exact.keys()
    for name, gradient in pulled.items():
        assert gradient.dtype == torch.float32
        slack = 1e-6 * max(1.0, exact[name].abs().max().item())
        assert_no_worse_than_eager(gradient, eager[name], exact[name], slack)


@pytest.mark.parametrize("name", ["lut2", "lut2_r4"])
def test_only_wanted_gradients_are_given(name: str) -> None:
    weight = random_weight(4, 32, SPECS[name])
    dW = torch.randn(4, 32)
    everything = pull_back(dW, weight, {"codebook", *Scales._fields})
    for part in everything:
        alone = pull_back(dW, weight, {part})
        assert alone.keys() == {part}
        assert torch.equal(alone[part], everything[part])
    assert pull_back(dW, weight, ()) == {}


@pytest.mark.parametrize("name", SPECS)
def test_pull_back_is_linear(name: str) -> None:
    weight = random_weight(4, 32, SPECS[name])
    first, second = torch.randn(4, 32), torch.randn(4, 32)
    wanted = {"codebook", *weight.scales.present()}
    both = pull_back(first + second, weight, wanted)
    apart = [pull_back(dW, weight, wanted) for dW in (first, second)]
    for part in wanted:
        total = apart[0][part] + apart[1][part]
        torch.testing.assert_close(both[part], total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_form_rounds_once(dtype: torch.dtype) -> None:
    weight = random_weight(8, 32, SPECS["lut4"])
    assert torch.equal(form(weight, dtype), form(weight, torch.float32).to(dtype))


def test_pull_back_takes_a_bf16_gradient() -> None:
    weight = random_weight(8, 32, SPECS["lut4"])
    dW = torch.randn(8, 32).bfloat16()
    pulled = pull_back(dW, weight, {"codebook"})["codebook"]
    assert torch.equal(pulled, pull_back(dW.float(), weight, {"codebook"})["codebook"])


def test_an_unused_level_gets_zero() -> None:
    weight = random_weight(8, 32, SPECS["lut2"])
    unused = weight._replace(indices=weight.indices % 2)
    assert pull_back(torch.randn(8, 32), unused, {"codebook"})["codebook"][2:].tolist() == [0, 0]


def test_group_scales_expand_over_their_features() -> None:
    S = expand_scales(Scales(torch.tensor([[1.0, 2.0]])), 6)
    assert S.tolist() == [[1, 1, 1, 2, 2, 2]]
