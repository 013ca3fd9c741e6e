"""A mutant is killed by a test that fails with it, passes without it, and nothing else."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from coverage import CoverageData

SPEEDRUN = Path(__file__).resolve().parents[2] / "speedrun"
SOURCE = """SIZE = 2


def double(x):
    if x > 100:
        raise ValueError(x)
    return (
        SIZE
        * x
    )
"""
TESTS = """from qat.quant import weight
def test_double(): assert weight.double(3) == 6
def test_large(): weight.double(100)
def test_wrong(): assert weight.SIZE == 7
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    script = importlib.import_module("measure_mutants")
    importlib.import_module("figures")  # with the project's own modules, which the next line hides
    for name in [name for name in sys.modules if name.partition(".")[0] in {"qat", "test_pack"}]:
        monkeypatch.delitem(sys.modules, name)
    for name, text in {
        "qat/__init__.py": "",
        "qat/quant/weight.py": SOURCE,
        "tests/quant/test_pack.py": TESTS,
        "pytest.ini": "[pytest]\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, value in {"ROOT": tmp_path, "LARGE": (), "MODELS": ()}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return script


def mutant(script: ModuleType, line: int, before: str, after: str) -> object:
    return script.Mutant("m", "qat/quant/weight.py", line, "kind", f"{before}\n", f"{after}\n")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it forks among threads
@pytest.mark.parametrize(
    ("line", "before", "after", "test", "outcome"),
    [
        (7, "SIZE = 2", "SIZE = 3", "test_double", "killed"),  # the line has moved
        (1, "SIZE = 2", "SIZE = 3", "test_large", "survived"),
        (5, "    if x > 100:", "    if x >= 100:", "test_large", "killed"),
        (1, "SIZE = 2", "SIZE =", "test_large", "killed"),  # it cannot be imported
        (1, "SIZE = 7", "SIZE = 8", "test_large", "gone"),
        (1, "SIZE = 2", "SIZE = 3", "test_not_there", "unsure"),
        (1, "SIZE = 2", "import os; os.abort()", "test_double", "killed"),
        (1, "SIZE = 2", "while True: pass", "test_double", "timeout"),
    ],
)
def test_outcomes(  # noqa: PLR0917
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    line: int,
    before: str,
    after: str,
    test: str,
    outcome: str,
) -> None:
    monkeypatch.setattr(script, "CPU_S", 1 if outcome == "timeout" else 40)
    tests = {f"tests/quant/test_pack.py::{test}": 0.1}
    found = script.judge(script.located(mutant(script, line, before, after)), tests)
    assert found["outcome"] == outcome
    assert found["by"] == "" or next(iter(tests)).startswith(found["by"])
    assert (tmp_path / "qat/quant/weight.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("line", "tests"),
    [(1, ["in_pack", "quick", "slow"]), (6, []), (8, ["in_pack", "slow"])],
)
def test_tests_that_run_the_line_are_chosen_mirrored_ones_first(
    script: ModuleType, tmp_path: Path, line: int, tests: list[str]
) -> None:
    data = CoverageData(str(tmp_path / ".coverage"))
    for context, lines in {
        "tests/a/test_b.py::quick|run": [1, 5],
        "tests/a/test_b.py::slow|run": [5, 7],
        "tests/a/test_b.py::failed|run": [5, 7],
        "tests/quant/test_pack.py::in_pack|setup": [5, 7],
    }.items():
        data.set_context(context)
        data.add_lines({str(tmp_path / "qat/quant/weight.py"): lines})
    data.set_context("")
    data.add_lines({str(tmp_path / "qat/quant/weight.py"): [1, 4, 6]})
    data.write()
    (tmp_path / "map.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a.test_b" name="quick" time="0.5"/>'
        '<testcase classname="tests.a.test_b" name="slow" time="3"/>'
        '<testcase classname="tests.a.test_b" name="failed" time="1"><failure/></testcase>'
        '<testcase classname="tests.quant.test_pack" name="in_pack" time="2"/>'
        "</testsuite></testsuites>"
    )
    found = script.Tests(tmp_path / ".coverage", (tmp_path / "map.xml",))
    chosen = found.of(mutant(script, line, "", ""))
    assert [name.partition("::")[2] for name in chosen] == tests


def test_equivalent_ones_do_not_count_but_need_a_reason(script: ModuleType, tmp_path: Path) -> None:
    out, listed, figures = tmp_path / "out.jsonl", tmp_path / "same.toml", tmp_path / "f.jsonl"
    ends = {"a": "survived", "b": "killed", "c": "timeout", "d": "survived", "e": "gone"}
    lines = [{"name": "a", "outcome": "killed", "tests": 1, "is": "qat/nn/x.py:1 old"}]
    for name, end in ends.items():
        lines.append({"name": name, "outcome": end, "tests": 1, "is": f"qat/nn/x.py:1 {name}"})
    out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for text in ('[d]\nis = "x"\n', '[b]\nreason = "x"\n', '[z]\nreason = "x"\n'):
        listed.write_text(text)
        with pytest.raises(SystemExit, match="needs a reason, and a mutant that no test"):
            script.count(out, equivalent=listed)
    listed.write_text('[d]\nis = "x"\nreason = "x"\n')
    script.count(out, equivalent=listed, figures=figures)
    figure = json.loads(figures.read_text())
    assert (figure["value"], figure["runs"]) == (66.7, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_list_is_measured_again(script: ModuleType, tmp_path: Path) -> None:
    listed, figures = tmp_path / "mutants.jsonl", tmp_path / "figures.jsonl"
    tests, larger = "tests/quant/test_pack.py::", ("    if x > 100:", "    if x >= 100:")
    lines = [
        mutant(script, 1, "SIZE = 2", "SIZE = 3")._asdict() | {"tests": [f"{tests}test_double"]},
        mutant(script, 5, *larger)._asdict() | {"tests": [f"{tests}test_double"]},
        mutant(script, 1, "SIZE = 2", "SIZE = 4")._asdict() | {"tests": [f"{tests}test_wrong"]},
        mutant(script, 1, "SIZE = 9", "SIZE = 8")._asdict() | {"tests": [f"{tests}test_large"]},
        mutant(script, 1, "SIZE = 2", "SIZE = 1 + 1")._asdict() | {"tests": []},
    ]
    lines = [line | {"name": name} for name, line in zip("abcde", lines, strict=True)]
    listed.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(SystemExit, match="e needs tests"):
        script.check(listed)
    lines[-1]["equivalent"] = "It is 2."
    listed.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    script.check(listed, figures=figures)
    figure = json.loads(figures.read_text())
    assert (figure["figure"], figure["value"]) == ("mutants_killed_percent", 33.3)
    assert figure["runs"] == 3
