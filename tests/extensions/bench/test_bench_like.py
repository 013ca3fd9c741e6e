"""`qat bench --like`: the steps of a run once more, on its own batches."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from train_case import config, make_place, with_teacher

from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.like import time_like
from qat.models.flops import forward_flops
from qat.observe.runs import read_directory
from qat.train.run import RunDirectory
from qat.train.start import reopened, train_student
from qat.train.step import TrainingStep
from qat.train.step_config import StepConfig

QUICK = BenchConfig(device="cpu", warmup=2, steps=3)
SETTINGS = {"grad_accum_steps": 2, "learn": "scales,codebook", "seed": 5, "temperature": 2.0}
Seen = dict[int, list[Tensor]]  # the tokens of each micro-batch, by step


class Ran(NamedTuple):
    """A run of six steps, and what they saw."""

    place: Path
    seen: Seen

    @property
    def path(self) -> Path:
        return self.place / "run"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    place = make_place(tmp_path_factory.mktemp("like"), layers=1)
    with pytest.MonkeyPatch.context() as patch:
        seen = watched(patch)
        train_student(
            config(place, **SETTINGS), str(place / "student"), place / "run", resume=False
        )
    return Ran(place, seen)


def watched(patch: pytest.MonkeyPatch) -> Seen:
    """Note the tokens of every step that is taken from here on."""
    seen, real = {}, TrainingStep.__call__

    def call(take_step: TrainingStep, batches: list, step: int, **named: object) -> object:
        seen[step] = [batch.input_ids.clone() for batch in batches]
        return real(take_step, batches, step, **named)

    patch.setattr(TrainingStep, "__call__", call)
    return seen


def assert_same_tokens(seen: Seen, others: Seen) -> None:
    for step, batches in seen.items():
        assert len(batches) == len(others[step])
        assert all(map(torch.equal, batches, others[step])), step


def files(path: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}


def test_steps_batches_and_settings_are_those_of_the_run(ran: Ran, tmp_path, monkeypatch) -> None:
    before, seen = files(ran.place), watched(monkeypatch)
    (row,) = time_like(QUICK, ran.path, tmp_path / "out").rows
    assert list(seen) == [0, 1, 2, 3, 4]
    assert_same_tokens(seen, ran.seen)
    # the fifth step has learned in the four before it as it did in the run
    (fifth,) = [line for line in read_directory(ran.path).steps if line["step"] == 5]
    assert row["loss_nats"] == pytest.approx(fifth["loss_nats"], rel=1e-7)
    settings, student = RunDirectory(ran.path).begun_with()
    for name in StepConfig.model_fields.keys() - {"xla_cache_dir"}:
        assert row[name] == getattr(settings, name), name
    assert row["student"] == student and row["seq_len"] == 16 and row["positions"] == 2 * 4 * 16
    assert row["timed_steps"] == 3 and len(row["samples"]) == 3
    assert files(ran.place) == before


def test_what_the_run_logged_lies_beside(ran: Ran, tmp_path: Path) -> None:
    (row,) = time_like(QUICK, ran.path, tmp_path / "out").rows
    logged = read_directory(ran.path)
    assert row["run_tokens_per_s"] == logged.tokens_per_s() > 0
    assert row["real_run_over_bench"] == row["run_tokens_per_s"] / row["tokens_per_s"]
    assert row["run_step_s"] == logged.median("step_s")
    assert row["run_data_wait_s"] == logged.median("data_wait_s")
    assert row["run_peak_gib"] == logged.peak_gib()
    assert 0 < row["run_outside_frac"] < 1
    assert row["run_commit"] == logged.info["commit"] and row["like"] == "run"


def test_a_run_whose_student_is_gone_goes_on_from_its_newest_checkpoint(
    ran: Ran, tmp_path: Path, monkeypatch
) -> None:
    student = ran.place / "student"
    away = student.rename(ran.place / "moved")
    try:
        seen = watched(monkeypatch)
        (row,) = time_like(QUICK, ran.path, tmp_path / "out").rows
    finally:
        away.rename(student)
    assert list(seen) == [6, 7, 8, 9, 10]
    trainer = reopened(RunDirectory(ran.path), *RunDirectory(ran.path).begun_with())
    assert trainer.step == 0
    ahead = {step: [batch.input_ids for batch in trainer.step_batches(step)] for step in seen}
    assert_same_tokens(seen, ahead)
    assert row["status"] == "OK" and row["real_run_over_bench"] > 0


def test_a_cache_that_has_moved_may_be_named(ran: Ran, tmp_path: Path, monkeypatch) -> None:
    moved = shutil.copytree(ran.place / "cache", tmp_path / "moved")
    cache = (ran.place / "cache").rename(tmp_path / "away")
    try:
        seen = watched(monkeypatch)
        time_like(QUICK.model_copy(update={"cache_dir": moved}), ran.path, tmp_path / "out")
    finally:
        cache.rename(ran.place / "cache")
    assert_same_tokens(seen, ran.seen)


def test_a_running_teacher_counts(tmp_path: Path) -> None:
    place = with_teacher(make_place(tmp_path, layers=1))
    known = {"cache_dir": place / "known", "teacher": str(place / "teacher"), "loss": "kl"}
    train_student(config(place, **known), str(place / "student"), place / "run", resume=False)
    (row,) = time_like(QUICK, place / "run", tmp_path / "out").rows
    trainer = reopened(RunDirectory(place / "run"), *RunDirectory(place / "run").begun_with())
    assert row["flops_per_token_teacher"] == forward_flops(trainer.teacher, 16) > 0
    parts = sum(row[f"flops_per_token_{part}"] for part in ("linears", "head", "attention"))
    assert trainer.flops().total == pytest.approx(parts + row["flops_per_token_teacher"])
