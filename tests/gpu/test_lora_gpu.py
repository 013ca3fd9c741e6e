"""Adapters on CUDA: the CPU's bits, right gradients, and steps that are recorded like any other."""

import copy
from pathlib import Path

import pytest
import torch
from gpu_case import no_synchronisation
from quantized import SPECS, frozen_linear, with_adapter
from test_step_gpu import batch, course
from tiny import tiny_model
from torch.nn import functional as F
from train_case import config

from qat.backend.device import select
from qat.convert.quantize import quantize_model
from qat.models.language_model import LanguageModel
from qat.nn.latent import add_adapters
from qat.nn.quant_linear import QuantLinear
from qat.quant.lora import LORA_NAMES
from qat.quant.spec import PRESETS
from qat.train.learnable import learnable, linears_in_scope
from qat.train.optim import Optimizer
from qat.train.step import EAGER_STEPS, TrainingStep

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


def step_of(place: Path, **values: object) -> TrainingStep:
    common = {"device": "cuda", "dtype": "bf16", "compile": "on", "learn": "lora", "lora_rank": 4}
    settings = config(place, **{**common, "lr_lora": 3e-2, **values})
    model = LanguageModel(tiny_model(hidden_size=64, intermediate_size=128, initializer_range=0.1))
    quantize_model(model, PRESETS["q2a4"], workers=1)
    model.model.cuda()
    names = linears_in_scope(model.model, "e2e")
    add_adapters(model.model, names, settings.lora_rank, seed=0)
    by_kind = learnable(model.model, names, settings.kinds)
    return TrainingStep(model, Optimizer(model.model, by_kind, settings), settings)


@pytest.mark.parametrize("learn", ["lora", "lora,scales,codebook"])
def test_a_recorded_step_is_the_step(tmp_path: Path, monkeypatch, learn: str) -> None:
    recorded = step_of(tmp_path, learn=learn)
    found = course(recorded, 6)
    assert recorded.compile_facts()["cuda_graph"]
    monkeypatch.setattr("qat.train.step.GRAPH_TOKENS", 0)
    eager = step_of(tmp_path, learn=learn)
    expected = course(eager, 6)
    assert not eager.compile_facts()["cuda_graph"]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("values", [{}, {"gradient_checkpointing": True}, {"dtype": "fp16"}])
def test_a_step_never_waits_for_the_device(tmp_path: Path, values: dict) -> None:
    step, batches = step_of(tmp_path, **values), [batch(1)]
    for number in range(EAGER_STEPS + 1):
        step(batches, number)
    with no_synchronisation():
        step(batches, EAGER_STEPS + 1)


def test_adapters_learn_on_the_gpu(tmp_path: Path) -> None:
    step = step_of(tmp_path, warmup_steps=0, schedule="constant")
    batches = [batch(1)]
    losses = []
    for number in range(30):
        result = step(batches, number)
        losses.append((result.sums["loss"] / result.valid_tokens).item())
    assert losses[-1] < losses[0]
