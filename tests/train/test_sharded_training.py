"""Latent weights in rows over several ranks: the course, the bits and the checkpoints of one."""

from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM, raise_signal

import pytest
import safetensors.torch
import torch
from cache_case import TOKENIZER
from quantized import SPECS, tiny_quantized
from ranks_case import run_ranks
from test_ranks_training import assert_same_course, before, course
from train_case import config, make_place, put_tables

from qat.data.reader import TeacherCache
from qat.models.checkpoint import save_checkpoint
from qat.models.load import load_model
from qat.nn.quant_linear import quant_linears
from qat.nn.sharded import ShardedLutLinear
from qat.nn.step import form_weights
from qat.nn.swap import table_names
from qat.ranks import ALONE, Ranks
from qat.train.config import TrainConfig
from qat.train.loop import Trainer
from qat.train.optim import Optimizer
from qat.train.preflight import predict
from qat.train.run import RunDirectory
from qat.train.start import train_student

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("sharded"))


def settings(place: Path, **values: object) -> TrainConfig:
    short = {"max_steps": 6, "eval_every": 6, "save_every": 3, "shard_latents": True}
    return config(place, **{**short, "batch_size": 2, "global_batch_size": 12, **values})


def train(place: Path, out: Path, *, resume: bool = False, ranks: Ranks = ALONE, **values) -> dict:
    chosen = settings(place, **values)
    report = train_student(chosen, str(place / "student"), out, resume=resume, ranks=ranks)
    return {"best": report.best, "steps": report.steps}


def on_ranks(size: int, place: Path, out: Path, **values: object) -> None:
    found = run_ranks(size, lambda ranks: train(place, out, ranks=ranks, **values), out.parent)
    assert found == [{"best": found[0]["best"], "steps": 6}] * size, found


