"""Runs that train adapters: what learns and how far, resume bit for bit, and what is refused."""

from pathlib import Path

import pytest
import torch
from quantized import SPECS, tiny_adapted, tiny_quantized
from train_case import config
from transformers import PreTrainedModel

from qat.errors import ConfigError
from qat.logs import read_json_lines
from qat.models.checkpoint import load_checkpoint
from qat.nn.latent import add_adapters
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import linear_names
from qat.quant.lora import LORA_NAMES
from qat.train.config import TrainConfig
from qat.train.learnable import learnable, natural_sizes, weights_in_scope
from qat.train.optim import Optimizer
from qat.train.start import TrainReport, train_student


def run(
    place: Path,
    out: Path,
    *,
    student: Path | None = None,
    resume: bool = False,
    **values: object,
) -> TrainReport:
    lora = {"learn": "lora", "lora_rank": 4, "lr_lora": 1e-2}
    settings = config(place, **{**lora, **values})
    return train_student(settings, str(student or place / "student"), out, resume=resume)


@pytest.mark.parametrize("learn", ["lora", "lora,scales,codebook,norms"])
def test_a_run_moves_what_learns_and_nothing_else(place: Path, tmp_path: Path, learn: str) -> None:
    report = run(place, tmp_path / "run", learn=learn, max_steps=12, eval_every=12)
    before, after = load_checkpoint(place / "student"), load_checkpoint(report.final)
    for name, linear in quant_linears(after).items():
        old = before.get_submodule(name)
        assert linear.lora_rank == 4 and linear.lora_out.abs().max() > 0
        assert torch.equal(linear.packed, old.packed) or "codebook" in learn
        assert torch.equal(linear.scales, old.scales) == ("scales" not in learn)
        assert torch.equal(linear.codebook, old.codebook) == ("codebook" not in learn)
    lines = read_json_lines(tmp_path / "run/metrics.jsonl")
    held_out = [line["kl_tail_nats"] for line in lines if line["kind"] == "eval"]
    assert held_out[-1] < held_out[0]


def test_adapters_go_on_in_a_second_run(place: Path, tmp_path: Path) -> None:
    first = run(place, tmp_path / "first", mlp_only=True)
    ranks = {n: m.lora_rank for n, m in quant_linears(load_checkpoint(first.final)).items()}
    assert all(rank == (4 if ".mlp." in name else 0) for name, rank in ranks.items())
    second = run(place, tmp_path / "second", student=first.final, lr_lora=0.0)
    old, new = load_checkpoint(first.final), load_checkpoint(second.final)
    for name, linear in quant_linears(new).items():
        assert linear.lora_rank == 4
        if ranks[name]:
            before = old.get_submodule(name)
            for factor in LORA_NAMES:
                assert torch.equal(getattr(linear, factor), getattr(before, factor))
    message = "lora_rank=8, but the adapter of .* has rank 4, expected the same; go on with --lora"
    with pytest.raises(ConfigError, match=message):
        run(place, tmp_path / "third", student=first.final, lora_rank=8)
    assert not (tmp_path / "third").exists()


def test_latent_weights_may_learn_under_adapters_that_stay(place: Path, tmp_path: Path) -> None:
    first = run(place, tmp_path / "first")
    second = run(place, tmp_path / "second", student=first.final, learn="weights,scales")
    old, new = load_checkpoint(first.final), load_checkpoint(second.final)
    for name, linear in quant_linears(new).items():
        before = old.get_submodule(name)
        assert all(torch.equal(getattr(linear, f), getattr(before, f)) for f in LORA_NAMES)
        assert not torch.equal(linear.scales, before.scales)


def test_a_rank_above_a_layer_leaves_nothing(place: Path, tmp_path: Path) -> None:
    message = "lora_rank=33 is more than model.layers.0.* has, whose sides are .*; use --lora-rank"
    with pytest.raises(ConfigError, match=message):
        run(place, tmp_path / "run", lora_rank=33)
    assert not (tmp_path / "run").exists()


def optimizer_of(model: PreTrainedModel, chosen: TrainConfig) -> Optimizer:
    names = weights_in_scope(model, chosen.scope)
    return Optimizer(model, learnable(model, names, chosen.kinds), chosen)


@pytest.mark.parametrize("rank", [1, 16])
def test_a_first_step_moves_the_weight_by_its_rate_times_its_size(
    tmp_path: Path, rank: int
) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    add_adapters(model, linear_names(model), rank, seed=0)
    before = {name: m.quantized_weight() for name, m in quant_linears(model).items()}
    flat = {"warmup_steps": 0, "schedule": "constant", "clip_grad_norm": 1e9}
    optimizer = optimizer_of(model, config(tmp_path, learn="lora", lr_lora=1e-2, **flat))
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(0)
    moves = []
    for name, linear in quant_linears(model).items():
        moved = (linear.quantized_weight() - before[name]).square().mean().sqrt()
        moves.append((moved / before[name].square().mean().sqrt()).item())
    assert sum(moves) / len(moves) == pytest.approx(1e-2, rel=0.25)


def test_the_natural_size_of_an_adapter_does_not_depend_on_where_it_stands() -> None:
    model = tiny_adapted("qwen3", SPECS["lut2"])
    names = linear_names(model)
    by_kind = learnable(model, names, ("lora",))
    before = natural_sizes(model, by_kind)
    with torch.no_grad():
        for linear in quant_linears(model).values():
            linear.lora_out.mul_(5)
    assert natural_sizes(model, by_kind) == before
    assert before[f"{names[0]}.lora_in"] == before[f"{names[0]}.lora_out"]
