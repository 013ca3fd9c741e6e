"""The flagship from a model to its card, on a CPU, and what its script refuses before any work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qat.errors import is_installed

ROOT = Path(__file__).parents[2]
SIZES = {
    "ROWS": "24",
    "MAX_NEW_TOKENS": "24",
    "SAMPLE_BATCH": "8",
    "SEQUENCE_LENGTH": "128",
    "HELD_OUT": "0.2",
    "BATCH": "4",
    "LIMIT": "2",
}


def flagship(out: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    words = {"MODEL": "checkpoints/tiny-qwen3", "NAME": "tiny", "OUT": str(out), **settings}
    words["PYTHONPATH"] = str(ROOT)
    words["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "speedrun/flagship.sh"]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | words, capture_output=True, text=True, check=False
    )


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


@pytest.mark.slow
def test_from_a_model_to_its_card(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("gguf")
    out, questions = tmp_path / "out", tmp_path / "questions.jsonl"
    rows = [{"question": "One and one are", "choices": ["two", "ten"], "answer": n} for n in (0, 1)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        **SIZES,
        "CODE": "qat/quant",
        "SUITE": f"choice={questions}",
        "STUDENTS": "5.5",
        "FORMATS_5_5": "--to q4a4 --for gguf --calibration-sequences 4",
        "SEEDS": "0",
        "STEPS": "2",
    }
    found = flagship(out, **settings)
    assert found.returncode == 0, found.stderr
    card = (out / "README.md").read_text()
    assert "| 5.5, q4a4_gguf |" in card and (out / "exports/5.5/model.gguf").is_file()
    figures = [json.loads(x)["figure"] for x in (out / "figures.jsonl").read_text().splitlines()]
    assert {"tiny_kl_5.5", "training_share", "suite_minutes"} <= {*figures}
    made = {path: path.stat().st_mtime_ns for path in out.glob("results/*.json")}
    assert flagship(out, **settings).returncode == 0  # nothing is made again
    assert {path: path.stat().st_mtime_ns for path in out.glob("results/*.json")} == made
    (later,) = (
        x for x in (out / "README.md").read_text().splitlines() if x.startswith("| 5.5, q4")
    )
    assert later in card
