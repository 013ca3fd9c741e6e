"""From the words of a command line to the call of a verb, or to a line about what is wrong in them.

A recipe (`--recipe FILE.toml`) holds one table per verb with the names of its flags; flags win.
"""

import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import cyclopts
from cyclopts import App, ArgumentCollection, CycloptsError
from cyclopts.help import DefaultFormatter, HelpPanel
from pydantic import ValidationError

import qat
from qat.config import OTHERS, explain, refuse_code
from qat.errors import ConfigError, QatError
from qat.files import parse_toml

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


class PlainHelp(DefaultFormatter):
    """Help without what every switch has: a negative, and `False` as its default."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: HelpPanel) -> None:
        """Print one box of flags or verbs."""
        entries = [
            each.copy(
                negative_names=(), default=None if each.default in {"False", '""'} else each.default
            )
            for each in panel.entries
        ]
        super().__call__(console, options, panel.copy(entries=entries))


app = App(
    name="qat",
    help="Quantization-aware distillation: causal language models at 2-4 bits per weight.",
    help_epilogue="Start with 'qat demo'; 'qat VERB --help' says more of each.",
    help_formatter=PlainHelp(),
    help_format="plaintext",  # of the list of verbs: Markdown takes a sixth of the time to read in
    version=f"qat {qat.__version__}",
    group_parameters=OTHERS,
    suppress_keyboard_interrupt=False,
)
"""`qat`; its verbs are added in `qat.cli`, which imports them."""


def run_verb(tokens: Sequence[str], recipe: Path | None = None) -> dict[str, object]:
    """Parse and run one command line without its `qat`; what the verb found out.

    Raises:
        QatError: the user's mistakes.
    """
    found = parsed(tokens, recipe)()
    return found if isinstance(found, dict) else {}


def parsed(tokens: Sequence[str], recipe: Path | None = None) -> Callable[[], object]:
    """The call of the verb that one command line names.

    Args:
        tokens: the words behind `qat`.
        recipe: TOML file whose tables say what the words do not.

    Raises:
        QatError: the user's mistakes.
    """
    if tokens[:1] == ["train"]:  # `--resume` alone means `--resume latest`
        tokens = [
            "--resume=latest" if token == "--resume" and after not in ("auto", "latest") else token
            for token, after in zip(tokens, [*tokens[1:], ""], strict=True)
        ]
    app.config = None
    if recipe is not None:
        check_recipe(recipe, verb_flags())
        app.config = cyclopts.config.Toml(recipe, must_exist=True, use_commands_as_keys=True)
    try:
        verb, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    except (QatError, CycloptsError) as error:
        # first the flag that is unknown: the parser may have stumbled over what it led to
        unknown = _unknown_flag(tokens)
        if unknown is not None:
            raise ConfigError(unknown) from error
        if isinstance(error, QatError):
            raise
        raise ConfigError(mistake(tokens, error)) from error
    return partial(verb, *bound.args, **bound.kwargs)


def print_result(found: object) -> None:
    """Write what a verb returned as one line of JSON, paths as strings; nothing if it is empty."""
    if found and isinstance(found, dict):
        sys.stdout.write(json.dumps(found, default=str) + "\n")
        sys.stdout.flush()


@cache
def verb_flags() -> dict[str, set[str]]:
    """The names of each verb's flags without dashes in front; of `--a.b` the `a`."""
    found = {}
    for verb in _commands(app):
        has_flags = app[verb].default_command is not None  # else only the verbs below it have some
        names = _flag_names(app[verb].assemble_argument_collection()) if has_flags else []
        found[verb] = {name.removeprefix("--").split(".")[0] for name in names}
    return found


def check_recipe(path: Path, flags: Mapping[str, Iterable[str]]) -> None:
    """Read `path` and compare it with `flags`: the names of the flags of each verb.

    A key is a flag's name with `_` or `-` between its words.

    Raises:
        ConfigError: the file is missing or no TOML, a table or key has no such name, or a key
            would run code of others.
    """
    if not path.is_file():
        raise ConfigError(f"recipe={path} is not there; expected a TOML file; check the path")
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"recipe={path} is not TOML: {error}; mend that line") from None
    refuse_code(tables, str(path))
    for verb, values in tables.items():
        if verb not in flags:
            raise ConfigError(f"{path}: no verb is called [{verb}]; {_meant(verb, flags)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {verb} must be a table; write [{verb}] above its keys")
        names = {flag.replace("-", "_") for flag in flags[verb]}
        for key in values:
            if key.replace("-", "_") not in names:
                raise ConfigError(f"{path}: [{verb}] has no key {key!r}; {_meant(key, names)}")


