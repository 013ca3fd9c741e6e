"""The command line as a user meets it: help, typing mistakes, recipes, and whose fault it is."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from cli_case import call

import qat.cli
from qat.cli import VERBS, app, main
from qat.cli.parser import check_recipe, parsed, verb_flags
from qat.cli.run import Pipeline
from qat.config import Required
from qat.errors import ConfigError
from qat.extensions.lab.quality.plan import read_quality
from qat.extensions.lab.sweep.plan import read_sweep
from qat.process import GAPS

REQUIRED_KEY = Required[str].__metadata__[0].group[0].sort_key
RECIPES = Path(__file__).parents[1] / "speedrun" / "recipes"
FLAGS = {"cache": {"top-k", "data"}, "train": {"max-steps", "lr"}}


def test_verbs_are_the_commands() -> None:
    assert set(VERBS) == {name for name in app if not name.startswith("-")}


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from qat.cli import main\n"
        "for verb in ([], ['cache'], ['train']):\n"
        "    sys.argv = ['qat', *verb, '--help']\n"
        "    try:\n        main()\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Usage: qat") == 3


def test_mistake_is_one_line_and_exit_code_1(monkeypatch, capsys) -> None:
    for tokens, message in (
        (["frobnicate"], "qat has no verb 'frobnicate'; there are sample, cache, convert, "),
        (["report", "a", "--otu", "x"], "unknown flag --otu; did you mean --out?"),
        (["--recipee", "r.toml", "train", "x"], "unknown flag --recipee; did you mean --recipe?"),
        (["train", "x", "-lr", "3"], "unknown flag -lr; did you mean --lr?"),
        (["cache", "a/teacher", "--data", "x", "--out", "y"], "did you mean --teacher a/teacher?"),
        (["cache", "frobnicate"], "takes; drop it. And --data and --teacher are missing; for exam"),
        (["cache", "infos", "x"], "qat cache has no verb 'infos'; did you mean 'qat cache info'?"),
        (["cache", "--zzzz", "f"], "unknown flag --zzzz; 'qat cache --help' lists the known ones"),
        (["train", "x", "--out"], "--out is given without a value; write it behind"),
        (["train", "x", "--recipe"], "--recipe is given without a value"),
        (["cache", "info"], "DIRECTORY is missing; for example: qat cache info "),
        (["hub", "pull", "a", "b"], "'b' is a word more than 'qat hub pull' takes; drop it"),
        (["cache", "--data", "a", "--teacher", "b", "--top-k", "x"], "top_k='x'"),
        (["--recipe", "nowhere.toml", "report"], "recipe=nowhere.toml is not there"),
    ):
        assert call(monkeypatch, *tokens) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("qat: ") and message in captured.err
        assert captured.err.count("\n") == 1


def test_help_is_a_word_too(monkeypatch, capsys) -> None:
    for tokens in (["help"], ["help", "train"], ["help", "bench", "sweep"]):
        assert call(monkeypatch, *tokens) == 0
        assert capsys.readouterr().out.startswith(f"Usage: {' '.join(['qat', *tokens[1:]])}")


def test_without_a_verb_all_are_listed(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "--help") == 0
    page = capsys.readouterr().out
    assert all(f"│ {name} " in page for name in VERBS)
    for tokens in ([], ["help"], ["-h"]):
        assert call(monkeypatch, *tokens) == 0
        assert capsys.readouterr().out == page


SUBVERBS = [[verb, below] for verb in VERBS for below in app[verb] if not below.startswith("-")]


def test_help_ends_with_an_example_that_parses(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "train", "--help") == 0
    assert capsys.readouterr().out.splitlines()[-1] == app["train"].help_epilogue
    for words in (*([verb] for verb in VERBS), *SUBVERBS):
        verb = app[words[0]] if len(words) == 1 else app[words[0]][words[1]]
        example = shlex.split(verb.help_epilogue)
        assert example[: len(words) + 2] == ["Example:", "qat", *words]
        app.parse_args(example[2:], exit_on_error=False, print_error=False)


def test_flags_stand_below_headings_the_required_first() -> None:
    for verb in ("train", "cache", "convert", "bench", "eval", "export"):
        arguments = [each for each in app[verb].assemble_argument_collection() if each.show]
        headings = {each.name: [group.name for group in each.parameter.group] for each in arguments}
        needed = {each.name for each in arguments if each.required}
        assert needed == {name for name, found in headings.items() if found == ["Required"]}
        others = [name for name, found in headings.items() if found == ["Others"]]
        assert len(others) <= 1 + len(arguments) // 20, f"give these a heading: {others}"
        served = {name for name, found in headings.items() if found == ["A teacher on a server"]}
        assert served == ({"--teacher-model", "--tokenizer"} if verb == "cache" else set())
        order = sorted(group.sort_key[1] for each in arguments for group in each.parameter.group)
        assert not needed or order[0] == REQUIRED_KEY[1]


def test_help_of_switches_is_short(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "train", "--help") == 0
    out = capsys.readouterr().out
    assert "--no-" not in out and "[default: False]" not in out
    found, _, _ = app.parse_args(  # the negative takes back what a recipe says
        ["train", "a", "--cache-dir", "b", "--out", "c", "--no-wandb"],
        exit_on_error=False,
        print_error=False,
    )
    assert found is not None


def test_version_works_behind_every_verb(monkeypatch, capsys) -> None:
    for words in ([], ["train"], ["hub", "pull"]):
        assert call(monkeypatch, *words, "--version") == 0
        assert capsys.readouterr().out == f"qat {qat.__version__}\n"


COMPLETED = (*VERBS, "sweep", "gradient-checkpointing")


def test_the_shell_completes_verbs_and_flags() -> None:
    script = app.generate_completion(shell="fish")  # bash is installed below
    assert all(word in script for word in COMPLETED)


def test_completion_is_installed_where_the_shell_looks(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert call(monkeypatch, "--install-completion", "--shell", "bash") == 0
    (installed,) = tmp_path.rglob("completions/qat")
    assert all(word in installed.read_text() for word in COMPLETED)


def test_help_is_readable_where_only_ascii_is_shown() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "qat", "train", "--help"],
        capture_output=True,
        check=False,
        env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith(b"Usage: qat") and result.stdout.isascii()


def test_help_is_readable_on_narrow_terminals(monkeypatch, capsys) -> None:
    for columns, tokens in (("60", ["train", "--help"]), ("20", ["bench", "--help"]), ("80", [])):
        monkeypatch.setenv("COLUMNS", columns)
        assert call(monkeypatch, *tokens) == 0
        shown = capsys.readouterr()
        assert shown.err == "" and shown.out.startswith("Usage: qat")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "qat", "hub", "list"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert b"Traceback" not in result.stderr and b"Exception ignored" not in result.stderr


def test_our_own_bug_keeps_its_traceback(monkeypatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("our bug")

    monkeypatch.setattr(qat.cli, "app", SimpleNamespace(meta=broken))
    monkeypatch.setattr("sys.argv", ["qat", "cache"])  # pytest-xdist gives its workers none
    with pytest.raises(RuntimeError, match="our bug"):
        main()


def test_a_verb_stopped_by_the_keyboard_says_so(monkeypatch, capsys) -> None:
    def stopped(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qat.cli.inputs.read_manifest", stopped)
    assert call(monkeypatch, "cache", "info", "anything") == 130
    assert capsys.readouterr().err == "qat: stopped by the keyboard\n"


def test_recipe_takes_both_spellings_and_code_that_does_not_run(tmp_path: Path) -> None:
    recipe, flags = tmp_path / "r.toml", FLAGS | {"eval": {"trust-remote-code"}}
    tables = ('[cache]\ntop_k = 4\ndata = "x"', "[train]\nmax-steps = 1", "[eval]")
    recipe.write_text("\n".join((*tables, "trust_remote_code = false\n")))  # as runs record it
    check_recipe(recipe, flags)


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_bytes(b'\xef\xbb\xbf[cache]\r\nteacher = "t"\r\ndata = "d"\r\nout = "o"\r\n')
    call_of_verb = parsed(["cache"], recipe)
    assert call_of_verb.keywords["config"].teacher == "t"


def test_recipe_mistakes_name_what_was_meant(tmp_path: Path) -> None:
    for text, message in (
        ("[cahce]\n", r"no verb is called \[cahce\]; did you mean 'cache'\?"),
        ("[cache]\ntop_kk = 1\n", r"\[cache\] has no key 'top_kk'; did you mean 'top_k'\?"),
        ("[train]\nzzz = 1\n", r"\[train\] has no key 'zzz'; known are lr, max_steps"),
        ("cache = 1\n", r"cache must be a table; write \[cache\]"),
        ("[cache\n", "is not TOML .*; mend that line"),
        ("a = " + "[" * 3000, r"is not TOML \(it nests too deeply\), .*; mend that line"),
        ("a." * 20_000 + "b = 1", r"is not TOML \(it nests too deeply\), .*; mend that line"),
    ):
        recipe = tmp_path / "r.toml"
        recipe.write_text(text)
        with pytest.raises(ConfigError, match=message):
            check_recipe(recipe, FLAGS)


def test_no_file_has_code_of_others_run(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    readers = (
        lambda: check_recipe(recipe, FLAGS),
        lambda: read_quality(recipe),
        lambda: read_sweep(recipe, tiny=True),
        lambda: Pipeline("run", tmp_path),  # what another call recorded
    )
    for text in (
        "[cache]\ntrust_remote_code = true\n",
        '[convert]\ntrust-remote-code = "yes"\n',
        "[train]\ntrust_remote-code = 1\n",
        '[eval]\ntasks_dir = "theirs"\n',
        "[settings]\ntrust_remote_code = true\n",
        "[product]\ntrust_remote_code = [false, true]\n",
        '[[groups]]\nname = "a"\nsettings = { trust_remote_code = true }\n',
        '[[recipes]]\nname = "a"\nstages = [{ convert = { trust_remote_code = true } }]\n',
    ):
        recipe.write_text(text)
        for read in readers:
            with pytest.raises(ConfigError, match="runs code of others"):
                read()


def test_recipe_fills_flags_and_flags_win(tmp_path: Path, monkeypatch, capsys) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[report]\nout = "from-recipe.html"\n')
    monkeypatch.setattr(app, "config", app.config)
    seen = []
    monkeypatch.setattr("qat.observe.runs.read_directory", lambda path: path)
    monkeypatch.setattr(
        "qat.observe.page.write_report", lambda runs, out: seen.append(out) or sys.exit(0)
    )
    call(monkeypatch, "--recipe", str(recipe), "report", "a")
    call(monkeypatch, "--recipe", str(recipe), "report", "a", "--out", "from-flag.html")
    assert seen == [Path("from-recipe.html"), Path("from-flag.html")]


def test_committed_recipes_name_real_flags() -> None:
    for recipe in sorted(
        path for path in RECIPES.glob("*.toml") if not path.stem.startswith(("quality_", "sweep_"))
    ):
        check_recipe(recipe, verb_flags())


def test_a_notebook_brings_no_pictures_backend(monkeypatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://of_another_environment")
    assert call(monkeypatch, "--version") == 0
    assert "MPLBACKEND" not in os.environ


def test_a_full_disk_is_one_line(monkeypatch, capsys) -> None:
    def no_space(*_: object) -> dict:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(qat.cli, "parsed", no_space)
    assert call(monkeypatch, "report", "a") == 1
    assert capsys.readouterr().err.startswith("qat: the disk is full; free some space")


def test_another_operating_system_error_keeps_its_traceback(monkeypatch) -> None:
    def broken(*_: object) -> dict:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(qat.cli, "parsed", broken)
    with pytest.raises(OSError, match="Input/output error"):
        call(monkeypatch, "report", "a")


def test_what_the_machine_refuses_is_one_line(monkeypatch, capsys) -> None:
    for error, message in (
        (PermissionError(13, "Permission denied", "/root/x"), "/root/x: Permission denied; check"),
        (torch.OutOfMemoryError("full"), "memory ran out; lower --batch-size"),
        (MemoryError(), "memory ran out; lower --batch-size"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared"), "memory ran out"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory ran out"),
        (RuntimeError("can't start new thread"), "memory ran out"),
    ):
        monkeypatch.setattr(qat.cli, "parsed", Mock(side_effect=error))
        assert call(monkeypatch, "report", "a") == 1
        assert capsys.readouterr().err.startswith(f"qat: {message}")


@pytest.mark.parametrize(("gaps", "is_named"), [("1.25 GiB", True), ("200.00 MiB", False)])
def test_large_gaps_of_the_allocator_name_its_setting(
    monkeypatch, capsys, gaps: str, is_named: bool
) -> None:
    """The sentence is that of PyTorch."""
    said = f"Of the allocated memory 9.00 GiB is allocated by PyTorch, and {gaps} is reserved by "
    error = torch.OutOfMemoryError(f"CUDA out of memory. {said}PyTorch but unallocated. If")
    monkeypatch.setattr(qat.cli, "parsed", Mock(side_effect=error))
    assert call(monkeypatch, "report", "a") == 1
    printed = capsys.readouterr().err
    assert (f"1.25 GiB in gaps of the allocator, which {GAPS} closes" in printed) == is_named


def test_closed_outputs_are_no_traceback(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "qat", "hub", "list"]
    for closed in (">&-", "2>&-"):
        command = f"{shlex.join(words)} {closed}"
        found = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path
        )
        assert found.returncode == 0 and "Traceback" not in found.stderr


def test_a_tilde_that_the_shell_left_is_the_home_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    called = parsed(["convert", "~/model", "--to", "q2a4", "--out=~/made"])
    assert (*called.args, called.keywords["out"]) == (f"{tmp_path}/model", tmp_path / "made")
    config = parsed(["generate", "./~", "--prompt", "~/ is"]).keywords["config"]
    assert config.prompt == "~/ is"
