"""`qat run --stream`: three stages at once, and what happens if one of them dies."""

import json
import os
import signal
import threading
import time
import tomllib
from pathlib import Path

import pytest
from cache_case import TOKENIZER, texts
from tiny import tiny_model

from qat import files
from qat.cli import run_verb
from qat.data.cache import MANIFEST, read_manifest
from qat.errors import ConfigError, Stopped
from qat.extensions.streams import run as module
from qat.extensions.streams.run import Feeder, words_of
from qat.logs import read_json_lines

STEPS = 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, prompts, and a recipe for few of everything."""
    place = tmp_path_factory.mktemp("streamed")
    tiny_model(num_hidden_layers=1, initializer_range=0.1).save_pretrained(place / "model")
    TOKENIZER.save_pretrained(place / "model")
    rows = [json.dumps({"text": text}) for text in texts(100)]
    (place / "prompts.jsonl").write_text("\n".join(rows))
    (place / "recipe.toml").write_text(
        "[sample]\nshard_size = 20\nbatch_size = 10\nmax-new-tokens = 60\nraw = true\n"
        "[cache]\nshard_size = 4\nbatch_size = 1\n"
        "[convert]\ngroup_size = 16\ncalibration_sequences = 8\n"
        "[train]\nbatch_size = 4\neval_sequences = 4\neval_every = 10\nsave_every = 10\n"
    )
    return place


def go(place: Path, out: Path, **flags: object) -> dict[str, object]:
    known = {"data": place / "prompts.jsonl", "out": out, "max_steps": STEPS}
    few = {"sequence_length": 16, "device": "cpu", "dtype": "fp32", "for": "packed", "stream": True}
    words = words_of({**known, **few, **flags})
    tokens = ["run", str(place / "model"), *map(str, words)]
    return run_verb(tokens, place / "recipe.toml")


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    go(place, place / "finished")
    return place / "finished"


@pytest.mark.slow
def test_all_stages_are_made_and_none_twice(place: Path, finished: Path, monkeypatch) -> None:
    recipe = tomllib.loads((finished / "recipe.toml").read_text())
    assert recipe["train"]["order"] == "arrival" and recipe["cache"]["shard_size"] == 4
    assert len((finished / "answers.jsonl").read_text().splitlines()) == 100
    manifest = read_manifest(finished / "cache")
    assert manifest.state == "complete" and manifest.settings.data == str(
        finished / "answers.jsonl"
    )
    first = read_manifest(finished / "first")
    assert first.state == "complete" and set(first.shards) < set(manifest.shards)
    steps = [row["step"] for row in read_json_lines(finished / "trained/metrics.jsonl")]
    assert max(steps) == STEPS and (finished / "export/packed/config.json").is_file()
    monkeypatch.delattr(module, "Feeder")  # no process is needed any more
    before = (finished / "trained/metrics.jsonl").stat().st_mtime_ns
    go(place, finished)
    assert (finished / "trained/metrics.jsonl").stat().st_mtime_ns == before


def killed(out: Path, lock: str, when: Path, sign: signal.Signals) -> threading.Thread:
    """Kill the process that holds a lock in `out` once the file `when` is there."""

    def kill() -> None:
        while not when.is_file():
            time.sleep(0.005)
        os.kill(int((out / lock).read_text().split()[1]), sign)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "lock", "begun"),
    [
        ("sample", ".answers.jsonl.lock", ".answers.jsonl.shards/000000.jsonl"),
        ("cache", ".cache.lock", f"cache/{MANIFEST}"),
    ],
)
def test_a_stage_that_dies_is_named_and_goes_on(
    place: Path, finished: Path, tmp_path: Path, monkeypatch, stage: str, lock: str, begun: str
) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 1.0)
    out = tmp_path / "out"
    killer = killed(out, lock, out / begun, signal.SIGKILL)
    with pytest.raises(ConfigError, match=f"stage {stage}: its process was killed by signal 9"):
        go(place, out)
    killer.join()
    assert stage == "sample" or read_manifest(out / "cache").state == "building"
    assert stage == "cache" or not (out / "answers.jsonl").exists()
    go(place, out)
    assert (out / "answers.jsonl").read_bytes() == (finished / "answers.jsonl").read_bytes()
    ours, theirs = (read_manifest(each / "cache").shards for each in (out, finished))
    assert ours == theirs
    ours, theirs = (each / "trained/metrics.jsonl" for each in (out, finished))
    assert read_json_lines(ours) == read_json_lines(theirs)


@pytest.mark.slow
def test_a_stop_saves_the_step_and_leaves_no_process(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun = out / "trained/checkpoints/step-000010/config.json"
    stopper = killed(tmp_path, ".out.lock", begun, signal.SIGTERM)
    with pytest.raises(Stopped, match="here the same 'qat run' goes on"):
        go(place, out, max_steps=2000)
    stopper.join()
    assert (out / "trained/latest").is_file()
    assert not files.is_held(out / "cache") and not files.is_held(out / "answers.jsonl")


@pytest.mark.slow
def test_a_stop_before_training_leaves_no_process(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun = out / ".answers.jsonl.shards/settings.json"
    stopper = killed(tmp_path, ".out.lock", begun, signal.SIGTERM)
    with pytest.raises(Stopped, match="stopped by SIGTERM; the same command goes on") as stopped:
        go(place, out)
    stopper.join()
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert begun.is_file() and not files.is_held(out / "answers.jsonl")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_a_verb_that_refuses_gives_its_last_line(place: Path) -> None:
    feeder = Feeder("sample", place / "nothing", "--out", place / "a.jsonl", "--rows", 4)
    while feeder.is_running:
        time.sleep(0.05)
    with pytest.raises(ConfigError, match=f"stage sample: .*{place}/nothing"):
        feeder.check()
    feeder.stop()


def test_what_is_wired_cannot_be_set(place: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[sample]\nout = "x.jsonl"\n')
    words = ["--data", place / "prompts.jsonl", "--out", tmp_path / "out", "--stream"]
    tokens = ["run", place / "model", *words]
    with pytest.raises(ConfigError, match=r"\[sample\] out is for 'qat run' itself to say"):
        run_verb([*map(str, tokens)], tmp_path / "recipe.toml")
    assert not (tmp_path / "out").exists()
