"""Wrong names on a command line: one line each, said before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from qat.cli.inputs import check_inputs
from qat.errors import ConfigError
from qat.hooks import hooks

MODEL = "checkpoints/tiny-qwen3"
# .ci/core runs this file without extensions
SUITE = "did you mean humaneval?" if hooks("qat.suites") else "extension 'suite' is not in"
WRONG = [
    ("train none --cache-dir {tmp} --out {tmp}/r", "holds no manifest.json"),
    (f"train {MODEL} --cache-dir none --out {{tmp}}/r", "none is not there, expected a teacher"),
    (f"train {MODEL} --cache-dir none --out {{tmp}}/r --lr inf", "lr='inf': Input should be a fin"),
    (f"train {MODEL} --cache-dir none --out {{tmp}}/r --loss tial", "no loss called 'tial'"),
    ("generate none --temperature nan", "temperature='nan': Input should be"),
    (f"train {MODEL} --cache-dir none --out {{file}}", "is a file, expected a directory"),
    (f"train {MODEL} --cache-dir none --out {{file}}/r", "text.txt is a file; expected a direct"),
    (f"cache --teacher {MODEL} --data none.jsonl", "data=none.jsonl is no file or directory"),
    (f"cache --teacher {MODEL} --data {{tmp}}/none", "is no file or directory"),
    (f"cache --teacher {MODEL} --data {{empty}}", "is empty, expected at least one row"),
    ("cache --teacher none --data {file}", "none does not exist; expected a model directory"),
    ("cache --teacher {file} --data {file}", "is a file without a model"),
    ("cache --teacher none --data {file} --device-map dsk", "Input should be 'auto' or 'disk'"),
    (f"cache --teacher {MODEL} --data {MODEL}", "is a model, expected text to read"),
    ("cache info none", "none is not there, expected a teacher cache"),
    ("cache verify {tmp}", "holds no manifest.json"),
    ("cache import none", "none is no directory"),
    ("cache import {tmp}", "and holds no meta.json"),
    (f"cache --teacher {MODEL} --data {{file}} --out {{tmp}}", "expected an empty directory or a"),
    (f"eval {MODEL} --text {{binary}}", "is not UTF-8 text"),
    ("report", "RUNS is missing"),
    ("report {tmp}", "holds neither metrics.jsonl nor convert_report.json"),
    ("report {file}", "text.txt is a file, expected a run"),
    ("hub pack {file}", "text.txt is a file, expected a directory to pack"),
    ("hub pack {tmp} --out {file}/x.tgz", "text.txt is a file, expected a directory"),
    ("hub unpack {tmp} --out {tmp}/u", "expected a .tar.lz4 or .tgz file"),
    ("hub unpack {file} --out {file}/u", "text.txt is a file; expected a directory"),
    ("hub push {tmp} {file}", "text.txt is a file, expected a folder"),
    ("hub list --registry {tmp}/none", "none is not there, expected a TOML file w"),
    ("hub verify {file}", "text.txt is a file, expected a directory"),
    ("eval x --text {file} --recipe {tmp}", "expected a TOML file"),
    ("convert none --to q2a4 --out {tmp}/c", "none does not exist"),
    (f"convert {MODEL} --to q9 --out {{tmp}}/c", "to=q9 is neither a file nor a preset"),
    (f"convert {MODEL} --to v2a4 --group-size 6 --out {{tmp}}/c", "no multiple of vector_size=4"),
    (f"convert {MODEL} --to q2a4 --out {{tmp}}", "is not empty, expected a new or empty"),
    (f"convert {MODEL} --to q2a4 --base none --out {{tmp}}/c", "none does not exist"),
    (f"convert {MODEL} --to q2a4 --calibration none.txt --out {{tmp}}/c", "none.txt is no file"),
    ("eval none --text {file}", "none does not exist"),
    (f"eval {MODEL}", "neither a cache nor a text nor tasks"),
    (f"eval {MODEL} --suite humanevl --out {{tmp}}/s", SUITE),
    (f"eval {MODEL} --text none.txt", "none.txt is not there, expected a text file"),
    (f"eval {MODEL} --text {{tmp}}", "is a directory, expected a text file"),
    ("export none --to gguf --out {tmp}/e", "none does not exist"),
    (f"export {MODEL} --to gguf --out {{tmp}}/e", "is not a packed checkpoint"),
    (f"eval {MODEL} --text {{file}} --context 8 --stride 8", "use --stride 4"),
    (f"eval {MODEL} --text {{file}} --context 9999999", "positions for 2048 tokens; use --context"),
    (f"cache --teacher {MODEL} --data {{file}} --sequence-length 9999", "length 2048"),
    (f"export {MODEL} --to gguf --out {{tmp}}", "is not empty, expected a new or empty"),
    ("generate none", "none does not exist"),
    (f"convert {MODEL} --out {{tmp}}/c", "neither a plan nor a budget is given"),
    (f"convert {MODEL} --to q2b4 --out {{tmp}}/c", "did you mean q2a4?"),
    (f"convert {MODEL} --bits-budget 2 --out {{tmp}}/c", "bits_budget=2 is given without a text"),
    (f"convert {MODEL} --to q2a4 --out {{tmp}}/c --device gpu", "device=gpu is unknown"),
    (f"convert {MODEL} --to q2a4 --out {{tmp}}/c --device cuda:x", "device=cuda:x is unknown"),
    (f"convert {MODEL} --to q2a4 --out {MODEL}/c", "lies inside checkpoints/tiny-qwen3"),
    (f"convert {MODEL} --to q2a4 --out {{tmp}}/c --cache-dir x", "without --eval"),
    (f"convert {MODEL} --to q2a4 --out {{tmp}}/c --calibration {MODEL}", "is a model, exp"),
    (f"eval {MODEL} --cache-dir {MODEL}", "is a model and holds no manifest.json"),
    (f"eval {MODEL} --text {{file}} --device tpu", "device=tpu is unknown"),
    (f"generate {MODEL} --device coda", "did you mean cuda?"),
    ("generate {tmp}", "is a directory of something else without a model"),
    ("demo --steps 0 --out {tmp}/d", "--steps 0: must be > 0"),
    ("demo --teacher none --out {tmp}/d", "teacher=none holds no model"),
    ("hub pull none", "no entry is called 'none'"),
    ("hub unpack none.tgz --out {tmp}/u", "none.tgz is not there"),
]
if "bench" in hooks("qat.verbs"):
    WRONG += [
        ("bench tiny --loss tial", "no loss called 'tial'"),
        ("bench none", "student=none is neither a model directory nor a shape"),
        ("bench tiny --cache-dir none", "none is not there, expected a teacher cache"),
        ("bench --plan NOSUCH", "plan=NOSUCH is no device of the table"),
    ]
SCRIPT = """
import sys
from qat.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["qat", *line.split()]
    try:
        main()
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules)
"""


def test_a_wrong_name_is_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\xff")
    names = {"file": "text.txt", "empty": "empty.txt", "binary": "binary.txt"}
    places = {"tmp": tmp_path} | {name: tmp_path / file for name, file in names.items()}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(words.format(**places) for words, _ in WRONG),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    said = result.stderr.splitlines()
    assert len(said) == len(WRONG)
    for line, (words, message) in zip(said, WRONG, strict=True):
        assert line.startswith("qat: ") and message in line, (words, line)
    assert result.stdout.splitlines() == ["1 False"] * len(WRONG)
    assert {path.name for path in tmp_path.iterdir()} == {*names.values()}


def test_an_out_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} may not be written by you; expected"):
        check_inputs(out=tmp_path / "a" / "b")
