"""`qat train --soak`: the first steps of a run, its verdict, and the run that goes on from them."""

import json
from pathlib import Path

import pytest
from cli_case import call
from observe.synthetic import write_lines, write_run
from train_case import config, flags

from qat.errors import ConfigError
from qat.extensions.lab.soak import judge
from qat.logs import read_json_lines
from qat.observe.health import Check
from qat.train.launch import LaunchConfig
from qat.train.start import train_student


@pytest.fixture
def calm(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "run")
    steady = {"mem_reserved_gib": 12.5, "alloc_retries": 0, "alloc_failures": 0}
    change(path, lambda _: {**steady, "recompiles": 0, "fallback": None, "plain_kernels": {}})
    return path


def change(path: Path, values) -> None:
    """Put `values(i)` into heartbeat number i."""
    file = path / "heartbeat-rank0.jsonl"
    beats = read_json_lines(file)
    write_lines(file, [{**beat, **values(number)} for number, beat in enumerate(beats)])


def states(path: Path, **bounds: float) -> dict[str, str]:
    return {check.name: check.state for check in judge(path, LaunchConfig(soak=150, **bounds))}


def test_a_calm_run_is_within_every_bound(calm: Path) -> None:
    found = states(calm, soak_reserved_gib=12.5, soak_tokens_per_s=8000)
    assert set(found.values()) == {"ok"}
    assert {"steps", "loss", "reserved memory", "tokens/s"} < set(found)
    assert {"stalls", "allocator retries", "compiler", "plain kernels"} < set(found)
    assert not {"speed", "over-fitting", "resumed", "GPU, hottest"} & set(found)


@pytest.mark.parametrize(
    ("name", "values", "bounds"),
    [
        ("reserved memory", {}, {"soak_reserved_gib": 12.4}),
        ("tokens/s", {}, {"soak_tokens_per_s": 9500}),
        ("allocator retries", {"alloc_retries": 1}, {}),
        ("compiler", {"fallback": "no compiler"}, {}),
        ("plain kernels", {"plain_kernels": {"lut_weight": 3}}, {}),
        ("on the host", {"host_fallbacks": {"aten::sort": 1}}, {}),
    ],
)
def test_what_lies_beyond_its_bound_fails_alone(calm: Path, name, values, bounds) -> None:
    change(calm, lambda _: values)
    found = states(calm, **bounds)
    assert [each for each, state in found.items() if state == "bad"] == [name]


def test_memory_is_that_of_the_rank_with_most(calm: Path) -> None:
    other = [{"step": 150, "tokens_per_s": 9000.0, "mem_reserved_gib": 30.0}]
    write_lines(calm / "heartbeat-rank1.jsonl", other)
    assert states(calm, soak_reserved_gib=20)["reserved memory"] == "bad"
    assert states(calm, soak_reserved_gib=30)["reserved memory"] == "ok"
    (calm / "heartbeat-rank1.jsonl").unlink()
    change(calm, lambda _: {"mem_reserved_gib": None})
    assert "reserved memory" not in states(calm)
    assert states(calm, soak_reserved_gib=20)["reserved memory"] == "bad"  # it cannot be known


def test_stalls_few_steps_and_a_loss_that_stays_fail(calm: Path) -> None:
    write_lines(calm / "events.jsonl", [{"kind": "stall", "step": 20}])
    assert states(calm)["stalls"] == "bad"
    steps = judge(calm, LaunchConfig(soak=500))[0]
    assert steps == Check("steps", "bad", "191", "500")
    write_lines(calm / "events.jsonl", [{"kind": "halted", "step": 500}])  # which is not logged
    assert judge(calm, LaunchConfig(soak=500))[0] == Check("steps", "ok", "500", "500")
    metrics = read_json_lines(calm / "metrics.jsonl")
    write_lines(calm / "metrics.jsonl", metrics[::-1])
    assert states(calm)["loss"] == "bad"
    write_lines(calm / "metrics.jsonl", metrics[:3])
    assert states(calm)["loss"] == "bad"


def test_bounds_without_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="soak_reserved_gib=40, .*without soak, expected its st"):
        LaunchConfig.parse({"soak_reserved_gib": 40}, "flags")


def test_a_soaked_run_goes_on_to_the_end_of_an_unbroken_one(
    place: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    values = {"max_steps": 6, "lr": 0.05, "warmup_steps": 0}
    report = train_student(config(place, **values), str(place / "student"), whole, resume=False)
    words = ["train", place / "student", *flags(place, **values), "--out", out]
    assert call(monkeypatch, *words, "--soak", 5, "--soak-tokens-per-s", 1) == 0
    shown = capsys.readouterr().out
    assert "Soak of 5 steps" in shown and json.loads(shown.splitlines()[-1]) == {"run": str(out)}
    assert (out / "latest").read_text() == "checkpoints/step-000005\n"
    # the same steps can be judged by other bounds, and none is added
    assert call(monkeypatch, *words, "--resume", "--soak", 4, "--soak-tokens-per-s", 1e12) == 1
    assert (out / "latest").read_text() == "checkpoints/step-000005\n"
    capsys.readouterr()
    assert call(monkeypatch, *words, "--resume") == 0
    final = Path(json.loads(capsys.readouterr().out.splitlines()[-1])["final"])
    files = [folder / "model.safetensors" for folder in (final, report.final)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_broken_bound_is_one_line_and_keeps_the_checkpoint(
    place: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    words = ["train", place / "student", *flags(place, max_steps=6, lr=0.05), "--out", out]
    assert call(monkeypatch, *words, "--soak", 4, "--soak-tokens-per-s", 1e12) == 1
    shown = capsys.readouterr()
    line = shown.err.strip().splitlines()[-1]
    assert line.startswith("qat: ") and "expected at least 1e+12: mend it" in line
    assert json.loads(shown.out.splitlines()[-1]) == {"run": str(out)}
    assert (out / "latest").read_text() == "checkpoints/step-000004\n"
    for soak, found in ((7, "is more than max_steps=6"), (3, "logs 3 losses with log_every=1")):
        assert call(monkeypatch, *words[:-1], tmp_path / "none", "--soak", soak) == 1
        assert f"soak={soak} {found}, expected" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
