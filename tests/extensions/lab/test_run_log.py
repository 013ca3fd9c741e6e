"""Entries of the log: filled from the run's own files, newest first, once a run."""

import json
from pathlib import Path

import pytest
from observe.synthetic import write_conversion, write_lines, write_run

from qat.cli.report import report
from qat.errors import CheckpointError, ConfigError
from qat.extensions.lab.run_log import append_entry, notes, train_command
from qat.logs import read_json_lines
from qat.observe.runs import read_directory
from qat.observe.summary import summary_of_run

RECIPE = """[train]
student = "checkpoints/q2"
cache_dir = "caches/c4"
learn = "scales"
loss = "tail"
temperature = 1.0
mlp_only = true
batch_size = 32
grad_accum_steps = 2
max_steps = 200
lr_scales = 0.02
schedule = "cosine"
seed = 3
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "runs" / "first")
    (path / "recipe.toml").write_text(RECIPE)
    facts = {
        "device": "NVIDIA H200",
        "commit": "0123456789abcdef",
        "torch": "2.11",
        "dtype": "bf16",
    }
    facts |= {"teacher": "Qwen3-0.6B", "cache_fingerprint": "feed", "learnable": 1234567}
    (path / "run.json").write_text(json.dumps(facts))
    beats = read_json_lines(path / "heartbeat-rank0.jsonl")
    write_lines(path / "heartbeat-rank0.jsonl", [{**beat, "mfu_frac": 0.4} for beat in beats])
    (path / "tracking").mkdir()
    (path / "tracking" / "trackio.json").write_text('{"id": "t1"}')
    (path / "tracking" / "wandb.json").write_text('{"id": "r1", "url": "w.example/r1"}')
    (path / "q2a4_mlp_0.20_bf16").mkdir()
    (path / "q2a4_mlp_0.20_bf16" / "config.json").write_text("{}")
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "LOG.md"
    path.write_text("# Log\n\n## Entries\n\n### 2020-01-01: old\n")
    return path


def test_an_entry_is_whole_and_above_the_older_ones(run: Path, log: Path) -> None:
    title = append_entry(log, run)
    text = log.read_text()
    assert text.startswith("# Log\n\n## Entries\n\n### 20")
    assert text.endswith("\n\n### 2020-01-01: old\n") and text.index(title) < text.index("old")
    assert title == "first: tail KL 1.10 to 0.274 nats in 200 steps"
    words = " ".join(text.split())
    for part in (
        "How close 200 steps bring `q2` to its teacher `Qwen3-0.6B`: `kl_tail_nats` on",
        "NVIDIA H200, peak 1.50 GiB, torch 2.11, commit 0123456789ab.",
        "scales learn (mlp), 1,234,567 values; loss tail at T = 1.0; 64 sequences a step",
        "64 sequences a step; lr_scales 0.02, cosine; bf16, seed 3.",
        f"**Command.** {train_command(run)}",
        "| ppl | hours | tokens | tokens/s |",
        "| before | 1.76 | 1.10 | 36.0 | - | - | - | - | - |",
        "| after, best step | 0.438 | 0.274 | 15.8 | 0.0212 | 687,314 | 9,0",
        "| 0.400 | 1.50 |",
        "q2a4_mlp_0.20_bf16`, trackio t1, wandb w.example/r1; no record.",
        "Best at step 200 of 200.",
    ):
        assert part in words, part
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 100


def test_a_run_without_a_first_evaluation_says_what_it_compares(run: Path, log: Path) -> None:
    lines = read_json_lines(run / "metrics.jsonl")
    write_lines(run / "metrics.jsonl", [line for line in lines if line["step"] > 0])
    append_entry(log, run)
    assert "| step 50 | " in log.read_text() and "| before | " not in log.read_text()
    summary = summary_of_run(run, read_directory(run))
    assert [result.name for result in summary.results] == ["step 50", "step 200"]


def test_a_run_is_logged_once_until_its_numbers_change(run: Path, log: Path) -> None:
    append_entry(log, run)
    before = log.read_text()
    with pytest.raises(ConfigError, match=r"first already \(see [0-9a-f]{12}\)"):
        append_entry(log, run)
    assert log.read_text() == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 201, "loss_nats": 0.2}) + "\n")
    append_entry(log, run)
    assert log.read_text().count("### ") == 3


def test_notes_tell_what_the_run_tells(run: Path) -> None:
    lines = read_json_lines(run / "metrics.jsonl")
    lines[3]["grad_norm"] = 0.0
    lines[-1]["codes_flipped_frac"] = 0.0123
    write_lines(
        run / "metrics.jsonl", [line for line in lines if line["step"] <= 150 or "kl" in line]
    )
    beat = {"step": 1, "tokens_per_s": 1.0, "fallback": "no\ncompiler", "recompiles": 2}
    write_lines(run / "heartbeat-rank0.jsonl", [beat])
    assert notes(read_directory(run), {"max_steps": 200}) == [
        "Best at step 150 of 150",
        "Stopped at step 150 of 200 that were asked for",
        "1 logged steps moved nothing (gradients overflowed)",
        "Layers ran as written: no compiler",
        "2 graphs were compiled again",
    ]


def test_the_verb_knows_the_command_and_the_log(run: Path, log: Path, monkeypatch) -> None:
    monkeypatch.setattr("qat.observe.page.run_charts", lambda runs: [])
    found = report(run, log=True, log_file=log)
    assert found["log"] == log and found["entries"] == [
        "first: tail KL 1.10 to 0.274 nats in 200 steps"
    ]
    assert train_command(run) == (
        "qat train checkpoints/q2 --cache-dir caches/c4 --learn scales --mlp-only --batch-size 32 "
        f"--grad-accum-steps 2 --max-steps 200 --lr-scales 0.02 --seed 3 --out {run}"
    )
    assert train_command(run) in log.read_text()


def test_what_cannot_be_logged(run: Path, log: Path, tmp_path: Path) -> None:
    conversion = write_conversion(tmp_path / "q2")
    with pytest.raises(CheckpointError, match="holds no run that was judged"):
        append_entry(log, conversion)
    with pytest.raises(ConfigError, match="log_file=.*nowhere.md is not there"):
        report(run, log=True, log_file=tmp_path / "nowhere.md", out=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    log.write_text("# Log\n")
    with pytest.raises(ConfigError, match="has no line '## Entries'"):
        append_entry(log, run)
