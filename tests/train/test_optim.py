"""What learns, how fast, and what does not even get a gradient."""

import pytest
import torch
from quantized import SPECS, frozen_linear, tiny_quantized
from torch import Tensor
from train_case import config
from transformers import PreTrainedModel

from qat.errors import ConfigError
from qat.models.swap import linear_names, replace_module, to_latent
from qat.train.config import TrainConfig
from qat.train.optim import Optimizer, learnable, linears_in_scope

ALL = ("weights", "scales", "codebook", "norms")


@pytest.fixture(autouse=True)
def _one_thread(_seeded: None) -> None:
    torch.set_num_threads(1)  # on small weights a second thread costs more than it gives


def settings(tmp_path, **values: object) -> TrainConfig:
    rates = {"lr": 4e-2, "lr_scales": 3e-2, "lr_codebook": 2e-2, "lr_norms": 1e-2}
    flat = {"warmup_steps": 0, "schedule": "constant"}
    return config(tmp_path, **{**rates, **flat, **values})


def student(spec: str = "lut2", latent: bool = True) -> PreTrainedModel:
    model = tiny_quantized("qwen3", SPECS[spec])
    if latent:
        to_latent(model, linear_names(model))
    return model


def optimizer_of(model: PreTrainedModel, config: TrainConfig, kinds: tuple = ALL) -> Optimizer:
    names = linears_in_scope(model, config.scope)
    return Optimizer(model, learnable(model, names, kinds), config)


def rms(tensor: Tensor) -> float:
    return tensor.detach().pow(2).mean().sqrt().item()


def step_with(optimizer: Optimizer, gradient: float, step: int = 0) -> Tensor:
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.full_like(parameter, gradient)
    return optimizer.step(step)


@pytest.mark.parametrize(
    ("spec", "per_linear"),
    [("lut2", {"scales"}), ("lut2_r4", {"scale_out", "rank_gain", "scale_in"})],
)
def test_kinds_are_found_by_name(spec: str, per_linear: set[str]) -> None:
    model = student(spec)
    names = linears_in_scope(model, "e2e")
    found = learnable(model, names, ALL)
    assert set(found) == set(ALL) and len(names) == 14
    assert found["weights"] == [f"{name}.weight" for name in names]
    assert found["codebook"] == [f"{name}.codebook" for name in names]
    assert set(found["scales"]) == {f"{name}.{part}" for name in names for part in per_linear}
    # input, post-attention, query and key norms of two layers, and the last one
    assert len(found["norms"]) == 9 and all("norm" in name for name in found["norms"])
    assert set(learnable(model, names, ("norms",))) == {"norms"}


@pytest.mark.parametrize(
    ("scope", "part", "count"), [("mlp", ".mlp.", 6), ("attention", ".self_attn.", 8)]
)
def test_scopes(scope: str, part: str, count: int) -> None:
    names = linears_in_scope(student(), scope)
    assert len(names) == count and all(part in name for name in names)


def test_an_empty_scope() -> None:
    model = student(latent=False)
    for name in linears_in_scope(model, "attention"):
        linear = model.get_submodule(name)
        replace_module(model, name, torch.nn.Linear(linear.in_features, linear.out_features))
    message = "no quantized linears in scope attention; quantize it first with 'qat convert' or"
    with pytest.raises(ConfigError, match=message):
        linears_in_scope(model, "attention")


@pytest.mark.parametrize("spec", ["seq2", "int3", "ternary"])
def test_fixed_grids_have_no_codebook_to_learn(spec: str) -> None:
    model = student(spec)
    names = linears_in_scope(model, "e2e")
    message = "learn=codebook, but the linears in scope hold no codebook that can learn; drop it"
    with pytest.raises(ConfigError, match=message):
        learnable(model, names, ALL)
    assert learnable(model, names, ("scales", "weights"))["weights"]


def test_frozen_indices_have_no_weights_to_learn() -> None:
    model = student(latent=False)
    with pytest.raises(ConfigError, match="learn=weights, but the linears in scope hold no"):
        learnable(model, linears_in_scope(model, "e2e"), ("weights",))


