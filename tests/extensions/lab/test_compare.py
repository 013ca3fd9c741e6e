"""`qat bench compare`: its exit codes, what it refuses, and what stands in its table."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli_case import call

from qat.errors import ComparisonError
from qat.extensions.lab.compare import compare_files, read_cases

FACTS = {"kind": "step", "case": "step, batch 8", "device": "NVIDIA H200", "dtype": "bf16"}
SHAPES = {
    "student": "tiny",
    "seq_len": 16,
    "batch_size": 8,
    "unit": "s",
    "host": "a",
    "commit": "1",
}


def row(mean: float = 1.0, n: int = 20, seed: int = 0, **facts: object) -> dict[str, object]:
    samples = np.random.default_rng(seed).normal(mean, 0.004 * mean, n).tolist()
    return {**FACTS, **SHAPES, "samples": samples, **facts}


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return write(tmp_path / "a" / "results.jsonl", row())


@pytest.mark.parametrize(
    ("mean", "flags", "code", "verdict"),
    [
        (1.0, [], 0, "same"),
        (1.02, [], 0, "same"),
        (1.05, [], 1, "regression"),
        (1.05, ["--threshold", "0.1"], 0, "same"),
        (0.9, [], 0, "same"),
    ],
)
def test_the_exit_code_is_the_verdict(
    mean, flags, code, verdict, before, tmp_path, monkeypatch, capsys
) -> None:
    after = write(tmp_path / "b.jsonl", row(mean, seed=1, commit="2"))
    assert call(monkeypatch, "bench", "compare", before.parent, after, *flags) == code
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    assert last["verdict"] == verdict
    assert last["ratios"]["step, batch 8"] == pytest.approx(mean, rel=0.01)
    for word in ("Ratio", "Effect", "CV before", "Verdict", "variation between cases", "1 host"):
        assert word in printed
    assert "differs in commit: 1 and 2" in printed and "fewer than 3 runs a side" in printed


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"batch_size": 16}, "batch_size: 8 and 16"),
        ({"shape": {"T": 64}}, "shape: None and {'T': 64}"),
        ({"device": "NVIDIA A100"}, "device: NVIDIA H200 and NVIDIA A100"),
        ({"dtype": "fp32"}, "dtype: bf16 and fp32"),
        ({"unit": "us"}, "unit: s and us"),
        ({"size": {"T": 9}}, "size: None and {'T': 9}"),
        ({"samples": [1.0, 1.1]}, "2 samples, at least 3 are needed"),
    ],
)
def test_what_is_not_alike_is_not_compared(facts, reason, before, tmp_path, monkeypatch, capsys):
    after = write(tmp_path / "b.jsonl", {**row(2.0), **facts})
    assert compare_files(before, after).pairs[0].reason == reason
    assert call(monkeypatch, "bench", "compare", before, after) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == "not comparable"


def test_two_cpus_are_two_devices(tmp_path: Path) -> None:
    on_cpu = {"device": "cpu", "cpu": "Xeon", "threads": 2}
    a = write(tmp_path / "a.jsonl", row(**on_cpu))
    b = write(tmp_path / "b.jsonl", row(**{**on_cpu, "cpu": "EPYC"}))
    c = write(tmp_path / "c.jsonl", row(**{**on_cpu, "threads": 1}))
    assert compare_files(a, b).pairs[0].reason == "cpu: Xeon and EPYC"
    assert compare_files(a, c).pairs[0].reason == "threads: 2 and 1"
    assert compare_files(a, a).exit_code == 0


def test_a_case_that_is_gone_is_not_the_same_but_a_new_one_may_be(before, tmp_path) -> None:
    both = write(tmp_path / "b.jsonl", row(), row(case="other"))
    assert compare_files(before, both).exit_code == 0
    gone = compare_files(both, before)
    assert gone.gone == ("other",) and gone.exit_code == 2
    slower = write(tmp_path / "c.jsonl", row(1.2))
    assert compare_files(both, slower).exit_code == 1  # a regression is one whatever else is gone


def test_three_runs_are_judged_by_their_medians(tmp_path: Path) -> None:
    """Each run repeats itself within 0.4 %; runs differ by 10 %, on two hosts."""
    means = (1.0, 1.1, 1.05)
    a = write(tmp_path / "a.jsonl", *(row(mean, seed=i) for i, mean in enumerate(means)))
    b = write(tmp_path / "b.jsonl", *(row(mean + 0.04, seed=9, host="b") for mean in means))
    assert [len(case.samples) for case in read_cases(a).values()] == [3]
    found = compare_files(a, b)
    assert found.exit_code == 0 and found.hosts == 2 and not found.is_single_run
    assert found.between_runs == pytest.approx(0.047, abs=0.005)
    assert found.pairs[0].before.within_runs < 0.006
    single = compare_files(
        write(tmp_path / "c.jsonl", row()), write(tmp_path / "d.jsonl", row(1.04))
    )
    assert single.exit_code == 1 and single.between_runs is None and single.is_single_run


def test_a_directory_of_results_holds_several_runs(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / f"run-{i}" / "results.jsonl", row(seed=i))
    (case,) = read_cases(tmp_path).values()
    assert len(case.rows) == 3 and case.samples == case.medians


def test_turns_count_once_beside_their_sum(tmp_path: Path) -> None:
    turns = [row(seed=i, kind="baseline-round") for i in range(3)]
    whole = row(kind="baseline", samples=[s for turn in turns for s in turn["samples"]])
    cases = read_cases(write(tmp_path / "results.jsonl", *turns, whole))
    assert len(cases["step, batch 8"].rows) == 3


def test_between_cases_is_what_the_choice_changes(tmp_path: Path) -> None:
    rows = [row(1.0, case="a"), row(3.0, case="b")]
    path = write(tmp_path / "a.jsonl", *rows)
    assert compare_files(path, path).between_cases == pytest.approx(2**0.5 / 2, rel=0.01)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**FACTS, "step_s": 1.0}], "holds 1 rows and no raw samples, expected rows with `samp"),
        ([row(case="x")], "no case is in both (first: step, batch 8; second: x), expected equal"),
        ([row(), row(batch_size=9)], "case=step, batch 8 has batch_size=8 and 9, expected rows of"),
        (["a", "row"], "line 1 of 2 is damaged (it is a str), expected a JSON object"),
    ],
)
def test_a_mistake_is_one_line_and_2(rows, message, before, tmp_path, monkeypatch, capsys) -> None:
    after = write(tmp_path / "b.jsonl", *rows)
    assert call(monkeypatch, "bench", "compare", before, after) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_missing_and_damaged_files(before: Path, tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match="nowhere does not exist, expected what 'qat bench'"):
        read_cases(tmp_path / "nowhere")
    with pytest.raises(
        ComparisonError, match="has no results.jsonl, expected what 'qat bench' wro"
    ):
        read_cases(write(tmp_path / "c" / "notes.txt").parent)
    (tmp_path / "b.jsonl").write_text("no json\n")
    with pytest.raises(ComparisonError, match="line 1 of 1 is damaged .*, expected a JSON object"):
        read_cases(tmp_path / "b.jsonl")
