"""Flags of the reference are answered with what they are called here."""

import re
from pathlib import Path

from cli_case import call

from qat.cli import VERBS, app
from qat.cli.mistakes import COMMON
from qat.extensions.anemll.flags import FLAGS

PAGE = Path(__file__).parents[3] / "qat" / "extensions" / "anemll" / "README.md"
MIGRATING = PAGE.read_text(encoding="utf-8")


def test_a_flag_of_theirs_names_ours(monkeypatch, capsys) -> None:
    for tokens, said in (
        (["train", "--v2-checkpoint", "a.pt"], "the first word behind the verb: qat train"),
        (["convert", "--q4-checkpoint", "a"], "the first word behind the verb: qat convert"),
        (["bench", "--load-model", "a.pt"], "or qat bench CHECKPOINT; a .pt after qat convert"),
        (["train", "x", "--wandb-run=a", "--cache-dir", "c"], "in qat: --wandb-name of qat train"),
        (["train", "x", "--num_train_epochs", "3"], "in qat: --max-steps of qat train"),
        (["cache", "--dataset_name", "a"], "unknown flag --dataset_name; in qat: --data (qat/"),
    ):
        assert call(monkeypatch, *tokens) == 1
        line = capsys.readouterr().err
        assert line.startswith("qat: unknown flag --") and said in line and line.count("\n") == 1


def test_the_page_has_every_flag() -> None:
    theirs = {name.replace("_", "-") for name in re.findall(r"--[\w-]+", MIGRATING)}
    assert set(FLAGS) <= theirs


def test_what_is_named_exists() -> None:
    verbs = [app[name] for name in VERBS]
    verbs = [verb for verb in verbs if verb.default_command is not None]
    known = {n for v in verbs for a in v.assemble_argument_collection() for n in a.names}
    assert {
        flag
        for text in [*FLAGS.values(), *COMMON.values()]
        for flag in re.findall(r"--[\w-]+", text)
    } <= known
