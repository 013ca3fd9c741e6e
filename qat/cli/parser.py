"""What is wrong with a command line that cannot be parsed: the nearest flag, what is missing."""

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import takewhile
from pathlib import Path

from cyclopts import (
    App,
    ArgumentCollection,
    CycloptsError,
    MissingArgumentError,
    UnusedCliTokensError,
)
from pydantic import ValidationError

from qat.config import explain, refuse_code
from qat.errors import ConfigError
from qat.files import parse_toml

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


def unknown_flag(app: App, tokens: Sequence[str]) -> str | None:
    """A line about the first flag in `tokens` that their verb does not have; None for none."""
    words, known = _known(app, tokens)
    for token in takewhile(lambda each: each != "--", tokens):
        flag = token.partition("=")[0]
        if _is_flag(flag) and not _matches(known, flag):
            return f"unknown flag {flag}; {_nearest_flag(flag, known, words)}"
    return None


def mistake(app: App, tokens: Sequence[str], error: CycloptsError) -> str:
    """One line about what stopped the parser, in the names that the user types."""
    words, known = _known(app, tokens)
    verb = " ".join(words)
    wrong = _unknown_word(app, words, tokens)
    if wrong is not None:
        return wrong
    if isinstance(error, UnusedCliTokensError):
        return f"{error.unused_tokens[0]!r} is a word more than 'qat {verb}' takes; drop it" + (
            _perhaps_a_verb(app, words, tokens)
        )
    missing = _missing(error, known)
    if missing is None:
        cause = error.__cause__
        return explain(cause) if isinstance(cause, ValidationError) else str(error)
    given = {token.partition("=")[0] for token in tokens}
    if given & set(missing):
        return f"{missing[0]} is given without a value; write it behind, as in {missing[0]} VALUE"
    return f"{missing[0]} is missing; 'qat {verb} --help' says what it is"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of `known` that `name` was probably meant to be."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def _known(app: App, tokens: Sequence[str]) -> tuple[tuple[str, ...], ArgumentCollection]:
    """The verb that `tokens` name, and its flags beside those of every verb."""
    words = app.parse_commands(list(tokens))[0]
    verb = _verb(app, words)
    known = app.meta.assemble_argument_collection()
    if verb.default_command is not None and verb is not app:
        known.extend(verb.assemble_argument_collection())
    return words, known


def _verb(app: App, words: Sequence[str]) -> App:
    return reduce(lambda verb, word: verb[word], words, app)


def _is_flag(token: str) -> bool:
    """Whether a token can only have been meant as a flag: not a negative number, not a sentence."""
    return token[:1] == "-" and token.lstrip("-")[:1].isalpha() and " " not in token


def _matches(known: ArgumentCollection, flag: str) -> bool:
    if flag in {"--help", "-h", "--version", "--install-completion"}:
        return True
    try:
        known.match(flag)
    except ValueError:
        return False
    return True


def _nearest_flag(flag: str, known: ArgumentCollection, words: Sequence[str]) -> str:
    here = HERE.get(flag.replace("_", "-"))
    if here is not None:
        return f"in qat: {here} (docs/migrating.md has the others)"
    names = [name for argument in known for name in argument.names if name.startswith("--")]
    found = nearest(f"--{flag.lstrip('-')}", names, cutoff=0.6)
    hint = " ".join(("qat", *words, "--help"))
    return f"did you mean {found}?" if found else f"'{hint}' lists the known ones"


def _unknown_word(app: App, words: Sequence[str], tokens: Sequence[str]) -> str | None:
    """A line about the word behind `words`, where it can only be the name of a verb."""
    verb = _verb(app, words)
    rest = [token for token in tokens if token not in words]
    commands = [name for name in verb if not name.startswith("-")]
    takes_words = verb.default_command is not None and any(
        argument.field_info.is_positional for argument in verb.assemble_argument_collection()
    )
    if not commands or takes_words or not rest or rest[0].startswith("-"):
        return None
    whole = " ".join(("qat", *words))
    found = nearest(rest[0], commands)
    hint = f"did you mean '{whole} {found}'?" if found else f"there are {', '.join(commands)}"
    return f"{whole} has no verb {rest[0]!r}; {hint}"


def _perhaps_a_verb(app: App, words: Sequence[str], tokens: Sequence[str]) -> str:
    """What to add where the word behind `words` may be a verb below them, with a typing error."""
    verb = _verb(app, words)
    found = nearest(tokens[len(words)], [name for name in verb if not name.startswith("-")])
    return f", or did you mean '{' '.join(('qat', *words, found))}'?" if found else ""


def _missing(error: CycloptsError, known: ArgumentCollection) -> tuple[str, ...] | None:
    """The names of the argument that `error` found to be missing, as they are typed."""
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return _typed_names(error.argument.names, error.argument.field_info.is_positional)
    cause = error.__cause__
    if isinstance(cause, ValidationError):
        for item in cause.errors():
            if item["type"] == "missing":
                flag = "--" + ".".join(str(part) for part in item["loc"]).replace("_", "-")
                return _typed_names(known.match(flag)[0].names, is_word=False)
    return None


def _typed_names(names: Sequence[str], is_word: bool) -> tuple[str, ...]:
    if is_word:
        return (names[0].removeprefix("--").upper().replace("-", "_"), *names)
    return tuple(names)


# Checks a recipe before any verb reads it: every table is a verb, every key one of its flags.


def check_recipe(path: Path, flags: Mapping[str, Iterable[str]]) -> None:
    """Read `path` and compare it with `flags`: the names of the flags of each verb.

    A key is a flag's name with `_` or `-` between its words.

    Raises:
        ConfigError: the file is missing or no TOML, a table or key has no such name, or a key
            would run code of others.
    """
    tables = _load(path)
    refuse_code(tables, str(path))
    for verb, values in tables.items():
        if verb not in flags:
            raise ConfigError(f"{path}: no verb is called [{verb}]; {_nearest(verb, flags)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {verb} must be a table; write [{verb}] above its keys")
        names = {flag.replace("-", "_") for flag in flags[verb]}
        for key in values:
            if key.replace("-", "_") not in names:
                raise ConfigError(f"{path}: [{verb}] has no key {key!r}; {_nearest(key, names)}")


def _load(path: Path) -> dict:
    if not path.is_file():
        raise ConfigError(f"recipe={path} is not there; expected a TOML file; check the path")
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"recipe={path} is not TOML: {error}; mend that line") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"


# What a verb leaves on standard output: one JSON object on the last line.


def print_result(found: Mapping[str, object]) -> None:
    """Write what a verb returned as one line of JSON, paths as strings; nothing if it is empty."""
    if found:
        sys.stdout.write(json.dumps(found, default=str) + "\n")
        sys.stdout.flush()
