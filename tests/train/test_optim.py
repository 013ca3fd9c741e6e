"""The learning parameters, their rates, and the parameters that get no gradient."""

import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from families import build
from quantized import SPECS, frozen_linear, latent_linear, tiny_quantized
from tiny import tiny_model
from torch import Tensor
from train_case import config
from transformers import PreTrainedModel

from qat.backend.base import DTYPES
from qat.errors import ConfigError
from qat.kernels.dispatch import computing_by
from qat.nn.latent import to_latent
from qat.nn.sites import open_sites
from qat.nn.swap import linear_names, put_table, replace_module, table_names, table_spec
from qat.quant.fit import fit_weight
from qat.ranks import Ranks
from qat.train.adamw import KernelAdamW, TorchAdamW
from qat.train.config import TrainConfig
from qat.train.learnable import latent_share, learnable, natural_sizes, weights_in_scope
from qat.train.optim import Optimizer

ALL = ("weights", "scales", "codebook", "norms")


def settings(tmp_path, **values: object) -> TrainConfig:
    rates = {"lr": 4e-2, "lr_scales": 3e-2, "lr_codebook": 2e-2, "lr_norms": 1e-2}
    flat = {"warmup_steps": 0, "schedule": "constant"}
    return config(tmp_path, **{**rates, **flat, **values})


def student(
    spec: str = "lut2", latent: bool = True, kept: TrainConfig | None = None, **shape: int
) -> PreTrainedModel:
    model = tiny_quantized("qwen3", SPECS[spec], **shape)
    if latent:
        dtype = DTYPES["fp32" if kept is None else kept.latent_dtype]
        is_hosted = kept is not None and kept.offload == "latents"
        to_latent(model, linear_names(model), dtype=dtype, is_hosted=is_hosted)
    return model


def wide_student(kept: TrainConfig | None = None) -> PreTrainedModel:
    """A student with matrices of 4,096 weights, which eight-bit moments need, and smaller ones."""
    return student(kept=kept, intermediate_size=128)


def optimizer_of(model: PreTrainedModel, config: TrainConfig, kinds: tuple = ALL) -> Optimizer:
    names = weights_in_scope(model, config.scope)
    return Optimizer(model, learnable(model, names, kinds), config)


@pytest.mark.parametrize(
    ("architecture", "mover"),
    [("Qwen3ForCausalLM", KernelAdamW), ("Qwen3MoeForCausalLM", TorchAdamW)],
)
def test_experts_are_counted_one_by_one(tmp_path, architecture: str, mover: type) -> None:
    pytest.importorskip("triton")
    model = build(architecture)
    names = [name for name, _ in model.named_parameters() if "norm" not in name]
    with computing_by(True):
        chosen = Optimizer(model, {"scales": names}, settings(tmp_path))
    assert [type(each) for each in chosen._movers] == [mover]


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
    names = weights_in_scope(model, "e2e")
    found = learnable(model, names, ALL)
    assert set(found) == set(ALL) and len(names) == 14
    assert found["weights"] == [f"{name}.weight" for name in names]
    assert found["codebook"] == [f"{name}.codebook" for name in names]
    assert set(found["scales"]) == {f"{name}.{part}" for name in names for part in per_linear}
    # input, post-attention, query and key norms of two layers, and the last one
    assert len(found["norms"]) == 9 and all("norm" in name for name in found["norms"])
    assert set(learnable(model, names, ("norms",))) == {"norms"}


@pytest.mark.parametrize(
    ("spec", "latent", "kind"),
    [
        *((spec, True, "codebook") for spec in ("seq2", "int3", "ternary")),
        ("lut2", True, "gates"),
        ("lut2", False, "weights"),
        ("lut2", True, "lora"),
    ],
)
def test_a_kind_that_a_student_has_not_cannot_learn(spec: str, latent: bool, kind: str) -> None:
    model = student(spec, latent)
    names = weights_in_scope(model, "e2e")
    if kind == "codebook":  # of a fixed grid: beside others it is left out
        assert learnable(model, names, ("scales", "weights", "codebook")).keys() == {
            *("scales", "weights")
        }
    with pytest.raises(ConfigError, match=f"learn={kind}, "):
        learnable(model, names, (kind,))


