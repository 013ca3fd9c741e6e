"""Adapters on CUDA: the CPU's bits, right gradients, and that they learn."""

import copy
from pathlib import Path

import pytest
import torch
from quantized import SPECS, frozen_linear, with_adapter
from test_step_gpu import LORA, batch, step_of
from torch.nn import functional as F

from qat.backend.device import select
from qat.nn.quant_linear import QuantLinear
from qat.quant.lora import LORA_NAMES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled_yet")]


def pair(O: int, I: int, rank: int) -> tuple[QuantLinear, QuantLinear]:
    """The same linear on the CPU and on the GPU."""
    linear = with_adapter(frozen_linear(O, I, SPECS["lut2"]), rank)
    return linear, copy.deepcopy(linear).cuda()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("O", "I", "rank"), [(3072, 1024, 16), (96, 160, 5), (1024, 3072, 64)])
def test_the_formed_weight_has_the_bits_of_the_cpu(
    O: int, I: int, rank: int, dtype: torch.dtype, precision: str
) -> None:
    linear, there = pair(O, I, rank)
    with select("cuda").matmul_precision(precision):
        assert torch.equal(there.quantized_weight(dtype).cpu(), linear.quantized_weight(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_on_the_gpu(dtype: torch.dtype) -> None:
    linear, there = pair(1024, 512, 16)
    dW = torch.randn(1024, 512).to(dtype)
    lora_out, lora_in = (factor.double() for factor in linear.lora())
    exact = {"lora_out": dW.double() @ lora_in.T, "lora_in": lora_out.T @ dW.double()}
    for name, gradient in there.pulled_back(dW.cuda(), LORA_NAMES).items():
        assert gradient.dtype == torch.float32
        found = gradient.cpu().double()
        assert F.cosine_similarity(found.flatten(), exact[name].flatten(), 0) > 1 - 1e-9


def test_adapters_learn_on_the_gpu(tmp_path: Path) -> None:
    step = step_of(tmp_path, warmup_steps=0, schedule="constant", **LORA)
    batches = [batch(1)]
    losses = []
    for number in range(30):
        result = step(batches, number)
        losses.append((result.sums["loss"] / result.valid_tokens).item())
    assert losses[-1] < losses[0]
