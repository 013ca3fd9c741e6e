"""A teacher that runs beside its student: what it teaches, how runs go on, what is refused."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from train_case import assert_resumes, config, make_place, make_trainer, with_teacher

from qat.errors import CheckpointError, ConfigError
from qat.logs import read_json_lines
from qat.models.load import load_teacher
from qat.train.config import TrainConfig
from qat.train.loop import Trainer
from qat.train.start import train_student


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of every run, with the teacher on disk and a cache that knows it."""
    return with_teacher(make_place(tmp_path_factory.mktemp("beside"), layers=1))


def settings(place: Path, **values: object) -> TrainConfig:
    beside = {"cache_dir": place / "known", "teacher": str(place / "teacher"), "loss": "kl"}
    return config(place, **{**beside, **values})


def trainer_of(place: Path, out: Path, **values: object) -> Trainer:
    """A trainer with the teacher beside its student."""
    return make_trainer(settings(place, **values), place / "student", out)


def test_kl_is_the_textbook_over_valid_tokens(place: Path, tmp_path: Path) -> None:
    trainer = trainer_of(place, tmp_path, loss="kl:2,hard_ce:0.5")
    batch = trainer.cache.batch(np.arange(4))
    pair = trainer.student, load_teacher(str(place / "teacher"), device="cpu", dtype="fp32")
    with torch.no_grad():
        log_q, log_p = (
            model.logits(model.hidden(batch.input_ids, batch.position_ids)).log_softmax(-1)
            for model in pair
        )
    kl = F.kl_div(log_q[batch.mask], log_p[batch.mask], log_target=True, reduction="sum")
    result = trainer.take_step([batch], 0)
    assert result.sums["kl"].item() == pytest.approx(kl.item(), rel=1e-5)
    total = 2 * result.sums["kl"] + 0.5 * result.sums["hard_ce"]
    assert result.sums["loss"].item() == pytest.approx(total.item(), rel=1e-6)


def test_what_a_cache_would_hold_is_not_read(place: Path, tmp_path: Path) -> None:
    trainer = trainer_of(place, tmp_path)
    batch = trainer.cache.batch(np.arange(4))
    noisy = batch._replace(topk_logprobs=torch.full_like(batch.topk_logprobs, torch.nan))
    result = trainer.take_step([noisy], 0)
    assert result.sums["kl"] > 0 and result.grad_norm.isfinite()


@pytest.mark.parametrize("loss", ["kl", "cakld"])
def test_micro_batches_add_up_and_teach(place: Path, tmp_path: Path, loss: str) -> None:
    courses = []
    for size, accumulate in ((4, 1), (2, 2)):
        trainer = trainer_of(place, tmp_path / str(size), loss=loss, max_steps=9)
        parts = np.arange(4).reshape(accumulate, size)
        batches = [trainer.cache.batch(part) for part in parts]
        courses.append([trainer.take_step(batches, n).sums["loss"].item() for n in range(6)])
    assert courses[0] == pytest.approx(courses[1], rel=1e-4)
    assert courses[0][-1] < courses[0][0]


def test_a_stopped_run_goes_on_bit_for_bit(place: Path, tmp_path: Path) -> None:
    run = partial(train_student, settings(place, max_steps=7), str(place / "student"))
    out, _ = assert_resumes(run, tmp_path, 5)
    lines = read_json_lines(out / "metrics.jsonl")
    assert all(each["kl_nats"] == each["loss_nats"] > 0 for each in lines if "loss_nats" in each)
    facts = json.loads((out / "run.json").read_text())
    assert facts["teacher"] == str(place / "teacher")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"loss": "tail"}, ConfigError, "tail reads the teacher from a cache.*drop --teacher"),
        ({"loss": "kl,sampled:0.1"}, ConfigError, "sampled reads the teacher from a cache"),
        ({"teacher": None}, ConfigError, "kl reads every word of the teacher.*--teacher DIR"),
        ({"teacher": "no/where/at/all"}, CheckpointError, "no/where/at/all does not exist"),
        (
            {"cache": "cache"},
            ConfigError,
            r"is model .* holds the words of tiny, abc\w+; name that",
        ),
    ],
)
def test_what_does_not_fit_leaves_nothing(
    place: Path, tmp_path: Path, values: dict, error: type, message: str
) -> None:
    if "cache" in values:
        values = {"cache_dir": place / values["cache"]}
    with pytest.raises(error, match=message):
        train_student(
            settings(place, **values), str(place / "student"), tmp_path / "run", resume=False
        )
    assert not (tmp_path / "run").exists()
