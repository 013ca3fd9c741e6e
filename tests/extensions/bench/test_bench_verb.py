"""`qat bench` from the command line: a table, files that a machine reads, one line per mistake."""

import csv
import json
from pathlib import Path

import pytest
import torch
from cli_case import call

from qat.backend import device as backend
from qat.errors import ConfigError
from qat.extensions.bench.config import CPU_SHAPE, BenchConfig
from qat.extensions.bench.measure import NumberedBatches
from qat.extensions.bench.results import IN_EVERY_ROW, Results
from qat.extensions.bench.run import SAFE_SHARE, run_bench
from qat.extensions.bench.verb import _student
from qat.logs import read_json_lines

QUICK = ["--device", "cpu", "--steps", "2", "--warmup", "1"]


def test_a_table_a_fit_and_predictions(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "out"
    tokens = ["tiny", *QUICK, "--batch-sizes", "1,8,32", "--plan", "t4,h200", "--seq-len", "8"]
    assert call(monkeypatch, "bench", *tokens, "--out", str(out)) == 0
    printed = capsys.readouterr().out
    for word in ("Batch", "Step(s)", "Memory", "t/s", "Loss", "Status", "MFU", "synthetic"):
        assert word in printed
    assert "PREDICTED, not measured" in printed and "H200" in printed
    last = json.loads(printed.splitlines()[-1])
    assert last["out"] == str(out) and last["batch_size"] in (1, 8, 32)
    rows = read_json_lines(out / "results.jsonl")
    assert [row["kind"] for row in rows] == ["step"] * 3 + ["predicted"] * 2
    for row in rows[3:]:
        low, high = row["tokens_per_s_low"], row["tokens_per_s_high"]
        assert low < row["tokens_per_s"] < high
        assert f"{row['tokens_per_s']:,.0f} ({low:,.0f} to {high:,.0f})" in printed
    assert {row["loss_nats"] is None for row in rows[:3]} == {False}
    assert [row["case"] for row in rows[:3]] == [f"step, batch {size}" for size in (1, 8, 32)]
    assert [len(row["samples"]) for row in rows[:3]] == [2] * 3
    for row in rows:
        assert row["commit"] and row["device"] == "cpu" and row["student"] == "tiny"
    with (out / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["batch_size"] for row in table[:3]] == ["1", "8", "32"]
    whole = json.loads((out / "results.json").read_text())
    assert whole["environment"]["command"].startswith("qat bench tiny --device cpu")
    assert whole["environment"]["config"]["steps"] == 2 and len(whole["rows"]) == 5
    assert whole["environment"]["torch"] == torch.__version__


def test_a_packed_checkpoint_and_real_batches(place: Path, tmp_path: Path, monkeypatch, capsys):
    tokens = [str(place / "student"), "--cache-dir", str(place / "cache"), *QUICK]
    assert (
        call(monkeypatch, "bench", *tokens, "--batch-size", "4", "--out", str(tmp_path / "out"))
        == 0
    )
    row = read_json_lines(tmp_path / "out" / "results.jsonl")[0]
    assert row["data"].startswith("cache ") and row["seq_len"] == 16 and row["positions"] == 64
    assert row["valid_tokens_per_s"] < row["tokens_per_s"]
    assert "data: cache" in capsys.readouterr().out


def test_nothing_learns_while_it_is_measured(tmp_path: Path) -> None:
    values = {"device": "cpu", "warmup": 1, "seq_len": 8, "batch_size": 2}
    losses = [
        run_bench(BenchConfig(**values, steps=steps), "tiny", tmp_path / str(steps)).rows[0]
        for steps in (1, 4)
    ]
    assert losses[0]["loss_nats"] == losses[1]["loss_nats"]


@pytest.mark.slow
def test_the_largest_batch_of_a_small_machine(tmp_path: Path, place: Path) -> None:
    held = backend.select("cpu").memory_use().held_gib
    config = BenchConfig(
        device="cpu",
        cache_dir=place / "cache",  # of few sequences: they repeat
        find_max_batch=True,
        memory_limit=f"{held + 0.5:.3f}GiB",
        batch_sizes="16,256,40000,80000",
        steps=1,
        warmup=1,
    )
    report = run_bench(config, str(place / "student"), tmp_path / "out")
    assert report.search.largest in (16, 256)
    assert set(report.search.confirmed) >= {report.search.largest, report.search.fastest}
    tried = [row for row in report.rows if row["kind"] == "trial" and row["status"] == "OK"]
    assert all(row["step_s"] > 0 and row["tokens_per_s"] > 0 for row in tried)
    assert all(row["loss_nats"] > 0 and row["error"] is None for row in tried)
    failed = [row for row in report.rows if row["status"] == "OOM"]
    assert failed and all("llocate" in row["error"] for row in failed)  # the allocator's own words
    assert {row["batch_size"] for row in report.rows} <= {16, 256, 40000, 80000}
    by_size = {trial.batch_size: trial.fits for trial in report.search.trials}
    assert by_size[40000] is False
    assert report.rows[-1]["status"] == "MAX"
    assert report.rows[-1]["batch_size"] == report.search.largest


def test_a_plan_stays_within_the_memory_of_a_machine(tmp_path: Path, monkeypatch) -> None:
    cpu = backend.select("cpu")
    free = (cpu.memory_use().held_gib + 0.4) / SAFE_SHARE
    monkeypatch.setattr(type(cpu), "memory_gib", lambda _: free)
    config = BenchConfig(device="cpu", batch_size=2048, steps=1, warmup=1, plan="t4")
    with pytest.raises(ConfigError, match="batch_size=2048 does not fit into memory; lower --bat"):
        run_bench(config, "tiny", tmp_path / "out")


@pytest.mark.slow
def test_a_plan_without_room_needs_no_run(tmp_path: Path, monkeypatch, capsys, caplog) -> None:
    """A CPU's own speed counts for nothing in what the rates say of a card: the same is said."""
    tokens = ["tiny", *QUICK, "--plan", "h100,t4", "--batch-size", "512", "--seq-len", "8"]
    tokens += ["--grad-accum-steps", "2"]
    assert call(monkeypatch, "bench", *tokens, "--out", str(tmp_path / "run")) == 0
    assert "memory model" in capsys.readouterr().out
    *_, h100, t4 = read_json_lines(tmp_path / "run" / "results.jsonl")
    cpu = backend.select("cpu")
    monkeypatch.setattr(type(cpu), "memory_gib", lambda _: 1e-4)
    assert call(monkeypatch, "bench", *tokens, "--out", str(tmp_path / "none")) == 0
    rows = read_json_lines(tmp_path / "none" / "results.jsonl")
    assert [row["kind"] for row in rows] == ["predicted"] * 2
    for row, same in zip(rows, (h100, t4), strict=True):
        assert row["on"] == same["on"] and row["batch_size"] is None
        assert row["tokens_per_s"] == same["tokens_per_s"]
        assert row["parameters"] == same["parameters"]
    printed = capsys.readouterr().out
    assert "without a run" in printed and "Step(s)" not in printed
    assert json.loads(printed.splitlines()[-1]) == {"out": str(tmp_path / "none")}
    assert "GiB can be had here: other devices are predicted without a run" in caplog.text
    assert call(monkeypatch, "bench", "tiny", *QUICK, "--out", str(tmp_path / "no")) == 1
    assert (
        call(monkeypatch, "bench", *tokens, "--find-max-batch", "--out", str(tmp_path / "no")) == 1
    )
    error = capsys.readouterr().err
    assert error.count("GiB beside its batch, but 0.0001 GiB can be had here; learn less") == 2


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_a_row_beside_those_that_do(monkeypatch, tmp_path) -> None:
    from qat.extensions.bench.run import Setting

    real = Setting.numbered_batches

    def full(setting: Setting, batch_size: int) -> NumberedBatches:
        if batch_size > 2:
            raise torch.OutOfMemoryError("full")
        return real(setting, batch_size)

    monkeypatch.setattr(Setting, "numbered_batches", full)
    values = {"device": "cpu", "warmup": 1, "steps": 1, "seq_len": 8}
    report = run_bench(BenchConfig(**values, batch_sizes="2,4"), "tiny", tmp_path / "a")
    assert [row["status"] for row in report.rows] == ["OK", "OOM"]
    with pytest.raises(ConfigError, match="batch_size=4 does not fit into memory; lower --batch-"):
        run_bench(BenchConfig(**values, batch_size=4), "tiny", tmp_path / "b")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--shape", "nope"], "student=nope is neither a model directory nor a shape; name a che"),
        (["tiny", "--shape", "tiny"], "student=tiny beside shape=tiny, expected one of them; drop"),
        (["tiny", "--batch-size", "0"], "batch_size='0': Input should be greater than 0"),
        (["tiny", "--batch-sizes", "0,8"], "batch_sizes='0,8': expected whole numbers of at lea"),
        (["tiny", "--memory-limit", "16"], "memory_limit='16': expected a size with its unit; w"),
        (["tiny", "--dtype", "tf32"], "dtype=tf32, but cpu has no such units; use --dtype fp32"),
        (["tiny", "--cache-dir", "CACHE", "--seq-len", "64"], "--seq-len 64, but"),
        (["STUDENT", "--cache-dir", "CACHE", "--batch-size", "999"], "batch_size=999 x grad_ac"),
        (["tiny", "--out", "CACHE"], "is not empty, expected a new or empty directory"),
    ],
)
def test_a_mistake_is_one_line(tokens, message, place: Path, monkeypatch, capsys) -> None:
    paths = {"CACHE": str(place / "cache"), "STUDENT": str(place / "student")}
    tokens = [paths.get(token, token) for token in tokens]
    assert call(monkeypatch, "bench", *tokens, "--device", "cpu") == 1
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("qat: ")]
    assert len(lines) == 1 and message in lines[0]


def test_nothing_is_written_before_the_first_row(tmp_path: Path) -> None:
    identity = dict.fromkeys(IN_EVERY_ROW, "x")
    with Results(tmp_path / "out", identity) as results:
        assert not (tmp_path / "out").exists()
        results.add(case="ours")
    assert (tmp_path / "out" / "results.jsonl").read_text().count("\n") == 1


def test_alone_on_a_cpu_it_measures_a_shape_that_takes_seconds() -> None:
    assert _student(None, BenchConfig(device="cpu")) == CPU_SHAPE == "tiny"
    assert _student(None, BenchConfig(device="cpu", plan=True)) == "qwen3-0.6b"
    assert _student(None, BenchConfig(device="cpu", shape="llama-3.2-1b")) == "llama-3.2-1b"


def test_a_misspelt_verb_behind_a_student_is_named(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "bench", "swep", "x.toml") == 1
    assert "did you mean 'qat bench sweep'?" in capsys.readouterr().err
