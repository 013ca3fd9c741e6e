"""The optimizer on CUDA: no host synchronisation, and moves as on the CPU. Run with `-m gpu`."""

from pathlib import Path

import pytest
import torch
from adamw_case import RATES, assert_rounded, copy, kept, moved, moving, neighbours, shared
from gpu_case import no_synchronisation
from quantized import SPECS, tiny_quantized
from torch import Tensor
from train_case import config

from qat.backend.base import DTYPES
from qat.kernels.adamw import Moving, Noise, stochastic_adamw_
from qat.nn.latent import to_latent
from qat.nn.swap import linear_names
from qat.train.finite import nan_if_not_finite, not_finite
from qat.train.learnable import learnable, weights_in_scope
from qat.train.optim import Optimizer

pytestmark = pytest.mark.gpu

KEPT = [
    {},
    {"latent_dtype": "bf16"},
    {"latent_dtype": "bf16", "offload": "moments"},
    {"latent_dtype": "bf16", "offload": "latents"},
    {"dtype": "fp16"},
    {"dtype": "fp16", "latent_dtype": "bf16"},
    {"optimizer": "adamw8bit"},
    {"optimizer": "adamw8bit", "latent_dtype": "bf16"},
]


HALF = [
    {"dtype": "fp16"},
    {"dtype": "fp16", "latent_dtype": "bf16"},
    {"dtype": "fp16", "latent_dtype": "bf16", "offload": "latents"},
    {"dtype": "fp16", "optimizer": "adamw8bit"},
]


def optimizer_on(device: str, place: Path, state: dict | None = None, **values: str) -> Optimizer:
    if values.get("optimizer") == "adamw8bit":
        pytest.importorskip("torchao")
    model = tiny_quantized("qwen3", SPECS["lut2"], intermediate_size=128).to(device)
    kinds = ("weights", "scales", "codebook", "norms")
    flat = {"warmup_steps": 0, "schedule": "constant", "lr": 4e-2, "weight_decay": 0.1}
    chosen = config(place, device=device, **{**flat, **values})
    dtype, is_hosted = DTYPES[chosen.latent_dtype], chosen.offload == "latents"
    to_latent(model, linear_names(model), dtype=dtype, is_hosted=is_hosted)
    return Optimizer(model, learnable(model, weights_in_scope(model, "e2e"), kinds), chosen, state)


