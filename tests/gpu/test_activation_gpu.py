"""Rounded inputs on CUDA: compiled bits are eager bits, steps are recorded. Run with `-m gpu`."""

import copy
from pathlib import Path

import pytest
import torch
from gpu_case import no_synchronisation
from quantized import ROUNDINGS, SPECS, rounding, tiny_quantized, with_rounded_inputs
from test_step_gpu import batch as batch_of
from test_step_gpu import course
from train_case import config

from qat.extensions.decode.decoder import Decoder
from qat.generate.sampling import Sampling
from qat.models.language_model import LanguageModel
from qat.nn.latent import to_latent
from qat.quant.spec import ACTIVATION_KINDS
from qat.train.learnable import learnable, weights_in_scope
from qat.train.optim import Optimizer
from qat.train.step import EAGER_STEPS, TrainingStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled_yet")]


def needs_fp8(kind: str) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("compiled kernels have no E4M3 on this GPU")


def step_of(place: Path, kind: str, **values: object) -> TrainingStep:
    settings = config(place, device="cuda", **{"dtype": "bf16", "compile": "on", **values})
    torch.manual_seed(0)
    model = LanguageModel(with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2"]), kind))
    model.model.cuda()
    names = weights_in_scope(model.model, "e2e")
    to_latent(model.model, names)
    by_kind = learnable(model.model, names, settings.kinds)
    return TrainingStep(model, Optimizer(model.model, by_kind, settings), settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "scale_bits"), ROUNDINGS)
def test_compiled_bits_are_those_of_eager_and_of_a_cpu(
    kind: str, scale_bits: int, dtype: torch.dtype
) -> None:
    needs_fp8(kind)
    here = rounding(kind, 0.0123, scale_bits)
    quantizer, norm = copy.deepcopy(here).cuda(), torch.nn.RMSNorm(1000, device="cuda")
    torch.manual_seed(0)
    x = torch.randn(512, 1000, device="cuda") * torch.logspace(-3, 3, 512, device="cuda")[:, None]
    normed = norm(x).to(dtype).detach()
    with torch.no_grad():
        eager = quantizer(normed)
        assert torch.equal(torch.compile(quantizer, fullgraph=True)(normed), eager)
        assert torch.equal(here(normed.cpu()), eager.cpu())


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_a_step_is_recorded_and_never_waits(kind: str, tmp_path: Path, monkeypatch) -> None:
    needs_fp8(kind)
    recorded = step_of(tmp_path, kind)
    found = course(recorded, EAGER_STEPS + 2)
    with no_synchronisation():
        recorded([batch_of(1)], EAGER_STEPS + 2)
    assert recorded.compile_facts()["cuda_graph"]
    monkeypatch.setattr("qat.train.step.GRAPH_TOKENS", 0)
    plain = step_of(tmp_path, kind, compile="off")
    # a level that falls the other way is the 127th part of an input
    assert found == pytest.approx(course(plain, EAGER_STEPS + 2), rel=2e-2)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_generation_is_recorded(kind: str) -> None:
    made = with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2_s8"]), kind)
    ids = torch.randint(320, (1, 9))
    with torch.no_grad():
        first = made(ids).logits[0, -1].argmax().item()
    said = Decoder(LanguageModel(made.cuda())).generate(ids, Sampling(0.0), max_new_tokens=12)
    assert len(said[0]) == 12 and said[0][0] == first
