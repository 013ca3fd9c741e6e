"""A run goes on with a cache of more sequences, and is judged by those that it began with."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from cache_case import build, info, texts
from crash import stopped_at
from train_case import assert_same_end, config, make_place, make_trainer

from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.logs import read_json_lines
from qat.train.judge import Judge, Judged
from qat.train.optim import Optimizer
from qat.train.run import RunDirectory
from qat.train.start import TrainReport, train_student

MORE = {"max_steps": 8, "cache_dir": "more"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_place(tmp_path_factory.mktemp("judged"), layers=1)
    build(place / "more", documents=texts(90), num_sequences=70)
    return place


def run(place: Path, out: Path, *, resume: bool = False, **values: object) -> TrainReport:
    given = {"max_steps": 4, "eval_every": 2, "eval_sequences": 99, **values}
    given["cache_dir"] = place / given.get("cache_dir", "cache")
    return train_student(config(place, **given), str(place / "student"), out, resume=resume)


@pytest.fixture(scope="module")
def begun(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with the smaller cache."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("begun") / "run"
    run(place, out)
    return out


@pytest.fixture
def out(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "run")


def test_a_run_goes_on_with_more_sequences(place: Path, begun: Path, out: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    report = run(place, out, resume=True, **MORE)
    old, new = (TeacherCache.open(place / name) for name in ("cache", "more"))
    counts = [cache.num_sequences("train") for cache in (old, new)]
    judged = old.num_sequences("held_out")
    assert report.steps == 8 and counts[1] == 70 and new.num_sequences("held_out") > judged
    said = "goes on with {1} training sequences instead of {0}, judged by the same {2}"
    assert said.format(*counts, judged) in caplog.text
    assert (
        f"4 steps left of 8, each of 64 tokens (4 sequences of 16): {16 / 70:.3g} passes over "
        in (caplog.text)
    )
    facts, before = (json.loads((path / "run.json").read_text()) for path in (out, begun))
    assert facts["judged"] == before["judged"] and len(facts["judged"]) == judged
    changed = facts["resumed"][0]["changed"]
    assert changed["cache_content"] == [before["cache_content"], facts["cache_content"]]
    assert [each["train"] for each in changed["cache_sequences"]] == counts
    evals = [m for m in read_json_lines(out / "metrics.jsonl") if m["kind"] == "eval"]
    assert len({line["num_tokens"] for line in evals}) == 1
    # and on with the same, which changes nothing more
    assert run(place, out, resume=True, **MORE).best == report.best
    entries = json.loads((out / "run.json").read_text())["resumed"]
    assert ["changed" in entry for entry in entries] == [True, False]


def test_a_checkpoint_of_before_the_cache_grew(place: Path, out: Path) -> None:
    more = {**MORE, "keep": 9}
    run(place, out, resume=True, **more)
    for step in (6, 8):
        shutil.rmtree(out / f"checkpoints/step-{step:06d}")
    assert run(place, out, resume=True, **more).steps == 8
    entries = json.loads((out / "run.json").read_text())["resumed"]
    assert [(entry["step"], "changed" in entry) for entry in entries] == [(4, True), (4, False)]


def test_a_sequence_with_room_left_is_found_where_it_goes_on(tmp_path: Path) -> None:
    short = [" ".join(text.split()[:5]) for text in texts(60)]
    build(tmp_path / "few", documents=short[:20])
    build(tmp_path / "many", documents=short)
    few, many = (TeacherCache.open(tmp_path / name) for name in ("few", "many"))
    first = Judged.first(few, 99)
    found = Judged.found(many, first.marks)
    before, after = (
        cache.batch(where.places, "held_out", targets=()).mask.sum()
        for cache, where in ((few, first), (many, found))
    )
    assert before < after


def test_what_judges_is_found_wherever_it_lies(place: Path) -> None:
    old, new = (TeacherCache.open(place / name) for name in ("cache", "more"))
    first = Judged.first(old, 99)
    found = Judged.found(new, first.marks)
    assert found is not None and found.marks == first.marks
    assert Judged.found(old, first.marks) == first
    turned = Judged.found(new, first.marks[::-1])
    assert turned is not None and turned.places == found.places[::-1]
    assert Judged.found(old, Judged.first(new, 99).marks) is None
    settings = config(place, eval_sequences=99)
    trainer = make_trainer(settings, place / "student", place / "scratch")
    verdicts = [
        Judge(trainer.student, trainer.judge.tokenizer, cache, settings, judged=judged).verdict(
            torch.float32
        )
        for cache, judged in ((old, None), (old, first), (new, found))
    ]
    assert verdicts[0] == verdicts[1]
    assert verdicts[2].pop("sample") == verdicts[0].pop("sample")
    assert verdicts[2] == pytest.approx(verdicts[0], rel=1e-6)


@pytest.fixture(scope="module")
def longer(
    place: Path, begun: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainReport]:
    """That run, gone on with."""
    whole = shutil.copytree(begun, tmp_path_factory.mktemp("whole") / "run")
    return whole, run(place, whole, resume=True, **MORE)


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 1, 3])
def test_a_longer_run_that_is_killed_ends_in_the_same_bytes(
    place: Path, longer: tuple[Path, TrainReport], out: Path, step: int
) -> None:
    with stopped_at(Optimizer, "step", step):
        run(place, out, resume=True, **MORE)
    assert_same_end(longer, out, run(place, out, resume=True, **MORE))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"info": info(identity="def0" * 8)}, r"teacher=def\w+, .* begun with abc\w+"),
        ({"top_k": 4}, "top_k=4, .* begun with 5"),
        ({"documents": texts(30)}, "training sequences, .* or more"),
        ({"documents": texts(90, seed=4)}, "lacks some of the .* held-out sequences"),
    ],
)
def test_another_cache_does_not_continue_a_run(
    place: Path, out: Path, tmp_path: Path, values: dict, message: str
) -> None:
    build(tmp_path / "other", **{"documents": texts(90), **values})
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=message):
        run(place, out, resume=True, max_steps=8, cache_dir=tmp_path / "other")
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    assert RunDirectory(out).recorded_steps() == 4


def test_the_last_batch_is_filled_up_and_counts_no_more_than_the_cache(place: Path) -> None:
    cache = TeacherCache.open(place / "cache")
    judge = Judge(None, None, cache, config(place, eval_sequences=3, batch_size=2))
    first, second = judge._by_source()[""]
    assert torch.equal(first.mask, cache.batch([0, 1], "held_out").mask)
    assert torch.equal(second.mask[0], cache.batch([2], "held_out").mask[0])
    assert not second.mask[1].any() and not first.mask.all()