def state(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(
        RunDirectory(run).pointed("latest") / "trainer/state.safetensors"
    )


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    """A run of one process, to which `shard_latents` means nothing."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train(place, out)
    return out


@SLOW
def test_three_ranks_with_rows_that_do_not_divide_train_as_one_process(place, alone, tmp_path):
    out = tmp_path / "run"
    on_ranks(3, place, out)
    assert_same_course(out, alone)
    ours, whole = state(out), state(alone)
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in whole.items()}
    latents = [name for name in whole if name.endswith(".weight")]
    assert any(name.startswith("exp_avg_sq.") for name in latents)
    for name in latents:
        torch.testing.assert_close(ours[name], whole[name], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_signals")
def test_a_run_goes_on_divided_or_not_on_any_number_of_ranks(place, alone, tmp_path):
    out = tmp_path / "run"
    stages = [(2, True, 2), (1, True, 3), (2, False, 4), (3, True, 5)]
    for size, is_sharded, stop in stages:

        def stopped(ranks: Ranks, is_sharded: bool = is_sharded, stop: int = stop) -> dict:
            def stop_in(step: int) -> Callable[[Trainer], None]:
                return lambda trainer: (
                    trainer.step == step and ranks.is_first and raise_signal(SIGTERM)
                )

            before(Trainer, "_begin", stop_in(stop - 1))
            before(Trainer, "_follow", stop_in(stop - 2))
            return train(place, out, resume=True, ranks=ranks, shard_latents=is_sharded)

        for found in run_ranks(size, stopped, tmp_path):
            assert f"after step {stop}" in found["error"], found
    on_ranks(2, place, out, resume=True)
    assert_same_course(out, alone)


@pytest.mark.parametrize(
    "values",
    [
        {"learn": "weights", "clip_grad_norm": 1e9},
        {"latent_dtype": "bf16"},
        {"learn": "weights,norms"},
        {"dtype": "bf16"},
    ],
)
@SLOW
def test_two_ranks_divided_train_as_two_that_hold_all(place, tmp_path, values):
    chosen = {"batch_size": 4, "global_batch_size": 8, **values}
    outs = [tmp_path / "divided", tmp_path / "whole"]
    for out in outs:
        on_ranks(2, place, out, shard_latents=out.name == "divided", **chosen)
    if values.get("learn") == "weights":  # one micro-batch, no clipping: no sum in another order
        ours, theirs = ([{**line, "grad_norm": None} for line in course(out)] for out in outs)
        assert ours == theirs
        ours, theirs = map(state, outs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    else:
        tolerance = 2e-2 if "bf16" in values.values() else 1e-5
        for mine, its in zip(*map(course, outs), strict=True):
            assert mine["step"] == its["step"]
            if "loss_nats" in mine:
                assert mine["loss_nats"] == pytest.approx(its["loss_nats"], rel=tolerance)


@SLOW
@pytest.mark.parametrize("is_tied", [True, False])
def test_divided_tables_learn_as_those_of_one_process(is_tied, tmp_path):
    place = make_place(tmp_path)
    model = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=is_tied)
    put_tables(model)
    save_checkpoint(model, TOKENIZER, place / "student", replace=True)
    for out in (tmp_path / "alone", tmp_path / "divided"):
        size = 1 if out.name == "alone" else 2
        on_ranks(size, place, out, learn="weights", clip_grad_norm=1e9)
    ours, whole = state(tmp_path / "divided"), state(tmp_path / "alone")
    for name in table_names(model):
        moved = whole[f"exp_avg_sq.{name}.weight"].any(1)  # other rows are named by no text
        assert moved.any() and not moved.all()
        assert torch.equal(ours[f"exp_avg_sq.{name}.weight"].any(1), moved)
        latents = (state[f"parameter.{name}.weight"] for state in (ours, whole))
        torch.testing.assert_close(*latents, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "bf16", "gradient_checkpointing": True},
        {"grad_accum_steps": 2, "global_batch_size": 0},
        {"latent_dtype": "bf16", "learn": "weights,norms", "offload": "moments"},
    ],
)
def test_two_ranks_that_gather_a_layer_at_a_time_train_as_two_that_gather_all(
    place, tmp_path, values
):
    outs = [tmp_path / form for form in ("layer", "whole")]
    for out in outs:
        on_ranks(2, place, out, form=out.name, **values)
    ours, theirs = map(course, outs)
    assert len(ours) > 6 and ours == theirs
    ours, theirs = map(state, outs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("spec", ["lut2", pytest.param("fours8_s8", marks=pytest.mark.slow)])
def test_a_rank_holds_its_rows_and_computes_with_what_is_exported(spec, tmp_path):
    place, out = make_place(tmp_path, SPECS[spec]), tmp_path / "run"

    def act(ranks: Ranks) -> dict:
        sizes, equal = {}, {}

        def look(trainer: Trainer) -> None:
            if trainer.step != 6:
                return
            model, optimizer = trainer.student.model, trainer.optimizer
            linears = quant_linears(model)
            assert all(isinstance(linear, ShardedLutLinear) for linear in linears.values())
            for name, owner in optimizer.sharded.items():
                moments = optimizer._movers[0]._adamw.state[owner.weight]
                assert moments["exp_avg"].shape == owner.weight.shape
                sizes[name] = [owner.weight.numel(), owner.weight_count()]
            form_weights(model, torch.float32)
            units = {
                n: linear.weight_in(torch.float32).detach().clone() for n, linear in linears.items()
            }
            trainer.saver.save(6, 0.0, is_best=False)
            trainer.saver.finish()
            ranks.wait()
            exported = load_model(str(out / "checkpoints/step-000006"), device="cpu", dtype="fp32")
            for name, linear in quant_linears(exported.model).items():
                equal[name] = torch.equal(units[name], linear.quantized_weight())

        before(Trainer, "_evaluate", look)
        train(place, out, ranks=ranks)
        return {"sizes": sizes, "equal": equal}

    for found in run_ranks(2, act, tmp_path):
        assert found["equal"] and all(found["equal"].values())
        assert all(2 * mine == whole for mine, whole in found["sizes"].values())


def test_a_prediction_is_of_one_ranks_share(place, monkeypatch):
    seen = []

    def keep(optimizer: Optimizer) -> int:
        seen.append(sum(p.numel() for p in optimizer.parameters.values()))
        return counted(optimizer)

    counted = Optimizer.state_bytes
    monkeypatch.setattr(Optimizer, "state_bytes", keep)
    cache = TeacherCache.open(place / "cache")
    chosen = settings(place, learn="weights", global_batch_size=0)
    one, three = (predict(chosen, str(place / "student"), cache, world=n) for n in (1, 3))
    assert seen[1] == pytest.approx(seen[0] / 3, rel=0.05)
    assert three.checkpoint_bytes == one.checkpoint_bytes
    assert three.final_bytes == one.final_bytes
