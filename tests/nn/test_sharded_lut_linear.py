"""A linear whose latent weight lies in rows on several ranks equals the one that holds it whole."""

from pathlib import Path

import pytest
import torch
from quantized import SPECS, random_weight
from ranks_case import run_ranks
from torch import Tensor

from qat.nn.quant_linear import LutLinear
from qat.nn.sharded import ShardedLutLinear
from qat.quant.lora import random_lora
from qat.quant.weight import dequantize
from qat.ranks import Ranks, Rehearsal

O, I, B = 7, 32, 5


@pytest.mark.parametrize("spec", ["lut2", "lut4_r1", "ternary_r2", "lut2_s8", "trellis2_s8"])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_weight_codes_and_gradients_are_those_of_the_whole(
    tmp_path: Path, spec: str, has_adapter: bool
) -> None:
    whole, parts = _made_of(spec)
    x, dy = torch.randn(2, 3, B, I), torch.randn(2, 3, B, O)  # two micro-batches of three ranks
    lora = random_lora(dequantize(parts[1]), 2, torch.Generator().manual_seed(1))
    lora = lora._replace(lora_out=torch.randn(O, 2)) if has_adapter else None
    whole.set_lora(lora)
    for name, parameter in whole.weight_parameters().items():
        parameter.requires_grad_("lora" not in name)
    _run(whole, x.flatten(1, 2), dy.flatten(1, 2))

    def act(ranks: Ranks) -> list[bool]:
        linear = ShardedLutLinear(*parts, ranks=ranks)
        linear.set_lora(lora)
        for name, parameter in linear.weight_parameters().items():
            parameter.requires_grad_("lora" not in name)
        found = [
            linear.weight.shape[0] == (2, 2, 3)[ranks.rank],
            linear.latent_size() == whole.latent_size(),
            torch.equal(linear.indices(), whole.indices()),
            torch.equal(linear.quantized_weight(), whole.quantized_weight()),
        ]
        _run(linear, x[:, ranks.rank], dy[:, ranks.rank])
        weight = linear.whole(linear.weight.grad)
        rest = {n: p for n, p in linear.weight_parameters().items() if n != "weight"}
        learning = [p.grad for p in rest.values() if p.grad is not None]
        ranks.sum_(learning)
        found.append(torch.allclose(weight, whole.weight.grad, rtol=1e-4, atol=1e-5))
        for name, parameter in rest.items():
            theirs = whole.get_parameter(name).grad
            if theirs is not None:
                found.append(torch.allclose(parameter.grad, theirs, rtol=1e-3, atol=1e-4))
        return found

    for found in run_ranks(3, act, tmp_path):
        assert len(found) > 6 and all(found)


def test_used_alone_it_pulls_back_inside_autograd(tmp_path: Path) -> None:
    whole, parts = _made_of("lut2")
    x, dy = torch.randn(2, B, I), torch.randn(2, B, O)
    whole(x.flatten(0, 1)).backward(dy.flatten(0, 1))

    def act(ranks: Ranks) -> bool:
        linear = ShardedLutLinear(*parts, ranks=ranks)
        linear(x[ranks.rank]).backward(dy[ranks.rank])
        return torch.allclose(linear.weight.grad, whole.weight.grad[linear.rows], atol=1e-5)

    assert run_ranks(2, act, tmp_path) == [True, True]


def test_a_rehearsal_takes_a_share_and_gives_whole_weights() -> None:
    _, parts = _made_of("lut2")
    linear = ShardedLutLinear(*parts, ranks=Rehearsal(0, 3, torch.device("cpu")))
    _run(linear, torch.randn(2, B, I), torch.randn(2, B, O))
    assert linear.weight.shape == linear.weight.grad.shape == (2, I)
    assert linear.quantized_weight().shape == (O, I) and linear.scales.grad.shape[0] == O


def _made_of(name: str) -> tuple[LutLinear, tuple]:
    torch.manual_seed(0)
    quantized = random_weight(O, I, SPECS[name])
    latent = dequantize(quantized) + 0.01 * torch.randn(O, I)
    parts = latent, quantized, torch.randn(O), SPECS[name]
    return LutLinear(*parts), parts


def _run(linear: LutLinear, x: Tensor, dy: Tensor) -> None:
    """The three acts of a step over all micro-batches."""
    linear.form_(torch.float32)
    for one, gradient in zip(x, dy, strict=True):
        linear(one).backward(gradient)