def values_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies on the CPU of all that learns, in float32."""
    prefix, state = "parameter.", optimizer.state()
    named = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    return {name: tensor.cpu().float().clone() for name, tensor in named.items()}


def set_gradients(optimizer: Optimizer, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in optimizer.parameters.values():
        p.grad = ((torch.randn(p.shape, generator=generator) + 1) * size).to(p)


@pytest.mark.parametrize("values", KEPT, ids=str)
def test_a_step_asks_nothing_of_the_host(tmp_path: Path, values: dict[str, str]) -> None:
    optimizer = optimizer_on("cuda", tmp_path, **values)
    for step in range(3):
        set_gradients(optimizer, step)
        if step == 0:  # compiles
            optimizer.step(step)
            continue
        with no_synchronisation():
            optimizer.scale_loss(torch.ones((), device="cuda"))
            optimizer.step(step)


@pytest.mark.parametrize("values", KEPT, ids=str)
def test_moves_are_those_of_the_cpu(tmp_path: Path, values: dict[str, str]) -> None:
    here, there = (optimizer_on(d, tmp_path, **values) for d in ("cpu", "cuda"))
    starts = values_of(here)
    for step in range(4):
        norms = []
        for optimizer in (here, there):
            set_gradients(optimizer, step)
            norms.append(optimizer.step(step).cpu())
        torch.testing.assert_close(*norms, rtol=1e-4, atol=0.0)
    is_exact = values.get("optimizer") is None and values.get("latent_dtype") is None
    ours, theirs = values_of(there), values_of(here)
    for name, start in starts.items():
        a, b = theirs[name] - start, ours[name] - start
        is_latent = name.endswith("_proj.weight") and not is_exact
        assert (a - b).norm() < (0.1 if is_latent else 1e-3) * a.norm(), name


@pytest.mark.parametrize("values", HALF)
def test_an_overflow_moves_nothing(tmp_path: Path, values: dict[str, str]) -> None:
    optimizer = optimizer_on("cuda", tmp_path, **values)
    set_gradients(optimizer, 0, 2.0**16)
    optimizer.step(0)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    set_gradients(optimizer, 1, float("inf"))
    assert optimizer.step(1) == 0 and optimizer.loss_scale.scale == 2.0**15
    for name, tensor in optimizer.state().items():
        assert name.startswith("loss_scale") or torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("values", KEPT, ids=str)
def test_its_state_goes_on(tmp_path: Path, values: dict[str, str]) -> None:
    one = optimizer_on("cuda", tmp_path, **values)
    set_gradients(one, 0)
    one.step(0)
    state = {name: tensor.clone().cpu() for name, tensor in one.state().items()}
    two = optimizer_on("cuda", tmp_path, state, **values)
    for optimizer in (one, two):
        torch.manual_seed(3)
        set_gradients(optimizer, 1)
        optimizer.step(1)
    for name, tensor in one.state().items():
        torch.testing.assert_close(two.state()[name], tensor, rtol=0.0, atol=0.0, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5,), (37, 11), (3072, 1024)])
def test_the_kernel_is_adamw_rounded(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    before = moving(*shape, gradient_dtype=dtype)
    after = Moving(*(tensor.cuda() for tensor in before))
    stochastic_adamw_(after, shared().cuda(), RATES, Noise(0, 2, 0))
    for found, wanted in zip(kept(after), moved(before), strict=True):
        assert_rounded(found.cpu(), wanted)


def test_the_kernel_is_right_on_average() -> None:
    before = moving(8)
    many = Moving(*(tensor.repeat(2**16).cuda() for tensor in before))
    again = copy(many)
    stochastic_adamw_(many, shared().cuda(), RATES, Noise(5, 2, 1))
    stochastic_adamw_(again, shared().cuda(), RATES, Noise(5, 2, 1))
    for found, same, wanted in zip(kept(many), kept(again), moved(before), strict=True):
        assert torch.equal(found, same)
        low, high = neighbours(wanted)
        error = (found.cpu().double().view(-1, 8).mean(0) - wanted) / (high - low)
        assert error.abs().max() < 4 * 0.5 / 2**8


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_told_without_waiting(
    tmp_path: Path, kept: dict[str, str], bad: float
) -> None:
    optimizer = optimizer_on("cuda", tmp_path, **kept)
    set_gradients(optimizer, seed=0)
    optimizer.step(0)
    device = next(iter(optimizer.parameters.values())).device
    numbers = {**optimizer.parameters, **optimizer.moving()}
    assert nan_if_not_finite(numbers, device).item() == 0 and not_finite(numbers) is None
    floats = {name: t for name, t in numbers.items() if t.is_floating_point() and t.is_cuda}
    moments = [t for name, t in floats.items() if "exp_avg" in name]
    for tensor in (next(iter(optimizer.parameters.values())).detach(), moments[-1]):
        kept_values = tensor.clone()
        tensor.view(-1)[-1:] = bad
        with no_synchronisation():
            found = nan_if_not_finite(numbers, device)
        assert found.isnan().item() and "1 of" in not_finite(numbers)
        tensor.copy_(kept_values)


def test_what_lies_in_pinned_memory_moves_to_the_bits_of_what_lies_on_the_gpu(
    tmp_path: Path,
) -> None:
    states = []
    for offload in ("none", "moments", "latents"):
        torch.manual_seed(0)
        optimizer = optimizer_on("cuda", tmp_path, latent_dtype="bf16", offload=offload)
        for step in range(5):
            set_gradients(optimizer, step)
            optimizer.step(step)
        states.append({name: tensor.cpu().clone() for name, tensor in optimizer.state().items()})
    on_host = [t for n, t in optimizer.state().items() if n.endswith("_proj.weight") and t.dim()]
    assert len(on_host) == 3 * len(optimizer.hosted) and all(t.is_pinned() for t in on_host)
    for state in states[1:]:
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())