def test_without_quantized_linears_only_what_is_none_of_theirs_learns(tmp_path) -> None:
    model = tiny_model()
    assert weights_in_scope(model, "e2e", ("norms", "gates")) == []
    with pytest.raises(ConfigError, match="no quantized linears in scope e2e"):
        weights_in_scope(model, "e2e", ("norms", "scales"))


def test_a_mixed_student_learns_the_codebooks_it_has() -> None:
    model = student(latent=False)
    name = linear_names(model)[0]
    linear = model.get_submodule(name)
    seq = frozen_linear(linear.out_features, linear.in_features, SPECS["seq2"])
    replace_module(model, name, seq)
    names = weights_in_scope(model, "e2e")
    assert len(learnable(model, names, ("codebook",))["codebook"]) == 13


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


def test_each_bit_above_two_halves_a_step_of_latents_and_keeps_their_decay(tmp_path) -> None:
    shares = {"lut1": 1.0, "ternary": 1.0, "lut3": 0.5, "pairs6": 0.5, "lut4_r1": 0.25}
    for spec, share in shares.items():
        for gradient, decay in ((-1.0, 0.0), (0.0, 0.5)):
            optimizer = optimizer_of(student(spec), settings(tmp_path, weight_decay=decay))
            latents = {n: p for n, p in optimizer.parameters.items() if n.endswith("_proj.weight")}
            before = {name: p.detach().clone() for name, p in latents.items()}
            step_with(optimizer, gradient)
            for name, old in before.items():
                step = torch.full_like(old, share * rms(old)) if gradient else -decay * old
                moved = latents[name].detach() - old
                torch.testing.assert_close(moved, 4e-2 * step, rtol=1e-3, atol=1e-6)


def test_latents_of_mixed_bits_share_the_rate_of_their_mean_cell() -> None:
    latents = [latent_linear(8, 48, SPECS["lut3"]), latent_linear(24, 48, SPECS["lut4"])]
    assert latent_share(latents) == pytest.approx(((0.5**2 + 3 * 0.25**2) / 4) ** 0.5)
    assert latent_share(latents[:1]) == 0.5