def _meant(name: str, known: Iterable[str]) -> str:
    found = _nearest(name, known)
    return f"did you mean {found!r}?" if found else f"known are {', '.join(sorted(known))}"


def mistake(tokens: Sequence[str], error: CycloptsError) -> str:
    """One line about what stopped the parser, in the names that the user types."""
    words, known = _known(tokens)
    verb = " ".join(words)
    wrong = _unknown_word(words, tokens)
    if wrong is not None:
        return wrong
    if isinstance(error, cyclopts.UnusedCliTokensError):
        # what stands behind the verb may be one below it, with a typing error
        meant = _nearest(tokens[len(words)], _commands(_verb(words)))
        hint = f", or did you mean '{' '.join(('qat', *words, meant))}'?" if meant else ""
        return f"{error.unused_tokens[0]!r} is a word more than 'qat {verb}' takes; drop it{hint}"
    missing = _missing(error, known)
    if missing is None:
        cause = error.__cause__
        return explain(cause) if isinstance(cause, ValidationError) else str(error)
    given = {token.partition("=")[0] for token in tokens}
    if given & set(missing):
        return f"{missing[0]} is given without a value; write it behind, as in {missing[0]} VALUE"
    return f"{missing[0]} is missing; 'qat {verb} --help' says what it is"


def _missing(error: CycloptsError, known: ArgumentCollection) -> tuple[str, ...] | None:
    """The names of the argument that `error` found to be missing, as they are typed."""
    if isinstance(error, cyclopts.MissingArgumentError) and error.argument is not None:
        names = error.argument.names
        if error.argument.field_info.is_positional:
            return (names[0].removeprefix("--").upper().replace("-", "_"), *names)
        return tuple(names)
    cause = error.__cause__
    if isinstance(cause, ValidationError):
        for item in cause.errors():
            if item["type"] == "missing":
                flag = "--" + ".".join(str(part) for part in item["loc"]).replace("_", "-")
                return tuple(known.match(flag)[0].names)
    return None


def _unknown_word(words: Sequence[str], tokens: Sequence[str]) -> str | None:
    """A line about the word behind `words`, where it can only be the name of a verb."""
    verb = _verb(words)
    rest = [token for token in tokens if token not in words]
    commands = _commands(verb)
    takes_words = verb.default_command is not None and any(
        argument.field_info.is_positional for argument in verb.assemble_argument_collection()
    )
    if not commands or takes_words or not rest or rest[0].startswith("-"):
        return None
    whole = " ".join(("qat", *words))
    found = _nearest(rest[0], commands)
    hint = f"did you mean '{whole} {found}'?" if found else f"there are {', '.join(commands)}"
    return f"{whole} has no verb {rest[0]!r}; {hint}"


def _unknown_flag(tokens: Sequence[str]) -> str | None:
    """A line about the first flag in `tokens` that their verb does not have; None for none."""
    words, known = _known(tokens)
    for token in takewhile(lambda each: each != "--", tokens):
        flag = token.partition("=")[0]
        # a negative number or a sentence is no flag
        is_flag = flag[:1] == "-" and flag.lstrip("-")[:1].isalpha() and " " not in flag
        if not is_flag or _matches(known, flag):
            continue
        if here := HERE.get(flag.replace("_", "-")):
            return f"unknown flag {flag}; in qat: {here} (docs/migrating.md has the others)"
        found = _nearest(f"--{flag.lstrip('-')}", _flag_names(known), cutoff=0.6)
        where = f"'{' '.join(('qat', *words, '--help'))}' lists the known ones"
        return f"unknown flag {flag}; {f'did you mean {found}?' if found else where}"
    return None


