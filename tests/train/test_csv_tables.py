"""Tables and the summary of a run: the same numbers, and what the run came to."""

import csv
import json
from pathlib import Path

import pytest

from qat.logs import JsonLines
from qat.train.metrics import Metrics, write_summary


def step_line(step: int) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss_nats": 1 / (step + 2), "grad_norm": 0.1 + step}


def eval_line(step: int) -> dict[str, object]:
    verdict = {"kind": "eval", "step": step, "kl_tail_nats": 0.3, "sampled_ce_nats": None}
    later = {"codes_flipped_frac": 0.25} if step else {}
    return {**verdict, **later, "sample": "Return, \n the list."}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, *lines: dict[str, object]) -> None:
    metrics = Metrics(path)
    for line in lines:
        metrics.write(**line)
    metrics.close()


def test_a_table_holds_the_numbers_of_the_lines(tmp_path: Path) -> None:
    write(tmp_path, eval_line(0), step_line(1), step_line(2), eval_line(2))
    found = rows(tmp_path / "training.csv")
    assert [list(row) for row in found] == [["step", "loss_nats", "grad_norm"]] * 2
    assert [float(row["loss_nats"]) for row in found] == [1 / 3, 1 / 4]
    first, second = rows(tmp_path / "val.csv")
    assert first == {"step": "0", "kl_tail_nats": "0.3", "sampled_ce_nats": ""} | {
        "codes_flipped_frac": ""
    }
    assert second["codes_flipped_frac"] == "0.25" and "sample" not in second


def test_a_run_that_goes_on_ends_in_the_same_tables(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    lines = [eval_line(0), *map(step_line, range(1, 6)), eval_line(5)]
    whole.mkdir(), parts.mkdir()
    write(whole, *lines)
    write(parts, *lines[:3])
    with (parts / "training.csv").open("a") as file:
        file.write("9,0.5,")  # a row of a step that was lost, and half of it
    write(parts, *lines[3:])
    for name in ("metrics.jsonl", "training.csv", "val.csv"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


def test_tables_of_a_run_that_begins_anew_are_gone(tmp_path: Path) -> None:
    write(tmp_path, eval_line(0), step_line(1))
    (tmp_path / "metrics.jsonl").write_text("")
    Metrics(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def beat(step: int, elapsed_s: float, *, pid: int, peak_gib: float | None = 1.5) -> dict:
    line = {"step": step, "elapsed_s": elapsed_s, "pid": pid, "peak_gib": peak_gib}
    return {**line, "tokens_per_s": 100.0 + step, "step_s": 0.5}


def compiled(graphs: int) -> dict:
    """Return what a heartbeat of a process on XLA adds."""
    seconds = {"xla_compile_s": 2.0 * graphs, "step_compile_s": 1.0 * graphs}
    fallbacks = {"aten::nonzero": graphs}
    return {"xla_compiles": graphs, **seconds, "xla_executions": 10, "host_fallbacks": fallbacks}


def test_the_summary_adds_up_what_the_processes_did(tmp_path: Path) -> None:
    write(tmp_path, step_line(1), step_line(30))
    beats = [beat(10, 6.0, pid=1), beat(20, 11.0, pid=1), beat(30, 9.0, pid=2, peak_gib=2.0)]
    beats = [{**line, **compiled(graphs)} for line, graphs in zip(beats, (3, 4, 2), strict=True)]
    for name, lines in (
        ("heartbeat-rank0.jsonl", beats),
        ("events.jsonl", [{"kind": "stall"}, {"kind": "stall"}]),
        ("events-rank1.jsonl", [{"kind": "slow_rank"}]),
    ):
        file = JsonLines(tmp_path / name)
        for line in lines:
            file.write(**line)
        file.close()
    (tmp_path / "run.json").write_text(json.dumps({"commit": "0123abc", "world_size": 2}))
    found = write_summary(tmp_path, final=tmp_path / "q2a2_e2e_0.30_fp32", best=0.3, best_step=2)
    assert found == json.loads((tmp_path / "metrics.json").read_text())
    assert (found["steps"], found["first_loss_nats"], found["best_nats"]) == (30, 1 / 3, 0.3)
    assert found["wall_s"] == pytest.approx(20.0) and found["train_s"] == pytest.approx(15.0)
    assert found["tokens"] == 5 * (110 + 120 + 130) and found["tokens_per_s"] == 125.0
    assert found["peak_gib"] == 2.0 and found["final"] == "q2a2_e2e_0.30_fp32"
    assert {key: found[key] for key in compiled(0)} == {**compiled(6), "xla_executions": 20}
    assert found["events"] == {"slow_rank": 1, "stall": 2}
    assert (found["commit"], found["world_size"]) == ("0123abc", 2)