def test_only_latent_weights_decay(tmp_path) -> None:
    model = student()
    optimizer = optimizer_of(model, settings(tmp_path, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
    step_with(optimizer, 0.0)
    for name, old in before.items():
        is_latent = name.endswith("_proj.weight")
        expected = old * (1 - 4e-2 * 0.5) if is_latent else old
        torch.testing.assert_close(optimizer.parameters[name].detach(), expected)


def test_a_run_says_which_share_of_its_rate_it_takes(tmp_path, caplog) -> None:
    model, chosen = student("lut4"), settings(tmp_path)
    with caplog.at_level("INFO", logger="qat"):
        state = optimizer_of(model, chosen, ("weights",)).state()
        assert ["0.25" in record.getMessage() for record in caplog.records] == [True]
        optimizer_of(model, chosen, ("scales",))  # which have no such share
        still = chosen.model_copy(update={"lr": 0.0})  # as in 'qat bench'
        optimizer_of(model, still, ("weights",))
        names = learnable(model, weights_in_scope(model, chosen.scope), ("weights",))
        state |= {name: 4 * size for name, size in state.items() if name.startswith("size.")}
        resumed = Optimizer(model, names, chosen, state)  # of a run that began at the whole rate
    assert len(caplog.records) == 1
    assert resumed.sizes == {name: state[f"size.{name}"].item() for name in resumed.parameters}


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


def test_the_norm_is_of_all_gradients_that_are_there(tmp_path) -> None:
    optimizer = optimizer_of(student(), settings(tmp_path))
    squares = 0.0
    for place, parameter in enumerate(optimizer.parameters.values()):
        if place % 3:
            parameter.grad = torch.full_like(parameter, 0.1 * place)
            squares += parameter.grad.double().square().sum().item()
    assert optimizer.step(0).item() == pytest.approx(squares**0.5, rel=1e-5)


@pytest.mark.parametrize("kinds", [("weights",), ("weights", "scales")])
def test_the_norm_of_rows_counts_every_rank(tmp_path, kinds: tuple[str, ...]) -> None:
    """The other rank's rows have the same gradients; what both hold counts once."""
    model = student(latent=False)
    ranks = Ranks(0, 2, torch.device("cpu"))
    moved = []
    ranks.sum_ = lambda tensors: moved.extend(t.mul_(2) for t in tensors if t.dim() == 0)
    to_latent(model, linear_names(model), ranks)
    names = weights_in_scope(model, "e2e")
    optimizer = Optimizer(model, learnable(model, names, kinds), settings(tmp_path), ranks=ranks)
    assert set(optimizer.sharded) == {name for name in optimizer.parameters if "weight" in name}
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    rows = sum(p.numel() for p in optimizer.parameters.values()) - sum(
        p.numel() for p in optimizer.replicated()
    )
    expected = (2 * rows + sum(p.numel() for p in optimizer.replicated())) ** 0.5
    assert optimizer.step(0).item() == pytest.approx(expected, rel=1e-5) and len(moved) == 1


@pytest.mark.parametrize(("steps", "is_old"), [(23, False), (24, True), (25, True)])
def test_moments_age_only_where_the_run_outlives_their_memory(
    tmp_path, steps: int, is_old: bool
) -> None:
    """A first step with beta2 = 0.5 weighs 2**-24 after 24 steps, which is nothing next to one."""
    optimizer = optimizer_of(student(), settings(tmp_path, beta2=0.5, max_steps=steps))
    step_with(optimizer, 0.1)
    assert optimizer.skip_bias_correction() is is_old
    counts = {t.item() for name, t in optimizer.state().items() if name.startswith("step.")}
    assert counts == {2.0**24 if is_old else 1.0}


def test_a_step_waits_once_for_copies_of_what_it_moves(tmp_path) -> None:
    optimizer, held = optimizer_of(student(), settings(tmp_path), ("scales",)), []
    optimizer.copying = SimpleNamespace(hold=lambda: held.append(optimizer.state()))
    for step in range(2):
        step_with(optimizer, 1.0, step)
    assert len(held) == 1


def twins(chosen: TrainConfig, *, go_on: int = 2) -> tuple[Optimizer, Optimizer]:
    """Return an optimizer that kept stepping, and one that resumed from its state after step 3."""
    torch.manual_seed(1)
    one = optimizer_of(wide_student(chosen), chosen)
    for step in range(3):
        step_with(one, 0.1 * (step + 1), step)
    state = {name: tensor.clone() for name, tensor in one.state().items()}
    model = wide_student(chosen)
    two = Optimizer(model, learnable(model, weights_in_scope(model, "e2e"), ALL), chosen, state)
    for optimizer in (one, two):
        torch.manual_seed(2)
        for step in range(3, 3 + go_on):
            step_with(optimizer, -0.2, step)
    return one, two


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"latent_dtype": "bf16"},
        {"latent_dtype": "bf16", "offload": "moments"},
        {"latent_dtype": "bf16", "offload": "latents"},
        {"dtype": "fp16"},
        {"dtype": "fp16", "latent_dtype": "bf16"},
        {"optimizer": "adamw8bit"},
        {"optimizer": "adamw8bit", "latent_dtype": "bf16"},
    ],
    ids=str,
)
def test_state_goes_on_bit_for_bit(tmp_path, kept: dict[str, str]) -> None:
    chosen = settings(tmp_path, schedule="cosine", max_steps=20, weight_decay=0.1, **kept)
    one, two = twins(chosen)
    assert one.sizes == two.sizes
    one_state, two_state = one.state(), two.state()
    assert one_state.keys() == two_state.keys()
    assert all(torch.equal(one_state[name], two_state[name]) for name in one_state)
    path = tmp_path / "state.safetensors"
    safetensors.torch.save_file(one_state, path)  # they are plain tensors, none in two names
    found = safetensors.torch.load_file(path)
    assert all(torch.equal(one_state[name], found[name]) for name in one_state)