def _matches(known: ArgumentCollection, flag: str) -> bool:
    if flag in {"--help", "-h", "--version", "--install-completion"}:
        return True
    try:
        known.match(flag)
    except ValueError:
        return False
    return True


def _known(tokens: Sequence[str]) -> tuple[tuple[str, ...], ArgumentCollection]:
    """The verb that `tokens` name, and its flags beside those of every verb."""
    words = app.parse_commands(list(tokens))[0]
    verb = _verb(words)
    known = app.meta.assemble_argument_collection()
    if verb.default_command is not None and verb is not app:
        known.extend(verb.assemble_argument_collection())
    return words, known


def _verb(words: Sequence[str]) -> App:
    return reduce(lambda verb, word: verb[word], words, app)


def _commands(verb: App) -> list[str]:
    return [name for name in verb if not name.startswith("-")]


def _flag_names(known: ArgumentCollection) -> list[str]:
    return [name for argument in known for name in argument.names if name.startswith("--")]


def _nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of `known` that `name` was probably meant to be."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return close[0] if close else None


STUDENT = "the checkpoint is the first word behind the verb: qat train CHECKPOINT"
IN_THE_CHECKPOINT = "formats are chosen by qat convert --to and then stand in the checkpoint"

HERE: dict[str, str] = {
    "--v1-checkpoint": f"{STUDENT}, made by qat convert FILE.pt --from anemll",
    "--v2-checkpoint": f"{STUDENT}, made by qat convert FILE.pt --from anemll",
    "--load-model": f"{STUDENT} or qat bench CHECKPOINT; a .pt after qat convert --from anemll",
    "--q4-checkpoint": "the checkpoint is the first word behind the verb: qat convert CHECKPOINT",
    "--model-id": "--base of qat convert; qat train and qat bench take a checkpoint as first word",
    "--config": IN_THE_CHECKPOINT,
    "--mlp-lut": IN_THE_CHECKPOINT,
    "--mlp-rank": IN_THE_CHECKPOINT,
    "--mlp-lut-bits": IN_THE_CHECKPOINT,
    "--attn-lut": IN_THE_CHECKPOINT,
    "--attn-rank": IN_THE_CHECKPOINT,
    "--attn-lut-bits": IN_THE_CHECKPOINT,
    "--q4-rank": IN_THE_CHECKPOINT,
    "--q2-mlp-rank": IN_THE_CHECKPOINT,
    "--q2-attn-rank": IN_THE_CHECKPOINT,
    "--from-scratch": "qat convert HUB_ID --to PRESET, then qat train",
    "--output": "--out",
    "--output-dir": "--out",
    "--resume-from": "--resume of qat train",
    "--accumulation-steps": "--grad-accum-steps",
    "--attn-only": "--attention-only",
    "--constant-lr": "--schedule constant",
    "--hard-top1": "--loss candidates:1,hard_ce:0.2",
    "--hard-full": "--loss candidates:1,hard_ce:0.2",
    "--train-weights": "--learn weights,scales,codebook, the default",
    "--train-lut": "--learn codebook",
    "--train-norms-only": "--learn norms",
    "--recovery-r": "--learn lora --lora-rank R",
    "--mixed-precision": "--dtype bf16",
    "--no-mixed-precision": "--dtype fp32",
    "--eval-steps": "--eval-every of qat train",
    "--eval-samples": "--eval-sequences of qat train",
    "--save-steps": "--save-every of qat train",
    "--keep-checkpoints": "--keep of qat train",
    "--wandb-run": "--wandb-name of qat train",
    "--tpu": "--device xla",
    "--skip-checkpointing": "the default; --gradient-checkpointing asks for it",
    "--teacher-model-name-or-path": "--teacher",
    "--kd-cache-dir": "--cache-dir",
    "--dataset-name": "--data",
    "--dataset-format": "--format of qat cache",
    "--dataset-text-field": "--text-field of qat cache",
    "--enable-thinking": "--thinking of qat cache",
    "--max-length": "--sequence-length of qat cache",
    "--topk": "--top-k",
    "--rand-neg": "--draws of qat cache, which draws from the teacher",
    "--text-file": "--text of qat eval",
    "--baseline": "--teacher of qat eval",
}
"""Flags of the reference system: what does the same in qat."""