def test_a_mixed_student_learns_the_codebooks_it_has() -> None:
    model = student(latent=False)
    name = linear_names(model)[0]
    linear = model.get_submodule(name)
    seq = frozen_linear(linear.out_features, linear.in_features, SPECS["seq2"])
    replace_module(model, name, seq)
    names = linears_in_scope(model, "e2e")
    assert len(learnable(model, names, ("codebook",))["codebook"]) == 13


def test_everything_else_is_frozen(tmp_path) -> None:
    model = student()
    optimizer = optimizer_of(model, settings(tmp_path, mlp_only=True), ("weights", "scales"))
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == set(optimizer.parameters) and len(learning) == 12
    assert all(".mlp." in name and not name.endswith("codebook") for name in learning)


def test_first_step_moves_each_kind_by_its_rate_times_its_size(tmp_path) -> None:
    model = student()
    optimizer = optimizer_of(model, settings(tmp_path))
    before = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
    norm = step_with(optimizer, -1.0)
    total = sum(p.numel() for p in optimizer.parameters.values())
    assert norm.item() == pytest.approx(total**0.5, rel=1e-4)
    rates = {"weight": 4e-2, "scales": 3e-2, "codebook": 2e-2}
    for name, old in before.items():
        kind = name.rpartition(".")[2]
        rate = 1e-2 if "norm" in name else rates[kind]
        moved = optimizer.parameters[name].detach() - old
        expected = torch.full_like(old, rate * rms(old))
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)
    assert all(p.grad is None for p in optimizer.parameters.values())


def test_only_latent_weights_decay(tmp_path) -> None:
    model = student()
    optimizer = optimizer_of(model, settings(tmp_path, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
    step_with(optimizer, 0.0)
    for name, old in before.items():
        is_latent = name.endswith("_proj.weight")
        expected = old * (1 - 4e-2 * 0.5) if is_latent else old
        torch.testing.assert_close(optimizer.parameters[name].detach(), expected)


def test_rates_follow_the_schedule_and_start_sizes(tmp_path) -> None:
    chosen = settings(tmp_path, schedule="cosine", max_steps=10, min_lr_ratio=0.0)
    model = student()
    optimizer = optimizer_of(model, chosen, ("weights",))
    name = next(iter(optimizer.parameters))
    size = optimizer.sizes[name]
    assert size == pytest.approx(rms(optimizer.parameters[name]))
    optimizer.parameters[name].data.mul_(100)  # grows: the rate keeps the size it began with
    before = optimizer.parameters[name].detach().clone()
    step_with(optimizer, 1.0, step=5)
    moved = before - optimizer.parameters[name].detach()
    expected = 4e-2 * size * optimizer.lr_share(5)
    assert 0 < optimizer.lr_share(5) < 0.5
    assert moved.mean().item() == pytest.approx(expected, rel=1e-2)


def test_clipping_scales_what_moments_see(tmp_path) -> None:
    optimizer = optimizer_of(student(), settings(tmp_path, clip_grad_norm=0.5), ("scales",))
    norm = step_with(optimizer, 1.0)
    moments = [t for name, t in optimizer.state().items() if name.startswith("exp_avg.")]
    clipped = torch.cat([t.flatten() for t in moments]).norm() / (1 - 0.9)
    assert norm > 0.5 and clipped.item() == pytest.approx(0.5, rel=1e-3)


def test_state_goes_on_bit_for_bit(tmp_path) -> None:
    chosen = settings(tmp_path, schedule="cosine", max_steps=20)
    torch.manual_seed(1)
    one = optimizer_of(student(), chosen)
    for step in range(3):
        step_with(one, 0.1 * (step + 1), step)
    state = {name: tensor.clone() for name, tensor in one.state().items()}
    model = student()
    by_kind = learnable(model, linears_in_scope(model, "e2e"), ALL)
    two = Optimizer(model, by_kind, chosen, state)
    assert one.sizes == two.sizes
    for step in (3, 4):
        step_with(one, -0.2, step)
        step_with(two, -0.2, step)
    assert all(torch.equal(one.parameters[n], two.parameters[n]) for n in one.parameters)
