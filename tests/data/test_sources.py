"""Documents from every kind of source, and every way a source can be wrong."""

import gzip
import json
import logging
from itertools import product
from pathlib import Path

import pytest
import xxhash

from qat.data.sources import check_source, open_source
from qat.errors import DataError

FROZEN = "a243492d21b5f574"
"""Hash of the documents of `stdlib`; figures judged on other documents do not compare."""
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


CHAT = chat("hi", "yes")
THINKING = {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}


def write(path: Path, content: object) -> str:
    if path.suffix == ".jsonl" and not isinstance(content, str):
        content = "\n".join(json.dumps(row) for row in content)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def documents(data: str, **settings: str) -> list:
    return list(open_source(data, **settings).documents)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize(
    ("row", "data_format", "expected"),
    [
        ({"text": "plain words"}, "plain", "plain words"),
        ({"messages": CHAT}, "messages", CHAT),
        ({"messages": [THINKING]}, "messages", [THINKING]),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
            *("sharegpt", CHAT),
        ),
        (ALPACA, "alpaca", chat("Add.\n\n1 2", "3")),
        ({**ALPACA, "input": ""}, "alpaca", chat("Add.", "3")),
        ({"prompt": "hi", "completion": "yes"}, "pairs", CHAT),
        ({"prompt": "hi", "completion": "yes<|endoftext|>"}, "pairs", CHAT),
        ({"question": "hi", "answer": "yes"}, "pairs", CHAT),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "pairs", CHAT),
    ],
)
def test_formats_are_detected(tmp_path: Path, suffix: str, row, data_format, expected) -> None:
    source = open_source(write(tmp_path / f"my{suffix}", [row, row]))
    assert (source.format, source.name) == (data_format, "my")
    assert list(source.documents) == [expected, expected]


def test_text_files_split_at_blank_lines_or_at_their_separator(tmp_path: Path) -> None:
    assert documents(write(tmp_path / "a.txt", "one\ntwo\n\n\nthree\n")) == ["one\ntwo", "three"]
    stories = "a\n\nb<|endoftext|>\nc\n<|endoftext|>\n"
    assert documents(write(tmp_path / "b.txt", stories)) == ["a\n\nb", "c"]


@pytest.mark.parametrize("mark", ["\n", " ", "\n\n"])
def test_a_long_text_that_is_alone_is_cut(tmp_path: Path, mark: str) -> None:
    lines = [f"{number}:1 And it came to pass on day {number}," for number in range(1000)]
    end = "<|endoftext|>" if mark == "\n\n" else ""
    data = write(tmp_path / "a.txt", mark.join(lines) + end)
    found = documents(data)
    assert len(found) > 5 and all(1000 < len(text) <= 4000 for text in found[:-1])
    assert mark.join(found) == mark.join(lines), "nothing is lost"
    assert documents(str(tmp_path)) == found, "also the only file of a directory"
    write(tmp_path / "b.txt", "a short one")
    assert len(documents(str(tmp_path))) == 2, "beside others a file is what its author made it"


def test_a_short_or_a_parted_text_is_not_cut(tmp_path: Path) -> None:
    assert documents(write(tmp_path / "a.txt", "one line\nand another")) == [
        "one line\nand another"
    ]
    long = "\n".join(["a line"] * 2000)
    assert documents(write(tmp_path / "a.txt", f"{long}\n\ntwo")) == [long, "two"]


def test_directories_are_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "z.txt", "last")
    write(tmp_path / "b.jsonl", [{"text": "second"}])
    write(tmp_path / "a.txt", "first")
    write(tmp_path / "LICENSE", "not read")
    assert documents(str(tmp_path)) == ["first", "second", "last"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", 'text,n\n"one, two\nthree",1\n\nfour,2\n', ["one, two\nthree", "four"]),
        ("a.csv", "n;text\n1;one, two\n", ["one, two"]),
        ("a.tsv", "text\tn\none, two\t1\n", ["one, two"]),
        ("a.csv", "text\n" + "x" * 200_000 + "\n", ["x" * 200_000]),
        ("a.csv", "prompt,completion\nhi,yes\n", [CHAT]),
        ("a.md", "# one\n\ntwo\n", ["# one", "two"]),
        ("A.TXT", "one\n\ntwo\n", ["one", "two"]),
        ("a.json", '{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ("a.jsonl", '{"text": "one"}\n\n{"text": "two"}\n\n\n', ["one", "two"]),
    ],
)
def test_files_of_every_kind(tmp_path: Path, name: str, content: str, expected: list) -> None:
    """Files are read as written here and with a byte-order mark and CRLF, plain and gzipped."""
    clumsy = "\ufeff" + content.replace("\n", "\r\n")
    for text, ending in product((content, clumsy), ("", ".gz")):
        raw = text.encode()
        path = tmp_path / (name + ending)
        path.write_bytes(gzip.compress(raw) if ending else raw)
        source = open_source(str(path))
        # a line break within a cell stays what it was
        found = [
            each.replace("\r", "") if isinstance(each, str) else each for each in source.documents
        ]
        assert found == expected, (text[:50], ending)
        assert source.name.lower() == "a"


