"""Prompts for a teacher's own answers: what is asked, and that no question of a suite is."""

import json
from pathlib import Path

import make_prompts
import pytest

from qat.errors import DataError
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
QUOTED = "def last(words):\n    '''Return the last of some words: last([\"a\", \"b\"]) is \"b\"'''"


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
    (tmp_path / "a.py").write_text(CODE + QUOTED)
    blocks = [
        text.split("```python\n")[-1].split("```")[0]
        for (text,) in make_prompts.functions_asked(
            make_prompts.functions_of(tmp_path), make_prompts.CODE_WORDS
        )
        if "Complete" in text
    ]
    assert len(blocks) == 6
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


def exercise(name: str, about: str, rest: str = "") -> str:
    return (
        f'```python\nimport re\n\n\ndef {name}(words: List[str]) -> int:\n    """{about}\n\n'
        f'    >>> {name}(["a"])\n    1\n    >>> {name}([])\n    0\n    """\n{rest}'
    )


def test_each_exercise_asked_for_is_another_one_after_a_worked_one(tmp_path: Path) -> None:
    make_prompts.main(out=tmp_path, code=(), ask_exercises=40)
    lines = (tmp_path / "exercises_asked.jsonl").read_text().splitlines()
    assert len({*lines}) == 40
    for line in lines:
        asked, shown, again = json.loads(line)["messages"]
        assert [each["role"] for each in (asked, shown, again)] == ["user", "assistant", "user"]
        assert asked["content"] != again["content"]
        compile(shown["content"].removeprefix("```python").removesuffix("```"), "shown", "exec")


def test_exercises_come_from_answers_but_not_from_a_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = "Count the words of a list that begin with a vowel and end with another one."
    known = "Return how many of the given words hold each letter of the alphabet at most twice."
    shown = make_prompts.EXERCISES["shown"][0]
    answers = [
        exercise("count_open", about, "    return len(words\n"),  # cut off
        exercise("count_vowels", about.upper()),
        exercise("other", f"Say it so: {known}"),
        exercise(
            "rare_words", "Tell how many words of the list are rare, by any measure of yours."
        ),
        f"```python\n{shown['code']}```",
        exercise("count", "Count some words."),
        exercise("_own", about.replace("vowel", "digit")),
        f'```python\ndef count_all(words):\n    """{about.replace("vowel", "digit")}"""\n```',
        "I would rather not. ```python\n(((\n```",
    ]
    rows = [{"messages": [{"role": "assistant", "content": each}]} for each in answers]
    problems = [
        {"entry_point": "rare", "prompt": f'def rare(words):\n    """{known}"""'},
        {"entry_point": "rare_words", "prompt": "Tell how many words are rare by a measure."},
    ]
    make_prompts.write_exercises(
        write_rows(tmp_path / "answers.jsonl", rows),
        out=tmp_path,
        humaneval=str(write_rows(tmp_path / "problems.jsonl", problems)),
    )
    (found,) = asked(tmp_path / "exercises.jsonl")
    block = found.partition("```python\n")[2].rpartition("```")[0]
    compile(block, "asked", "exec")
    assert "from typing import List\n" in block and about in block and "import re" not in block
    said = capsys.readouterr().out
    for number in ("9 answers", "2 close", "2 repeated", "1 too short", "1 without"):
        assert number in said
    with pytest.raises(DataError, match=r"none\.jsonl"):
        make_prompts.write_exercises(
            tmp_path / "answers.jsonl", out=tmp_path, humaneval=str(tmp_path / "none.jsonl")
        )
    for row in ({"text": "a"}, {"messages": []}, {"messages": [{"content": None}]}):
        file = write_rows(tmp_path / "answers.jsonl", [row])
        with pytest.raises(SystemExit, match=rf"answers\.jsonl .* {next(iter(row))}, expected"):
            make_prompts.write_exercises(file, out=tmp_path)


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    missing, out = str(tmp_path / "answers.jsonl"), tmp_path / "out"
    asked = "--code", str(tmp_path), "--out", str(out), "--ask-exercises=-1"
    for words, named in ((["exercises", missing, "--out", str(out)], missing), ([*asked], "=-1,")):
        with pytest.raises(SystemExit) as ended:
            make_prompts.run(words)
        assert named in str(ended.value) and "\n" not in str(ended.value)
    assert not (out / "exercises_asked.jsonl").exists() and not (out / "exercises.jsonl").exists()
