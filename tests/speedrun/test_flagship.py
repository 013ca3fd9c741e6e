"""The flagship from a model to its card, on a CPU, and what its script refuses before any work."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from qat.data.cache import read_manifest
from qat.errors import is_installed
from qat.logs import read_json_lines

ROOT = Path(__file__).parents[2]
SIZES = {
    "ROWS": "24",
    "MAX_NEW_TOKENS": "24",
    "SAMPLE_BATCH": "4",
    "SEQUENCE_LENGTH": "128",
    "HELD_OUT": "0.2",
    "CACHE_FLAGS": "--top-k 64 --shard-size 1",
    "BATCH": "4",
    "STEPS": "6",
    "TRAIN_FLAGS": "--eval-sequences 1",
    "SAVE_EVERY": "2",
    "LIMIT": "2",
    "CODE": "qat/quant",
    "EXERCISES": "4",
    "SHARES": "functions:1",
    "STUDENTS": "5.5",
    "FORMATS_5_5": "--to q4a4 --for gguf --calibration-sequences 4",
}


def begin(out: Path, **settings: str) -> subprocess.Popen[str]:
    words = {"MODEL": "checkpoints/tiny-qwen3", "NAME": "tiny", "OUT": str(out), **settings}
    words["PYTHONPATH"] = str(ROOT)
    words["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "speedrun/flagship.sh"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | words, **pipes)


def flagship(out: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    with begin(out, **settings) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def once(path: Path, process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return all processes of the script as soon as it has made `path`."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    script = psutil.Process(process.pid)
    return [script, *script.children(recursive=True)]


def test_code_runs_only_where_that_is_allowed(tmp_path: Path) -> None:
    found = flagship(tmp_path / "out")
    assert found.returncode == 1 and "ALLOW_CODE_EXECUTION=1" in found.stderr
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    found = flagship(tmp_path / "out", SUITE="cloze=x", GSM8K=str(missing))
    assert found.returncode == 1 and str(missing) in found.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not is_installed("lm_eval"), reason="needs the extra eval")
def test_other_settings_are_refused_where_work_has_begun(tmp_path: Path) -> None:
    before = "STEPS=3\n"
    (tmp_path / "settings.sh").write_text(before)
    found = flagship(tmp_path, SUITE="cloze=x", STEPS="4")
    assert found.returncode == 1 and "STEPS=3" in found.stderr
    assert (tmp_path / "settings.sh").read_text() == before


@pytest.mark.skipif(not is_installed("lm_eval"), reason="needs the extra eval")
def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = flagship(tmp_path, SUITE="cloze=x")
    assert found.returncode == 1 and str(tmp_path) in found.stderr
    assert not (tmp_path / "settings.sh").exists()


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    for settings, named in (
        ({"STUDENTS": "2.5 9.9"}, "FORMATS_9_9"),
        ({"EXERCISES": "0"}, "EXERCISES=0"),
        ({"EXERCISES": "some"}, "EXERCISES=some"),
    ):
        found = flagship(tmp_path / "out", SUITE="cloze=x", **settings)
        assert found.returncode == 1 and named in found.stderr
        assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("lm_eval")
    pytest.importorskip("gguf")
    questions = tmp_path_factory.mktemp("suite") / "questions.jsonl"
    rows = [{"question": "One and one are", "choices": ["two", "ten"], "answer": n} for n in (0, 1)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**SIZES, "SUITE": f"choice={questions}"}


@pytest.fixture(scope="module")
def finished(settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flagship") / "out"
    found = flagship(out, **settings)
    assert found.returncode == 0, found.stderr
    return out


@pytest.mark.slow
def test_from_a_model_to_its_card(finished: Path, settings: dict[str, str]) -> None:
    out = finished
    card = (out / "README.md").read_text()
    assert "prompts/exercises.jsonl" in card and "4 answers" in card
    assert "| 5.5, q4a4_gguf |" in card and (out / "exports/5.5-0/model.gguf").is_file()
    found = {row["figure"]: row["value"] for row in read_json_lines(out / "figures.jsonl")}
    assert {"tiny_kl_5.5", "suite_minutes"} <= found.keys() and 0 < found["training_share"] < 1
    first, whole = (read_manifest(out / name).shards for name in ("first", "cache"))
    assert {*first} < {*whole}  # calibrated before all was cached
    made = {path: path.stat().st_mtime_ns for path in out.glob("results/*.json")}
    assert flagship(out, **settings).returncode == 0  # nothing is made again
    assert {path: path.stat().st_mtime_ns for path in out.glob("results/*.json")} == made
    (later,) = (
        x for x in (out / "README.md").read_text().splitlines() if x.startswith("| 5.5, q4")
    )
    assert later in card


def answers_in(out: Path) -> list[object]:
    return [row["messages"] for row in read_json_lines(out / "texts.jsonl")]


def kl_in(out: Path) -> list[float]:
    found = (json.loads(path.read_text()) for path in sorted(out.glob("results/kl-*.json")))
    return [each["kl_nats"] for each in found]


def lives(process: psutil.Process) -> bool:
    """Return whether it runs; one that ended may stay a zombie where nothing reaps orphans."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_what_was_killed_and_stopped_ends_with_the_same_students(
    finished: Path, settings: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with begin(out, **settings) as process:
        for each in once(out / ".texts.jsonl.shards/000000.jsonl", process):
            each.kill()
    with begin(out, **settings) as process:
        alive = once(out / "runs/5.5-0/checkpoints", process)
        process.terminate()
        assert process.wait() == 143
        assert not [each for each in alive if lives(each)]
    assert flagship(out, **settings).returncode == 0
    calls = [x["exit"] for x in read_json_lines(out / "log.jsonl") if x["name"] == "call"]
    assert calls == [137, 143, 0]
    said, kl = ([*map(of, (out, finished))] for of in (answers_in, kl_in))
    assert said[0] == said[1] and kl[0] == kl[1]
