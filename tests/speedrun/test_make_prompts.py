"""Prompts for a teacher's own answers: what is asked, and that no question of a suite is."""

import json
from pathlib import Path

import make_prompts
import pytest

from qat.extensions.suite.rows import HELD_OUT, load

CODE = '''
def largest(numbers, default=None, *, key=len) -> int:
    """Return the largest of some numbers, or a default.

    Nothing is changed.
    """

class Shelf:
    def count(self, above=0):
        """Count the books of the shelf above a number of pages."""

    def _hidden(self):
        """Do something that nobody outside this class should ask for."""

    def raw(self):
        r"""Split a text at each newline, which is \\n, and count the parts."""

def short():
    """Say little."""
'''


def asked(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all([m["role"] for m in row["messages"]] == ["user"] for row in rows)
    return [row["messages"][0]["content"] for row in rows]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_documented_public_functions_are_asked_for(tmp_path: Path) -> None:
    for name, text in (("a.py", CODE), ("b.py", "def broken(:"), ("test/c.py", CODE)):
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    make_prompts.main(out=tmp_path / "out", code=(tmp_path / "code",))
    found = asked(tmp_path / "out" / "functions.jsonl")
    assert len(found) == 2 * len(make_prompts.CODE_WORDS)
    for text in found:
        is_method = "count(above=0)" in text
        assert is_method == ("above a number of pages" in text)
        assert is_method != ("largest(numbers, default=None, *, key=len) -> int" in text)
        assert is_method != ("Nothing is changed." in text)


def test_code_in_a_question_is_a_function_with_its_docstring(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    blocks = [
        text.split("```python\n")[-1].split("```")[0]
        for text in make_prompts.functions_asked([tmp_path])
        if "Complete" in text
    ]
    assert len(blocks) == 4
    for block in blocks:
        compile(block, "asked", "exec")


def test_questions_of_a_suite_are_not_asked(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(530)]
    file = write_rows(tmp_path / "train.jsonl", rows)
    make_prompts.main(out=tmp_path, gsm8k=file, code=())
    found = {text.splitlines()[0] for text in asked(tmp_path / "sums.jsonl")}
    pytest.importorskip("datasets")
    suite = {row["question"] for row in load("gsm8k", str(file))["test"]}
    assert len(suite) == HELD_OUT and len(found) == 30 and not found & suite


def test_instructions_of_three_shapes_are_read(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Greet me.", "input": ""},
        {"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]},
        {"prompt": "Tell me of rain."},
        {"prompt": "x" * (make_prompts.QUESTION_CHARACTERS + 1)},
    ]
    files = (write_rows(tmp_path / "a.jsonl", rows[:3]), write_rows(tmp_path / "b.jsonl", rows[2:]))
    for place in ("one", "two"):
        make_prompts.main(out=tmp_path / place, instructions=files, code=())
    one, two = (tmp_path / place / "instructions.jsonl" for place in ("one", "two"))
    assert sorted(asked(one)) == [
        "Add.\n\n1 and 2",
        "Greet me.",
        "Sort.\n\nb a",
        "Tell me of rain.",
    ]
    assert one.read_bytes() == two.read_bytes()
    foreign = write_rows(tmp_path / "c.jsonl", [{"text": "Rain."}])
    with pytest.raises(SystemExit, match=r"c\.jsonl .*text"):
        make_prompts.main(out=tmp_path, instructions=(foreign,), code=())
