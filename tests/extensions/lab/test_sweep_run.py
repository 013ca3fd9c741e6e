"""Sweeps that run: what fails costs only itself, and what is finished is never done again."""

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_case import call
from train_case import make_place

from qat.errors import ConfigError, TrainingError
from qat.extensions.bench.config import SweepConfig
from qat.extensions.lab import jobs
from qat.extensions.lab.sweep import run as sweep_run
from qat.extensions.lab.sweep.job import run_job
from qat.extensions.lab.sweep.manifest import FORMAT
from qat.extensions.lab.sweep.run import MANIFEST, PAGE, PICTURE, plan_sweep, run_sweep
from qat.logs import read_json_lines

FOLDER = Path(__file__).parents[3] / "speedrun" / "recipes"
RECIPES = [path for path in sorted(FOLDER.glob("sweep_*.toml")) if not path.stem.endswith("_ranks")]
"""Recipes that run in one process."""
COMMAND = """
name = "{name}"
verb = "command"
command = ["{{python}}", "-S", "-c", "import time, sys; print('said'); {{code}}"]
repeats = {repeats}
timeout_s = {timeout_s}
stop_on_error = {stop}
"""
ALLOWED = SweepConfig(allow_command=True)
GROUP = '[[groups]]\nname = "{name}"\nsettings = {{ code = "{code}" }}\n'


def write(place: Path, codes: dict[str, str], **values: object) -> Path:
    settings = {"name": "s", "repeats": 1, "timeout_s": 60, "stop": "false", **values}
    path = place / "r.toml"
    groups = [GROUP.format(name=name, code=code) for name, code in codes.items()]
    path.write_text(COMMAND.format(**settings) + "".join(groups))
    return path


def statuses(out: Path) -> list[str]:
    return [run["status"] for run in json.loads((out / MANIFEST).read_text())["runs"]]


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    """Run the jobs without the second that a process takes to start."""

    def run_all(runs, lock, after_each, *, stop_on_error: bool, **_) -> None:
        for run in runs:
            if run.row.exists():
                continue
            run.failure.unlink(missing_ok=True)
            try:
                run_job(run)
                has_failed = False
            except TrainingError as error:
                run.log.parent.mkdir(parents=True, exist_ok=True)
                run.log.write_text(f"qat: {error}\n")
                has_failed = sweep_run.note_end(jobs.Ended(run, 1, is_late=False), 0.0)
            after_each()
            if has_failed and stop_on_error:
                return

    monkeypatch.setattr(sweep_run, "run_all", run_all)


def test_a_crash_costs_only_itself_and_runs_again(tmp_path: Path, in_this_process) -> None:
    recipe, out = write(tmp_path, {"bad": "sys.exit(3)", "good": "pass"}), tmp_path / "out"
    report = run_sweep(ALLOWED, recipe, out)
    assert statuses(out) == ["failed", "done"] and report.waiting == 0
    with pytest.raises(TrainingError, match="1 of 2 runs failed.*'bad'.*status 3.*expected 0"):
        report.check()
    page = (out / PAGE).read_text()
    assert "Not ranked, for fewer than 3 finished repeats: bad, good." in page
    assert "Failed: bad: " in page and (out / PICTURE).read_text().startswith("<?xml")
    (row,) = read_json_lines(out / "results.jsonl")
    assert row["case"] == "good" and row["samples"][0] > 0 and row["telemetry"]["rss_mib"] is None
    before = next((out / "rows").iterdir()).stat().st_mtime_ns
    write(tmp_path, {"bad": "pass", "good": "pass"})
    assert run_sweep(ALLOWED, recipe, out).failures == []
    assert before in {path.stat().st_mtime_ns for path in (out / "rows").iterdir()}


