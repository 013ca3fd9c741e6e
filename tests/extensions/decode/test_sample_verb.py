"""`qat sample` as a shell calls it: its result, what reads it, and its lines of error."""

import json
from pathlib import Path

import pytest
from cli_case import call, said

SPEAKS = Path(__file__).parents[3] / "checkpoints" / "tiny-qwen3"


@pytest.mark.slow
def test_a_cache_reads_what_was_sampled(tmp_path: Path, monkeypatch, capsys) -> None:
    """The cache counts the tokens that its teacher sampled, and recognises them."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What does method {n} return?", "answer": "A list."} for n in range(40)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("sample", SPEAKS, "--prompts", "prompts.jsonl", "--max-new-tokens", 60)
    assert call(monkeypatch, *words, "--out", "chats.jsonl", "--device", "cpu") == 0
    found = said(capsys)
    assert found["rows"] + found["left_out"] == 40 and found["tokens_per_s"] > 0
    words = ("cache", "--teacher", SPEAKS, "--data", "chats.jsonl", "--out", "cache")
    assert call(monkeypatch, *words, "--device", "cpu", "--held-out", 0.1) == 0
    built = said(capsys)
    # a text may be written in fewer tokens than it was said in; rows cut off get an end token
    assert 0.9 * found["tokens"] < built["counted_tokens"] < 1.05 * found["tokens"]
    assert built["teacher_ppl"] < 40


def test_rows_from_nothing(teacher: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "c.jsonl"
    words = ("sample", teacher, "--rows", 5, "--max-new-tokens", 8, "--device", "cpu")
    for _ in range(2):
        assert call(monkeypatch, *words, "--out", out) == 0
    assert said(capsys)["tokens_per_s"] is None  # nothing was left to do
    assert all("text" in json.loads(line) for line in out.read_text().splitlines())


def test_mistakes_are_one_line(teacher: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for words, message in (
        ((), "rows=0 and no prompts, expected something to sample; give --rows N to begin"),
        (("--rows", 5, "--samples", 2), "samples=2 rows of each prompt, but there are no prompts"),
        (("--rows", 5, "--top-p", 1.5), "top_p='1.5': Input should be less than or equal to 1"),
        (("--rows", 5, "--top-p", 0), "top_p='0': Input should be greater than 0"),
        (("--rows", 5, "--temperature", -1), "temperature='-1': Input should be greater than or"),
        (("--prompts", "empty.jsonl"), "prompts=empty.jsonl is empty, expected at least one row"),
        (("--prompts", "nowhere.jsonl"), "prompts=nowhere.jsonl is no file or directory"),
        (("--rows", 5, "--out", "c.txt"), "out=c.txt ends in '.txt', expected a .jsonl file"),
        (("--rows", 5, "--out", "folder.jsonl"), "out=folder.jsonl is a directory, expected a"),
    ):
        monkeypatch.chdir(tmp_path)
        Path("folder.jsonl").mkdir(exist_ok=True)
        Path("empty.jsonl").write_text("")
        out = () if "--out" in words else ("--out", "c.jsonl")
        assert call(monkeypatch, "sample", teacher, *words, *out) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert {path.name for path in tmp_path.iterdir()} == {"folder.jsonl", "empty.jsonl"}