@pytest.mark.parametrize("kept", [{"latent_dtype": "bf16"}, {"optimizer": "adamw8bit"}], ids=str)
def test_latents_kept_in_less_move_as_far(tmp_path, kept: dict[str, str]) -> None:
    """Ten steps of varied gradients end where plain AdamW's end, within what the format loses."""
    ends, starts = [], {}
    for values in ({}, kept):
        chosen = settings(tmp_path, weight_decay=0.1, **values)
        optimizer = optimizer_of(wide_student(chosen), chosen)
        starts = {n: p.detach().float().clone() for n, p in optimizer.parameters.items()}
        torch.manual_seed(3)
        for step in range(10):
            for parameter in optimizer.parameters.values():
                gradient = torch.randn(parameter.shape) + 1
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step(step)
        ends.append({n: p.detach().float().clone() for n, p in optimizer.parameters.items()})
    plain, other = ends
    for name, end in plain.items():
        if name.endswith("_proj.weight"):
            moved, moved_too = end - starts[name], other[name] - starts[name]
            assert (moved_too - moved).norm() < 0.1 * moved.norm()
            assert (moved_too.mean() / moved.mean() - 1).abs() < 0.02
        else:  # plain AdamW moves it, with gradients clipped by a norm rounded a little otherwise
            torch.testing.assert_close(other[name], end, rtol=1e-3, atol=1e-5)


def test_bfloat16_is_for_latents_and_their_moments(tmp_path) -> None:
    chosen = settings(tmp_path, latent_dtype="bf16")
    optimizer = optimizer_of(wide_student(chosen), chosen)
    step_with(optimizer, 1.0)
    for name, tensor in optimizer.state().items():
        if tensor.dim() == 0:
            continue
        is_latent = name.endswith("_proj.weight")
        assert tensor.dtype == (torch.bfloat16 if is_latent else torch.float32), name


def test_a_table_moves_no_further_with_eight_bits_for_others(tmp_path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    (name,) = table_names(model)
    spec = table_spec(2, 32)
    put_table(model, name, fit_weight(model.get_submodule(name).weight.detach(), spec), spec)
    to_latent(model, [name])
    chosen = settings(tmp_path, optimizer="adamw8bit")
    optimizer = Optimizer(model, learnable(model, [name], ("weights",)), chosen)
    ((_, latent),) = optimizer.parameters.items()
    start = latent.detach().clone()
    for step in range(4):  # words of one step each, with a few elements that are next to nothing
        latent.grad = torch.zeros_like(latent)
        rows = latent.grad[step::8]
        rows += torch.randn(rows.shape) * torch.logspace(0, -5, rows.shape[1])
        optimizer.step(step)
    most = 4 * chosen.lr * optimizer.sizes[f"{name}.weight"]
    assert 0 < (latent.detach() - start).abs().max() < 2 * most


def test_eight_bits_hold_the_moments_of_large_latents(tmp_path) -> None:
    optimizer = optimizer_of(wide_student(), settings(tmp_path, optimizer="adamw8bit"))
    step_with(optimizer, 1.0)
    state = optimizer.state()
    for name, parameter in optimizer.parameters.items():
        is_large = name.endswith("_proj.weight") and parameter.numel() >= 4096
        moment = state[f"exp_avg_codes.{name}" if is_large else f"exp_avg.{name}"]
        assert moment.shape == parameter.shape
        assert moment.dtype == (torch.uint8 if is_large else torch.float32)
        assert parameter.dtype == torch.float32
    assert any(name.startswith("exp_avg_sq_scale.") for name in state)


def test_without_torchao(tmp_path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoTorchao(), *sys.meta_path])
    message = r"adamw8bit needs torchao, which is not installed; use .* or: .*\[adam8bit\]"
    with pytest.raises(ConfigError, match=message):
        optimizer_of(wide_student(), settings(tmp_path, optimizer="adamw8bit"))


class _NoTorchao:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "torchao":
            raise ModuleNotFoundError(name=name)


