"""Training on several ranks: the course of one process, whoever stops, breaks or goes on."""

import json
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from signal import SIGINT, SIGTERM, raise_signal
from types import SimpleNamespace

import pytest
import torch
from ranks_case import run_ranks
from torchrun_case import launch
from train_case import config, make_place

from qat.errors import ConfigError
from qat.logs import read_json_lines
from qat.ranks import ALONE, Ranks
from qat.train.config import TrainConfig
from qat.train.loop import Trainer
from qat.train.optim import Optimizer
from qat.train.start import train_student
from qat.train.step import TrainingStep

FROZEN, LATENT = "scales,codebook", "weights,scales,codebook"


def settings(place: Path, **values: object) -> TrainConfig:
    long = {"max_steps": 10, "batch_size": 2, "eval_every": 5, "save_every": 5}
    return config(place, **{**long, "global_batch_size": 8, **values})


def train(place: Path, out: Path, *, resume: bool = False, ranks: Ranks = ALONE, **values) -> dict:
    """A run's report, and what its ranks moved."""
    chosen = settings(place, **values)
    report = train_student(chosen, str(place / "student"), out, resume=resume, ranks=ranks)
    return {"best": report.best, "steps": report.steps, "moved": ranks.bytes_moved}


def on_ranks(size: int, place: Path, out: Path, **values: object) -> list[dict]:
    return run_ranks(size, lambda ranks: train(place, out, ranks=ranks, **values), out.parent)


def course(out: Path) -> list[dict]:
    lines = read_json_lines(out / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not isinstance(v, str)} for line in lines]


def assert_same_course(out: Path, other: Path) -> None:
    ours, theirs = course(out), course(other)
    assert len(ours) == len(theirs)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(its, rel=1e-5)


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    """Return, of what learns, the run of one process that others are compared with."""

    @cache
    def run(learn: str) -> Path:
        out = tmp_path_factory.mktemp("alone") / "run"
        train(place, out, learn=learn)
        return out

    return run


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "learn"),
    [
        (4, LATENT),
        *(pytest.param(*each, marks=SLOW) for each in ((2, FROZEN), (2, LATENT), (4, FROZEN))),
    ],
)
def test_ranks_train_as_one_process_does(place, alone, tmp_path, size, learn):
    out = tmp_path / "run"
    found = on_ranks(size, place, out, learn=learn)
    assert [report["steps"] for report in found] == [10] * size, found
    assert len({report["best"] for report in found}) == 1
    assert_same_course(out, alone(learn))
    learnable = json.loads((out / "run.json").read_text())["learnable"]
    counts, losses = 2 * 8, 3 * 4  # valid tokens, wishes; a loss, the total, whether all is finite
    assert found[0]["moved"] == 10 * (4 * learnable + counts + losses)