def test_a_sweep_says_where_it_comes_from(
    tmp_path: Path, in_this_process, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    recipe, out = tmp_path / "r.toml", tmp_path / "out"
    recipe.write_text('name = "r"\nstudent = "tiny"\nrepeats = 1\n[product]\nbatch_size = [1, 2]\n')
    words = ["bench", "sweep", recipe, "--out", out]
    for change in ("device=cpu", "steps=3", "warmup=1", "seq_len=8"):
        words += ["--set", f"settings.{change}"]
    assert call(monkeypatch, *words) == 0
    whole = json.loads((out / MANIFEST).read_text())
    assert whole["format"] == FORMAT and whole["devices"] == {"cpu": 1}
    (session,) = whole["sessions"]
    rows = read_json_lines(out / "results.jsonl")
    assert {row["commit"] for row in rows} == {session["commit"]}
    assert (
        session["variables"]["NCCL_DEBUG"] == "WARN" and session["torch"] and session["gpus"] == 0
    )
    assert "--set settings.steps=3" in session["command"] and session["dirty"] in (
        True,
        False,
        None,
    )
    page = (out / PAGE).read_text()
    assert session["commit"] in page and "NCCL_DEBUG=WARN" in page and "steps = 3" in page
    for entry in whole["runs"]:
        assert set(entry["files"]) == {"row"} and f"({entry['files']['row']})" in page
        assert (out / entry["files"]["row"]).exists()
    with (out / "results.csv").open() as file:
        table = [*csv.DictReader(file)]
    assert [row["settings.batch_size"] for row in table] == ["1", "2"]
    assert float(table[0]["step_max_s"]) == max(rows[0]["samples"])
    step, seconds = rows[0]["slowest_steps"][0]
    assert rows[0]["samples"][step] == seconds
    # a sweep that had nothing left to run was made by the sessions before
    assert call(monkeypatch, *words) == 0
    assert len(json.loads((out / MANIFEST).read_text())["sessions"]) == 1


def test_stop_on_error_leaves_the_rest_waiting(tmp_path: Path, in_this_process) -> None:
    recipe = write(tmp_path, {"bad": "sys.exit(3)", "good": "pass"}, stop="true")
    report = run_sweep(ALLOWED, recipe, tmp_path / "out")
    assert statuses(tmp_path / "out") == ["failed", "waiting"] and report.waiting == 1
    assert "1 runs have not run yet." in (tmp_path / "out" / PAGE).read_text()


def test_three_repeats_are_ranked_against_the_baseline(
    tmp_path: Path, in_this_process, monkeypatch, capsys
) -> None:
    recipe = write(tmp_path, {"slow": "time.sleep(0.2)", "quick": "pass"}, repeats=3)
    words = ["bench", "sweep", recipe, "--allow-command", "--out", tmp_path / "out"]
    assert call(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    assert last["fastest"] == "quick" and last["done"] == 6 and last["rate"] > 5
    assert "slow" in printed and "faster" in (tmp_path / "out" / PAGE).read_text()


def test_a_dry_run_names_the_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    recipe = write(tmp_path, {"a": "pass", "b": "pass"}, repeats=2)
    words = ["bench", "sweep", recipe, "--dry-run", "--out", tmp_path / "out"]
    assert call(monkeypatch, *words) == 0
    assert capsys.readouterr().out.splitlines()[:4] == ["0  a", "0  b", "1  a", "1  b"]
    assert call(monkeypatch, *words, "--set", "repeats=1", "--set", "product.steps=[1,2]") == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["0  a steps=1", "0  a steps=2"]
    assert not (tmp_path / "out").exists()


def test_a_directory_belongs_to_one_sweep_at_a_time(
    tmp_path: Path, in_this_process, monkeypatch
) -> None:
    out = tmp_path / "out"
    run_sweep(ALLOWED, write(tmp_path, {"a": "pass"}), out)
    with pytest.raises(ConfigError, match="holds sweep 's', expected 'other' or an empty"):
        run_sweep(ALLOWED, write(tmp_path, {"a": "pass"}, name="other"), out)
    monkeypatch.setattr(jobs, "PATIENCE_S", 0.05)
    with (out / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use by another sweep, expected one at a time"):
            run_sweep(ALLOWED, write(tmp_path, {"a": "pass"}), out)


@pytest.mark.slow
def test_a_hang_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    codes = {"hang": "time.sleep(600)", "good": "pass", "bad": "sys.exit(3)"}
    recipe, out = write(tmp_path, codes, timeout_s=6), tmp_path / "out"
    report = run_sweep(ALLOWED, recipe, out)
    assert statuses(out) == ["timeout", "done", "failed"]
    assert "no end after 6 s" in report.failures[0]["message"]
    log = Path(report.failures[0]["log"]).read_text()
    assert "said" in log and "run_command" in log  # its words, and where it stood
    (row,) = report.rows
    assert row["telemetry"]["rss_mib"] > 0
    assert "status 3, expected 0" in report.failures[1]["message"]


def test_a_program_runs_only_where_somebody_allowed_it(tmp_path: Path) -> None:
    recipe = write(tmp_path, {"a": "open('ran', 'w')"})
    with pytest.raises(ConfigError, match="runs the program '{python}'.*add --allow-command"):
        run_sweep(SweepConfig(), recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on(tmp_path: Path) -> None:
    recipe = write(tmp_path, {"a": "time.sleep(1)", "b": "pass"})
    _, runs = plan_sweep(SweepConfig(), recipe, tmp_path / "out")
    command = [sys.executable, "-m", "qat", "bench", "sweep", str(recipe)]
    command += ["--allow-command", "--out"]
    process = subprocess.Popen([*command, str(tmp_path / "out")], stderr=subprocess.DEVNULL)
    while not runs[0].log.exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert run_sweep(ALLOWED, recipe, tmp_path / "out").failures == []
    assert statuses(tmp_path / "out") == ["done", "done"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_committed_recipes_run_tiny(recipe: Path, tmp_path: Path, in_this_process) -> None:
    report = run_sweep(SweepConfig(tiny=True, strict=True), recipe, tmp_path / "out")
    assert len(report.rows) == len(report.runs) > 1 and report.failures == []
    assert all(line.rate > 0 and not line.is_ranked for line in report.lines)


@pytest.mark.slow
def test_two_ranks_take_steps_together(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'name = "r"\nstudent = "tiny"\nrepeats = 1\n[product]\nranks = [2]\n[settings]\n'
        'device = "cpu"\nsteps = 2\nwarmup = 2\nseq_len = 8\nbatch_size = 2\n'
        "shard_latents = true\n"
    )
    report = run_sweep(SweepConfig(strict=True), recipe, tmp_path / "out")
    assert report.failures == []
    (row,), (line,) = report.rows, report.lines
    assert row["ranks"] == 2 and row["positions"] == 2 * 2 * 8 and len(row["rank_work_s"]) == 2
    assert row["slowest_rank"] in (0, 1) and 0 < row["slowest_share"] <= 1.0
    assert row["tokens_per_s"] == pytest.approx(32 / row["step_s"])
    assert row["peak_reserved_gib"] is None and line.step_p90_s >= line.step_s
    assert line.slowest_share == row["slowest_share"]


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep_run, "devices", lambda _: ("cuda:0",))
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "r"\nstudent = "tiny"\n[product]\nranks = [1, 2]\n')
    with pytest.raises(ConfigError, match="has ranks=2, but this machine has 1 GPUs, expected on"):
        run_sweep(SweepConfig(), recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mistake_is_told_before_what_the_launcher_says(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "r"\nstudent = "tiny"\n[product]\nranks = [2]\n')
    _, (run, *_) = plan_sweep(SweepConfig(), recipe, tmp_path / "out")
    run.log.parent.mkdir(parents=True)
    said = {
        "qat: no such device\nRuntimeError: gone\n=====\n": "no such device",
        "x.OutOfMemoryError: full\nelastic.ChildFailedError: \n====\n": "x.OutOfMemoryError: full",
        "[rank1]: E.Error: full\nCompile with `DSA` to see.\n====\n": "E.Error: full",
        "=====\n": "=====",
    }
    for log, expected in said.items():
        run.log.write_text(log)
        assert jobs.Ended(run, 1, is_late=False).error_message == expected


def test_a_training_is_timed_by_its_heartbeats(tmp_path: Path, in_this_process) -> None:
    place, recipe = make_place(tmp_path / "place"), tmp_path / "r.toml"
    recipe.write_text(
        f'name = "t"\nverb = "train"\nstudent = "{place / "student"}"\nrepeats = 1\n'
        f'[settings]\ncache_dir = "{place / "cache"}"\ndevice = "cpu"\nmax_steps = 4\n'
        "log_every = 1\nbatch_size = 4\neval_sequences = 4\n[product]\nlr = [0.01, 0.02]\n"
    )
    report = run_sweep(SweepConfig(strict=True), recipe, tmp_path / "out")
    assert report.failures == [] and len(report.rows) == 2
    for row in report.rows:
        assert len(row["samples"]) == 3 and row["rank_step_s"] and row["slowest_rank"] == 0
        assert row["kl_nats"] > 0 and row["effective"]["compiled"] is False
    assert "tokens a second" in (tmp_path / "out" / PAGE).read_text()