@pytest.mark.parametrize(
    ("kept", "bad"),
    [
        ({}, float("inf")),
        ({"latent_dtype": "bf16"}, float("nan")),
        ({"optimizer": "adamw8bit"}, float("inf")),
    ],
    ids=str,
)
def test_a_float16_step_that_overflows_is_no_step(tmp_path, kept: dict[str, str], bad) -> None:
    """Overflows before and between the other steps do not change where those end."""
    ends = []
    for overflows in ((), (0, 2)):
        chosen = settings(tmp_path, dtype="fp16", **kept)
        optimizer = optimizer_of(wide_student(chosen), chosen)
        scale, good = optimizer.loss_scale, 0
        for step in range(4 + len(overflows)):
            before = {n: p.detach().clone() for n, p in optimizer.parameters.items()}
            start = scale.scale.item()
            if step in overflows:
                norm = step_with(optimizer, bad, step)
                assert norm == 0 and scale.scale == start / 2
                assert all(torch.equal(p, before[n]) for n, p in optimizer.parameters.items())
                assert all(p.grad is None for p in optimizer.parameters.values())
            else:
                torch.manual_seed(good)  # torchao draws from it
                norm = step_with(optimizer, start * 0.1 * (good + 1), step)
                total = sum(p.numel() for p in optimizer.parameters.values())
                assert norm.item() == pytest.approx(0.1 * (good + 1) * total**0.5, rel=1e-2)
                good += 1
        ends.append(optimizer.state())
    assert ends[1]["loss_scale.scale"] == 2.0**14 and ends[0]["loss_scale.scale"] == 2.0**16
    for name, tensor in ends[0].items():
        is_noisy = kept == {"latent_dtype": "bf16"} and name.endswith("_proj.weight")
        if not is_noisy and not name.startswith("loss_scale"):  # noise depends on the step
            torch.testing.assert_close(ends[1][name], tensor, rtol=1e-6, atol=1e-9)


def test_scaled_float16_gradients_move_as_plain_ones(tmp_path) -> None:
    """A loss whose gradient float16 cannot hold: lost without the scale, whole with it."""
    moved = {}
    for dtype in ("fp32", "fp16"):
        optimizer = optimizer_of(wide_student(), settings(tmp_path, dtype=dtype), ("norms",))
        before = {n: p.detach().clone() for n, p in optimizer.parameters.items()}
        compute = torch.float16 if dtype == "fp16" else torch.float32
        halves = [p.to(compute) for p in optimizer.parameters.values()]
        sums = torch.stack([half.sum() for half in halves]).float()
        optimizer.scale_loss(sums.sum() * 1e-8).backward()
        optimizer.step(0)
        moved[dtype] = {n: p.detach() - before[n] for n, p in optimizer.parameters.items()}
    for name, change in moved["fp32"].items():
        assert change.abs().min() > 0
        torch.testing.assert_close(moved["fp16"][name], change, rtol=1e-2, atol=1e-7)


def test_routers_learn_by_their_own_rate_when_they_are_named(tmp_path) -> None:
    model = build("Qwen3MoeForCausalLM")
    open_sites(model)
    found = learnable(model, [], ("router",))
    assert found == {"router": [f"model.layers.{n}.mlp.gate.weight" for n in range(4)]}
    mlp = model.model.layers[2].mlp
    gate = mlp.gate.weight
    before = gate.detach().clone()
    optimizer = Optimizer(model, found, settings(tmp_path, learn="router", lr_router=0.05))
    model(torch.arange(24).view(2, 12), use_cache=False).logits.square().mean().backward()
    assert gate.grad.abs().max() > 0 and mlp.experts.down_proj.weight.grad is None
    step_with(optimizer, gradient=1e-3)
    assert before.sub(gate).mean().item() == pytest.approx(0.05 * rms(before), rel=1e-3)
    with pytest.raises(ConfigError, match="no experts to choose among"):
        learnable(student(), [], ("router",))


def test_a_routers_bias_moves_by_its_rate_whatever_its_size() -> None:
    model = build("GptOssForCausalLM")
    name = "model.layers.0.mlp.router.bias"
    assert natural_sizes(model, {"router": [name]}) == {name: 1.0}
