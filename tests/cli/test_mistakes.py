"""The answer to a command line that cannot be parsed: what is wrong, and what was meant."""

import re
from pathlib import Path

from cli_case import call

from qat.cli import VERBS, app


def answer(monkeypatch, capsys, *tokens: object) -> str:
    """The one line with which `qat TOKENS` is refused."""
    assert call(monkeypatch, *tokens) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("qat: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("qat: ").rstrip("\n")


def meant(line: str) -> str | None:
    """Return what the line suggests after "did you mean"; None if it suggests nothing."""
    found = re.search(r"did you mean '?(.*?)'?\?", line)
    return found and found[1]


def test_a_misspelt_verb_is_named_whatever_follows(monkeypatch, capsys) -> None:
    for tokens, verb in (
        ("cach --teacher x --data y", "qat cache"),
        ("tarin x --cache-dir c --out r", "qat train"),
        ("help cach", "qat cache"),
        ("hub pul NAME", "qat hub pull"),
        ("cache verfy --out x", "qat cache verify"),
    ):
        assert meant(answer(monkeypatch, capsys, *tokens.split())) == verb


def test_a_word_without_its_flag_gets_it(monkeypatch, capsys) -> None:
    for tokens, flags in (
        ("convert M q2a4 --out o", "--to q2a4"),
        ("convert M q2b4 --out o", "--to q2a4"),
        ("convert M gguf --to q2a4 --out o", "--for gguf"),
        ("convert M o --to q2a4", "--out o"),
        ("export M gguf --out o", "--to gguf"),
        ("train M c r", "--cache-dir c --out r"),
        ("cache --data d M", "--teacher M"),
    ):
        line = answer(monkeypatch, capsys, *tokens.split())
        assert meant(line) == flags and "missing" not in line


def test_a_value_of_several_words_is_to_be_quoted(monkeypatch, capsys) -> None:
    line = answer(monkeypatch, capsys, *"generate M --prompt Once upon a time".split())
    assert line.endswith("--prompt 'Once upon a time'")


def test_all_that_is_missing_is_named_with_an_example(monkeypatch, capsys) -> None:
    for tokens, missing in (
        ("cache", {"--data", "--teacher"}),
        ("cache --teacher M", {"--data"}),
        ("train", {"STUDENT", "--cache-dir", "--out"}),
        ("train M --out r", {"--cache-dir"}),
        ("export", {"MODEL", "--to", "--out"}),
        ("hub push", {"PATH", "TO"}),
        ("hub add NAME", {"--kind", "--mirror"}),
        ("convert M q2a4", {"--out"}),
    ):
        line = answer(monkeypatch, capsys, *tokens.split())
        named, example = re.search(
            r"(?:.*And )?([^;?]*) (?:is|are) missing; for example: (.*)", line
        ).groups()
        assert set(re.split(", | and ", named)) == missing
        assert example.startswith(f"qat {tokens.split()[0]}")


def test_what_a_recipe_says_is_not_missing(tmp_path: Path, monkeypatch, capsys) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[train]\ncache_dir = 'c'\n")
    line = answer(monkeypatch, capsys, "--recipe", recipe, "train", "M")
    assert line.startswith("--out is missing")


def test_a_misspelt_flag_is_the_nearest_one_alone(monkeypatch, capsys) -> None:
    for tokens, flag in (
        ("cache --hlep", "--help"),
        ("--hlep", "--help"),
        ("cache --seq-len 5", "--sequence-length"),
    ):
        assert meant(answer(monkeypatch, capsys, *tokens.split())) == flag


def test_a_wrong_value_is_named_with_its_flag(monkeypatch, capsys) -> None:
    for tokens, flag, known in (
        ("train M --cache-dir c --out o --resume=lates", "resume", ("latest", "auto")),
        ("convert M --out o --for ggfu", "--for", ("gguf", "mlx")),
        ("convert M --out o --from anemil", "--from", ("anemll",)),
        ("demo --steps x", "--steps", ("whole number",)),
        ("demo --steps 0", "--steps", ("0",)),
        ("cache --top-k 3 --top-k 4 --data a --teacher b", "--top-k", ("twice",)),
    ):
        line = answer(monkeypatch, capsys, *tokens.split())
        assert line.startswith(flag) and all(name in line for name in known)


def test_every_example_names_what_its_verb_needs() -> None:
    for name in VERBS:
        if app[name].default_command is None:
            continue
        needed = [each for each in app[name].assemble_argument_collection() if each.required]
        flags = [each.name for each in needed if not each.field_info.is_positional]
        assert all(flag in app[name].help_epilogue for flag in flags if flag != "*"), name


def test_the_list_of_verbs_says_how_each_verbs_page_begins() -> None:
    for name, verb in VERBS.items():
        page = app[name].default_command.__doc__ if verb.example else app[name].help
        assert page.partition("\n")[0] == verb.help