def test_files_about_the_data_are_not_read(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO, "qat")
    (tmp_path / ".git").mkdir()
    write(tmp_path / ".git" / "config.txt", "hidden")
    write(tmp_path / "README.md", "about the rows")
    write(tmp_path / "SOURCE.txt", "from elsewhere")
    write(tmp_path / "rows.json", [ALPACA])
    assert len(documents(str(tmp_path))) == 1
    documents(str(tmp_path))
    assert caplog.text.count("README.md, SOURCE.txt") == 1, "once, however often it is opened"
    (tmp_path / "rows.json").unlink()
    assert documents(str(tmp_path)) == ["about the rows", "from elsewhere"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", [], "is empty, expected at least one row"),
        ("a.txt", "\n\n", "is empty, expected at least one row"),
        ("a.json", {"text": "x"}, r"holds a JSON dict with the keys \['text'\], expected a"),
        ("a.json", "[1,\n", r"a.json row 1 is not JSON \(Expecting value at line 2, column 1\)"),
        ("a.jsonl", '{"text": "x"}\n{"text"', r"a.jsonl row 2 is not JSON \(.* at column 8\)"),
        ("a.jsonl", '{"text": "x', r"\(Unterminated string starting at column 10\)"),
        ("a.jsonl", [{"text": "x"}, {"txt": "y"}], r"a.jsonl row 2 has the fields \['txt'\]"),
        ("a.jsonl", [{"text": "x"}, {"text": 3}], "row 2 has text=3, expected text"),
        ("a.jsonl", [{"text": "x"}, "y"], "row 2 is 'y', expected 'text'"),
        ("a.jsonl", [{"body": "x"}], r"row 1 has the fields \['body'\], expected messages"),
        ("a.jsonl", [7], "row 1 is 7, expected an object"),
        ("a.json", [ALPACA, {"instruction": "x"}], "row 2 has the fields .*expected 'output'"),
        ("a.json", [{"messages": []}], "has messages=.*, expected a non-empty list"),
        ("a.json", [{"messages": [{"role": "user"}]}], "row 1 has the fields .*'content'"),
        ("a.json", [{"messages": [{"role": "x", "content": "y"}]}], "has role='x', expected one"),
        ("a.jsonl", [{"question": "x", "context": "y", "answer": "z"}], "row 1 has the fields"),
        ("a.jsonl", [{"prompt": [], "completion": "y"}], r"prompt=\[\], expected a non-empty list"),
        ("a.jsonl", '{"text": "cat \\ud83d"}', r"a.jsonl row 1 has '\\ud83d' in its text"),
        ("a.jsonl", '{"text": "x"}\n{"text": "y", "n": ' + "9" * 5000 + "}", "row 2 has a number"),
        ("a.json", '[{"text": "y", "n": ' + "9" * 5000 + "}]", "row 1 has a number of more dig"),
        ("a.jsonl", '{"text": "x", "n": ' + "[" * 10**5 + "]" * 10**5 + "}", "row 1 nests"),
        ("a.json", "[" * 10**5, "row 1 nests"),
        ("a.jsonl", [{**ALPACA, "output": "\udc00"}], "row 1 .*half of a surrogate pair"),
        ("a.doc", "words", "ends in '.doc', expected .csv, .json"),
        ("a.csv", "text", "is empty, expected at least one row"),
        ("a.csv", "text\none, two\n", "row 1 has 2 cells, expected 1 as in the first line"),
        ("a.csv", 'text\n"one" two\n', "a.csv is no table"),
        ("a.txt.gz", "words", "a.txt.gz cannot be unpacked"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, name: str, content: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        documents(write(tmp_path / name, content))


def test_fields_that_hold_nothing_or_what_a_turn_says_are_no_hindrance(tmp_path: Path) -> None:
    nothing = {"tools": None, "system": " ", "history": [], "functions": "[]"}
    turns = [{"role": "system", "content": "Be kind."}, *CHAT]
    turns[2] = {**turns[2], "tool_calls": None, "weight": None}
    path = write(tmp_path / "a.jsonl", [{"messages": turns, **nothing, "system": "Be kind."}])
    assert documents(path) == [[{"role": "system", "content": "Be kind."}, *CHAT]]
    assert documents(write(tmp_path / "b.jsonl", [{**ALPACA, **nothing}])) != []
    assert documents(write(tmp_path / "c.jsonl", [{"text": "words", "system": "x"}])) == ["words"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_in_another_encoding_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match="not UTF-8"):
        documents(str(tmp_path / name))


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no .csv, .json, .* file"):
        documents(str(tmp_path))


def test_an_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(DataError, match="data is empty"):
        check_source("")


def test_stdlib_is_the_same_text_on_every_python() -> None:
    source = open_source("stdlib", "alpaca", "no such field")
    assert (source.name, source.format) == ("stdlib", "plain") and check_source("stdlib") == "plain"
    texts = list(source.documents)
    assert len(texts) == len(set(texts)) > 4000 and min(map(len, texts)) >= 80
    assert xxhash.xxh3_64_hexdigest("\0".join(texts).encode()) == FROZEN