@SLOW
def test_ranks_keep_latent_weights_on_the_host(place, tmp_path):
    outs = [tmp_path / offload for offload in ("none", "latents")]
    for out in outs:
        on_ranks(2, place, out, learn=LATENT, latent_dtype="bf16", offload=out.name)
    ours, theirs = (out / "checkpoints/step-000010" for out in outs)
    for name in ("model.safetensors", "trainer/state.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("plain_signals")
def test_a_signal_to_one_rank_stops_all_and_other_numbers_of_ranks_go_on(place, alone, tmp_path):
    out = tmp_path / "run"

    def signalled(ranks: Ranks) -> dict:
        if ranks.rank == 1:
            before(Trainer, "_follow", lambda trainer: trainer.step == 2 and raise_signal(SIGTERM))
        return train(place, out, ranks=ranks)

    first, second = run_ranks(2, signalled, tmp_path)
    assert "stopped by another rank after step 4" in first["error"]
    assert "stopped by SIGTERM after step 4" in second["error"]
    assert (out / "latest").read_text() == "checkpoints/step-000004\n"

    def interrupted(ranks: Ranks) -> dict:
        before(Trainer, "_follow", lambda trainer: trainer.step == 5 and raise_signal(SIGINT))
        return train(place, out, ranks=ranks, resume=True)

    (stopped,) = run_ranks(1, interrupted, tmp_path)
    assert "stopped by SIGINT after step 7" in stopped["error"]
    found = on_ranks(4, place, out, resume=True)
    assert [report["steps"] for report in found] == [10] * 4
    assert_same_course(out, alone(LATENT))


def test_what_is_no_number_on_one_rank_stops_all_with_one_line(place, tmp_path):
    out = tmp_path / "run"

    def spoilt(ranks: Ranks) -> dict:
        if ranks.rank == 1:
            before(Optimizer, "step", spoil)
        return train(place, out, ranks=ranks)

    def spoil(optimizer: Optimizer, step: int) -> None:
        if step == 6:
            next(iter(optimizer.parameters.values())).grad.fill_(torch.nan)

    first, second = run_ranks(2, spoilt, tmp_path)
    assert first == second and first["kind"] == "TrainingError"
    assert "up to step 7" in first["error"] and "step-000005" in first["error"]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000005"]


def test_ranks_whose_weights_drift_apart_are_stopped_before_they_are_saved(place, tmp_path):
    out = tmp_path / "run"

    def drifting(ranks: Ranks) -> dict:
        if ranks.rank == 1:
            before(Optimizer, "step", nudge)
        return train(place, out, ranks=ranks)

    def nudge(optimizer: Optimizer, step: int) -> None:
        if step == 6:
            next(iter(optimizer.parameters.values())).data.view(torch.int32)[0] += 1

    first, second = run_ranks(2, drifting, tmp_path)
    assert first == second and first["kind"] == "TrainingError"
    assert "after step 10 rank 1 has other weights than rank 0" in first["error"]
    assert (out / "latest").read_text() == "checkpoints/step-000005\n"


def test_a_rank_without_the_cache_stops_all_before_anything_is_written(place, tmp_path):
    out = tmp_path / "run"

    def act(ranks: Ranks) -> dict:
        chosen = {"cache_dir": tmp_path / "none"} if ranks.rank else {}
        return train(place, out, ranks=ranks, **chosen)

    first, second = run_ranks(2, act, tmp_path)
    assert first == second and first["kind"] == "CacheError"
    assert first["error"].startswith("rank 1: ") and "'qat cache'" in first["error"]
    assert not out.exists()


def test_a_batch_that_does_not_divide_is_refused(place):
    expected = r"global_batch_size=64 does not divide by 3 ranks x batch_size=4; .* multiple of 12"
    with pytest.raises(ConfigError, match=expected):
        settings(place, global_batch_size=64, batch_size=4).divided(3)
    assert settings(place, global_batch_size=64, batch_size=4).divided(2).grad_accum_steps == 8
    unset = settings(place, global_batch_size=0)
    assert unset.divided(3) == unset


def before(owner: type, name: str, act: Callable) -> None:
    """Let `act` see the arguments of each call of a method; for forked processes only."""
    method = getattr(owner, name)

    def replaced(*args: object, **named: object) -> object:
        act(*args[: act.__code__.co_argcount])
        return method(*args, **named)

    setattr(owner, name, replaced)


@pytest.mark.parametrize(
    ("lag", "decisions"), [(0, [True, False, True]), (2, [False, False, True])]
)
def test_ranks_stop_by_what_a_step_before_said(lag: int, decisions: list[bool]) -> None:
    backend = SimpleNamespace(
        decision_lag=lag, to_host=lambda it: it, finished=lambda: lambda: None
    )
    step = SimpleNamespace(backend=backend, _stops=deque())
    counts = [torch.tensor(count) for count in (1, 0, 2)]
    assert [TrainingStep._agree_on_stop(step, count) for count in counts] == decisions


KILL_ONE_ONCE = """
    if trainer.step == 5 and rank == 1 and not (place / "killed").exists():
        (place / "killed").touch()
        os.kill(os.getpid(), SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_rank_restarts_the_group_which_goes_on(tmp_path: Path) -> None:
    make_place(tmp_path)
    settings = config(tmp_path, batch_size=2, global_batch_size=8, learn="scales,codebook")
    train_student(settings, str(tmp_path / "student"), tmp_path / "alone", resume=False)
    ended = launch(tmp_path, settings, act=KILL_ONE_ONCE, restarts=1)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "killed").exists()
    assert json.loads(ended.stdout.splitlines()[-1])["steps"] == 6
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [entry["step"] for entry in facts["resumed"]] == [4]
    ours, alone = (
        [line["loss_nats"] for line in lines if line["kind"] == "train"]
        for lines in (read_json_lines(tmp_path / run / "metrics.jsonl") for run in ("run", "alone"))
    )
    assert ours == pytest.approx(alone, rel=1e-5)
