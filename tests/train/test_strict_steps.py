"""Nothing reads a value of a step before the step's end, wherever a run may look."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import build, teacher
from strict_backend import Book, inside, make_strict
from train_case import trainer_of

from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.evaluate.config import EvalConfig
from qat.extensions.suite.harness import Tasks
from qat.logs import read_json_lines


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Book:
    return make_strict(monkeypatch)


ALL = "weights,codebook,scales,norms"


def _but_sample(line: dict) -> dict[str, float]:
    return {key: value for key, value in line.items() if key not in ("kind", "sample")}


@pytest.mark.parametrize(
    ("losses", "learn"),
    [("tail", ALL), ("candidates", "codebook,scales"), ("sampled,jsd", "norms")],
)
def test_a_step_reads_nothing(
    place: Path,
    tmp_path: Path,
    strict: Book,
    losses: str,
    learn: str,
) -> None:
    trainer = trainer_of(place, tmp_path, loss=losses, learn=learn, gradient_checkpointing=True)
    parts = [trainer.cache.batch(np.arange(4) + start) for start in (0, 4)]
    with inside(strict, trainer.student.model):
        for step in range(3):
            trainer.take_step(parts, step)
    assert (strict.step_ends, strict.reads, strict.compiles) == (3, 0, 2)


def test_a_length_for_each_step_is_refused(place: Path, tmp_path: Path, strict: Book) -> None:
    trainer = trainer_of(place, tmp_path)
    with inside(strict, trainer.student.model), pytest.raises(ConfigError, match="last 5 steps"):
        for step in range(6):
            trainer.take_step([trainer.cache.batch(np.arange(step + 1))], step)
    assert strict.step_ends == 5


def test_lengths_of_questions_are_refused(strict: Book) -> None:
    with pytest.raises(ConfigError, match="tasks=arc_easy, but device=cpu"):
        Tasks(EvalConfig(tasks="arc_easy", device="cpu"))


@pytest.mark.slow
def test_a_run_reads_after_ends_of_steps_alone(
    place: Path,
    tmp_path: Path,
    strict: Book,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"max_steps": 4, "log_every": 2, "eval_every": 4, "save_every": 4}
    values |= {"grad_accum_steps": 2, "batch_size": 2}
    trainer = trainer_of(place, tmp_path, **values)
    with inside(strict, trainer.student.model):
        trainer.train()
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    monkeypatch.undo()
    plain = trainer_of(place, tmp_path / "plain", **values)
    plain.train()
    expected = read_json_lines(tmp_path / "plain/metrics.jsonl")
    assert [line["kind"] for line in lines] == ["eval", "train", "train", "eval"]
    assert [_but_sample(line) for line in lines] == [
        pytest.approx(_but_sample(line), rel=1e-5) for line in expected
    ]
    assert [line.get("sample") for line in lines] == [line.get("sample") for line in expected]
    assert strict.step_ends > 4


def test_a_cache_reads_after_ends_of_steps_alone(place: Path, tmp_path: Path, strict: Book) -> None:
    asked = teacher()
    with inside(strict, asked.model):
        build(tmp_path / "strict", teacher=asked)
    ours, theirs = (
        TeacherCache.open(path).batch(range(10)) for path in (tmp_path / "strict", place / "cache")
    )
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0, equal_nan=True)
    assert strict.step_ends > 4


def test_what_it_forbids(strict: Book) -> None:
    layer = torch.nn.Linear(2, 2)
    with inside(strict, layer):
        y = layer(torch.ones(1, 2)).detach()
        for read in (lambda: y.sum().item(), y.tolist, lambda: bool((y > 0).all()), y.cpu):
            with pytest.raises(AssertionError, match="before the step's end"):
                read()
        with pytest.raises(AssertionError, match="needs values"):
            y[y > 0]
        strict.end()
        y.tolist()
