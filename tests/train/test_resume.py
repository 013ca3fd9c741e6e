"""Going on: from the newest whole checkpoint, and with nothing but what the run began with."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cache_case import build, texts
from crash import stopped_at
from quantized import SPECS, tiny_quantized
from tiny import tiny_tokenizer
from train_case import assert_same_end, config, make_place, visiting

from qat.backend.base import Backend
from qat.errors import CheckpointError, ConfigError
from qat.files import held
from qat.logs import read_json_lines
from qat.models.checkpoint import save_checkpoint
from qat.train.optim import Optimizer
from qat.train.resume import best_of, choose, load_training_state
from qat.train.run import MANIFEST, STATE, RunDirectory
from qat.train.saver import STATE_TENSORS, problem
from qat.train.start import TrainReport, train_student


def run(place: Path, out: Path, *, resume: bool = False, **values: object) -> TrainReport:
    settings = config(place, **{"save_every": 1, "eval_every": 2, **values})
    return train_student(settings, str(place / "student"), out, resume=resume)


def crash(place: Path, out: Path, step: int, **values: object) -> None:
    """A run that dies in optimizer step number `step`."""
    with stopped_at(Optimizer, "step", step):
        run(place, out, **values)


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainReport]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run(place, out)


@pytest.fixture(scope="module")
def stopped(place: Path, whole, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that died after five steps; keeps checkpoints 4 (the best) and 5."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    crash(place, out, 5)
    assert [path.name for path in RunDirectory(out).checkpoints()] == ["step-000004", "step-000005"]
    return out


@pytest.fixture
def out(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


def flip(path: Path) -> None:
    octets = bytearray(path.read_bytes())
    octets[-5] ^= 4
    path.write_bytes(octets)


def test_a_damaged_newest_checkpoint_is_passed_over(place: Path, whole, out: Path, caplog) -> None:
    flip(out / "checkpoints/step-000005/model.safetensors")
    report = run(place, out, resume=True)
    said = "checkpoints/step-000005 is damaged (model.safetensors: SHA-256 differs); going on from "
    assert said + "checkpoints/step-000004" in caplog.text
    assert_same_end(whole, out, report)
    (entry,) = json.loads((out / "run.json").read_text())["resumed"]
    expected = {"step": 4, "from": "step-000004", "world_size": 1, "skipped": ["step-000005"]}
    assert entry == expected
    kinds = [event["kind"] for event in read_json_lines(out / "events.jsonl")]
    assert kinds == ["resumed", "fallback_checkpoint"]


@pytest.mark.parametrize(
    ("name", "harm", "trouble"),
    [
        (
            STATE_TENSORS,
            lambda path: path.write_bytes(path.read_bytes()[:100]),
            "100 bytes instead",
        ),
        (STATE, lambda path: path.unlink(), "missing"),
        ("config.json", flip, "SHA-256 differs"),
        (MANIFEST, lambda path: path.write_text("[" * 9999), "nests lists or objects too deeply"),
        (MANIFEST, lambda path: path.write_text("{}"), "unknown format"),
        (MANIFEST, lambda path: path.write_text('{"format": 1, "files": 3}'), "no table"),
        (MANIFEST, lambda path: path.write_text('{"format": 1, "files": {}}'), "does not list"),
        (".", lambda path: path.rename(path.with_name("gone")), "not there"),
    ],
)
def test_what_is_damaged(out: Path, name: str, harm: Callable, trouble: str) -> None:
    damaged = out / "checkpoints/step-000005"
    assert problem(damaged) is None
    harm(damaged / name)
    assert re.search(trouble, problem(damaged))
    choice = choose(RunDirectory(out))
    assert choice.checkpoint.name == "step-000004" and choice.skipped == ["step-000005"]
    assert not choice.is_best_lost


def test_a_checkpoint_of_another_step_or_of_before_manifests(out: Path) -> None:
    run, old = RunDirectory(out), out / "checkpoints/step-000004"
    (old / MANIFEST).unlink()
    assert problem(old) is None
    (old / STATE).write_text(json.dumps({"step": 4, "best": 1.0, "format": 2}))
    assert "format 2" in problem(old)
    (old / STATE).write_text(json.dumps({"step": True, "best": 1.0}))
    assert "no step" in problem(old)
    with pytest.raises(CheckpointError, match="trainer's state cannot be read .* go on with"):
        load_training_state(old)
    shutil.rmtree(old)
    run.checkpoint_path(5).rename(old)
    assert problem(old) == f"{STATE}: it is of step 5"


@pytest.mark.parametrize(
    "text", ["", "checkpoints/../../x\n", "\0" * 20, "checkpoints/step-000009"]
)
def test_damaged_pointers(out: Path, text: str) -> None:
    (out / "latest").write_text(text)
    (out / "best").write_text(text)
    choice = choose(RunDirectory(out))
    assert choice.checkpoint.name == "step-000005" and choice.is_best_lost


def test_without_any_whole_checkpoint(place: Path, out: Path) -> None:
    for path in RunDirectory(out).checkpoints():
        flip(path / STATE_TENSORS)
    message = "step-000005: .*differs; step-000004: .*--out"
    with pytest.raises(CheckpointError, match=message):
        run(place, out, resume=True)
    assert best_of(RunDirectory(out)).name == "step-000004"  # a student needs no trainer's state
    for path in RunDirectory(out).checkpoints():
        flip(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        best_of(RunDirectory(out))


def test_a_damaged_best_one(place: Path, out: Path, caplog) -> None:
    flip(out / "checkpoints/step-000004/model.safetensors")
    assert best_of(RunDirectory(out)).name == "step-000005"
    assert "step-000004 is damaged (model.safetensors: SHA-256 differs); taking" in caplog.text
    report = run(place, out, resume=True)
    assert "the best is sought anew" in caplog.text
    assert RunDirectory(out).pointed("best").name == "step-000006" and report.best < 10


def test_a_damaged_best_one_of_a_run_that_is_over(place: Path, out: Path) -> None:
    done = RunDirectory(out)
    run(place, out, resume=True)
    done.point("best", done.checkpoint_path(5))
    flip(out / "checkpoints/step-000005/model.safetensors")
    report = run(place, out, resume=True)
    assert report.best < 10 and f"_{report.best:.2f}_" in report.final.name
    assert done.pointed("best").name == "step-000006"


def test_other_micro_batches_at_an_equal_global_batch(place: Path, whole, out: Path) -> None:
    report = run(place, out, resume=True, batch_size=2, grad_accum_steps=2)
    lines = read_json_lines(out / "metrics.jsonl")
    for ours, theirs in zip(lines, read_json_lines(whole[0] / "metrics.jsonl"), strict=True):
        assert ours["step"] == theirs["step"]
        if ours["kind"] == "train":
            assert ours["loss_nats"] == pytest.approx(theirs["loss_nats"], rel=1e-5)
    assert report.steps == 6


def test_what_a_run_does_not_go_on_with(place: Path, out: Path, tmp_path: Path) -> None:
    before = (out / "metrics.jsonl").read_bytes()
    message = r"sequences_per_step=2, but the run in \S+ was begun with 4: .* must stay what it was"
    with pytest.raises(ConfigError, match=message):
        run(place, out, resume=True, batch_size=2)
    other = tmp_path / "place"
    other.mkdir()
    (other / "cache").symlink_to(place / "cache")
    with pytest.raises(ConfigError, match="student='.*place/student', but the run in"):
        settings = config(place, save_every=1, eval_every=2)
        train_student(settings, str(other / "student"), out, resume=True)
    facts = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**facts, "tokenizer": "another"}))
    with pytest.raises(ConfigError, match="tokenizer=another, "):
        run(place, out, resume=True)
    for damaged in ("[]", "{", "[" * 9000, '{"resumed": 3}', '{"judged": [3]}', '{"forced": "a"}'):
        (out / "run.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"run.json is damaged"):
            run(place, out, resume=True)
    for damaged in ("[train]\nstudent = 3", "train = [1]", "train = 1", "train = []", "x"):
        (out / "recipe.toml").write_text(damaged)
        with pytest.raises(ConfigError, match="recipe.toml is not a run's recipe"):
            run(place, out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_run_without_its_facts_goes_on_with_nothing_else(
    place: Path, whole, out: Path, tmp_path: Path, caplog
) -> None:
    build(tmp_path / "other", documents=texts(seed=9))
    facts = out / "run.json"
    kept = facts.read_text()
    facts.unlink()
    message = r"cache_content=\w+, but the run in \S+ was begun with \w+: the cache was rebuilt"
    with pytest.raises(ConfigError, match=message):
        run(place, out, resume=True, cache_dir=tmp_path / "other")
    facts.write_text(json.dumps({**json.loads(kept), "cache_content": "another"}))
    with pytest.raises(ConfigError, match="cache_content=another, but .*step-000005"):
        run(place, out, resume=True, cache_dir=tmp_path / "other")
    facts.unlink()
    assert_same_end(whole, out, run(place, out, resume=True))
    assert "run.json is gone: what it said is taken from" in caplog.text
    found, known = json.loads(facts.read_text()), json.loads(kept)
    assert {name for name in known if found[name] != known[name]} == {"resumed"}


def test_other_code_is_said(place: Path, out: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    facts = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**facts, "torch": "1.0", "commit": "abc"}))
    run(place, out, resume=True)
    found = json.loads((out / "run.json").read_text())
    for name, old in {"torch": "1.0", "commit": "abc"}.items():
        assert found["resumed"][0]["changed"][name] == [old, facts[name]]
        assert f"goes on with {name}={facts[name]} instead of {old}" in caplog.text


def test_a_student_that_was_changed(tmp_path: Path) -> None:
    place = make_place(tmp_path, layers=1)
    crash(place, tmp_path / "run", 2)
    shutil.rmtree(place / "student")
    changed = tiny_quantized("qwen3", SPECS["lut4"])
    save_checkpoint(changed, tiny_tokenizer(), place / "student")
    message = "student_fingerprint=.* begun with .*: the student was changed since; restore it or"
    with pytest.raises(ConfigError, match=message):
        run(place, tmp_path / "run", resume=True)
    shutil.rmtree(place / "student")  # a run needs it no longer
    assert run(place, tmp_path / "run", resume=True).steps == 6


def test_a_run_without_checkpoints_is_not_begun_anew_unasked(
    place: Path, whole, tmp_path: Path, caplog
) -> None:
    out = tmp_path / "run"
    crash(place, out, 2, save_every=3, eval_every=3)
    for name in ("best", "latest"):  # killed while the first save was still being written
        (out / name).unlink()
    shutil.rmtree(out / "checkpoints")
    before = {path: path.read_bytes() for path in out.iterdir()}
    message = r"was stopped after step 2 and has no checkpoint, .*--out, or .*--resume auto.*-1$"
    with pytest.raises(CheckpointError, match=message):
        run(place, out, resume=True, save_every=3, eval_every=3)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    settings = config(place, save_every=3, eval_every=3)
    report = train_student(settings, str(place / "student"), out, resume=True, begins_anew=True)
    assert report.steps == 6 and "begins anew; what it recorded is kept in" in caplog.text
    aside = out / "attempt-1"
    for name in ("metrics.jsonl", "training.csv", "val.csv", "heartbeat-rank0.jsonl"):
        assert (aside / name).read_bytes() == before[out / name]


def test_two_runs_in_one_directory(place: Path, out: Path) -> None:
    with held(out), pytest.raises(ConfigError, match="is in use by process .* choose another"):
        run(place, out, resume=True)


def test_a_disk_that_is_full_in_the_end(place: Path, out: Path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")] * 2)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", full)
        message = r"writing stopped \(\[Errno 28\] No space left on device: 'b'\); nothing new was"
        with pytest.raises(CheckpointError, match=message):
            run(place, out, resume=True)
    assert run(place, out, resume=True).final.is_dir()


@pytest.mark.slow
def test_latent_weights_on_the_host_go_on_as_those_on_the_device(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "visiting", visiting)
    kept, whole = {"latent_dtype": "bf16", "weight_decay": 0.1}, tmp_path / "whole"
    report = run(place, whole, **kept)
    for name, before, after in (("a", "latents", "latents"), ("b", "none", "latents")):
        out = tmp_path / name
        crash(place, out, 3, offload=before, **kept)
        found = run(place, out, resume=True, offload=after, **kept)
        assert_same_end((whole, report), out, found)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-000006", "metrics.jsonl"])
def test_a_run_with_links_is_not_gone_on_with(place: Path, out: Path, name: str) -> None:
    private = out.parent / "private"
    if (out / name).exists():
        (out / name).rename(private)
    else:
        private.mkdir()
    before = sorted(private.rglob("*")), private.stat().st_mtime_ns
    (out / name).symlink_to(private)
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
        run(place, out, resume=True)
    assert before == (sorted(private.rglob("*")), private.stat().st_mtime_ns)
