"""The lab's verbs of `qat bench`, and one line for each where the lab is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qat.cli.mistakes import EXTENSION_OF
from qat.cli.report import report
from qat.errors import ConfigError
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.run import run_bench
from qat.extensions.bench.verb import bench
from qat.extensions.lab.config import BaselinesConfig

WITH_EXTENSIONS = """
import contextlib, io, json, sys
from qat.cli import main
found = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["qat", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            found[" ".join(words)] = (stop.code, err.getvalue())
extensions = [name for name in sys.modules if name.startswith("qat.extensions.")]
print(json.dumps([found, extensions]))
"""
WITHOUT_EXTENSIONS = f"""
import importlib.metadata
importlib.metadata.entry_points = lambda **_: ()
{WITH_EXTENSIONS}"""


def test_a_wrong_name_is_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    calls = [
        ["bench", "baselines", "none"],
        ["bench", "quality", "none.toml", "--out", "q"],
        ["bench", "kernels", "--only", "NOSUCH"],
        ["bench", "sweep", "none.toml"],
    ]
    script = f"{WITH_EXTENSIONS}print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", script, json.dumps(calls)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    lines, has_torch = ran.stdout.splitlines()
    assert has_torch == "False"
    recipe = "qat: recipe=none.toml"
    messages = ("qat: student=none", recipe, "qat: only='NOSUCH'", recipe)
    for (code, line), message in zip(json.loads(lines)[0].values(), messages, strict=True):
        assert code == 1 and line.startswith(message) and line.count("\n") == 1


def test_a_verb_of_an_absent_extension_is_one_line() -> None:
    absent = [[verb, "x"] for verb in EXTENSION_OF] + [["help", "bench", "quality"]]
    calls = [*absent, ["--help"]]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTENSIONS, json.dumps(calls)],
        capture_output=True,
        text=True,
        check=True,
    )
    found, extensions = json.loads(ran.stdout)
    assert extensions == [] and len(found) == len(calls)
    for words in absent:
        code, line = found[" ".join(words)]
        assert code == 1 and line.count("\n") == 1, line
        owner = EXTENSION_OF[words[-2]]
        assert repr(owner) in line and "pip install" in line
    assert found["--help"][0] == 0


@pytest.mark.usefixtures("no_extensions")
def test_a_plan_and_a_leaderboard_need_the_lab(tmp_path: Path) -> None:
    out = tmp_path / "out"
    calls = [
        lambda: bench("tiny", config=BenchConfig(plan="v6e"), out=out),
        lambda: run_bench(BenchConfig(plan="t4,v6e", device="cpu"), "tiny", out),
        lambda: report(leaderboard=True, out=out / "page.html"),
        lambda: report(tmp_path, log=True, out=out / "page.html"),
    ]
    for needs_the_lab in calls:
        with pytest.raises(ConfigError, match="is not installed.*pip install"):
            needs_the_lab()
    assert not out.exists()


def test_cases_keep_their_order_and_unknown_ones_are_refused() -> None:
    assert BaselinesConfig(only="reference,ours").cases == ("ours", "reference")
    with pytest.raises(ConfigError, match="no case is called 'theirs'; choose among ours, plain-"):
        BaselinesConfig.parse({"only": "ours,theirs"}, "flags")
