"""One line for a command line that cannot be parsed: what is wrong in it, and what was meant."""

import shlex
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import takewhile
from typing import NamedTuple

import cyclopts
from cyclopts import App, ArgumentCollection, CycloptsError
from cyclopts.argument import Argument
from pydantic import ValidationError

from qat.config import Knows, explain
from qat.errors import nearest
from qat.hooks import HOW_TO_INSTALL, hooks

EXTENSION_OF = {"sample": "decode", "verify-export": "verify", "bench": "bench"}
"""The extensions that add verbs, for where they are not installed."""


class Mistake(NamedTuple):
    """A command line that the parser refused."""

    app: App
    tokens: Sequence[str]  # the words behind `qat`
    error: CycloptsError
    arguments: Sequence[Argument] = ()
    """The arguments of the verb with what they were given; none if parsing stopped before."""

    def __str__(self) -> str:
        words, known = known_flags(self.app, self.tokens)
        error, cause = self.error, self.error.__cause__
        if isinstance(error, cyclopts.MissingArgumentError | cyclopts.UnusedCliTokensError) or (
            isinstance(cause, ValidationError) and cause.errors()[0]["type"] == "missing"
        ):
            return self._incomplete(words, known)
        if isinstance(cause, ValidationError):
            return explain(cause)
        if isinstance(error, cyclopts.RepeatArgumentError):
            return f"{error.token.keyword} is given twice, expected once; drop one"
        if isinstance(error, cyclopts.CoercionError | cyclopts.ValidationError) and error.argument:
            return _bad_value(error)
        return str(error)

    def _incomplete(self, words: Sequence[str], known: ArgumentCollection) -> str:
        """A line about words too many and flags too few, which one mistake may cause together."""
        unvalued = self._unvalued()
        if unvalued:
            return f"{unvalued} is given without a value; write it behind, as in {unvalued} VALUE"
        missing = [each for each in self.arguments or known if _is_missing(each)]
        parts = []
        if surplus := self.error.unused_tokens:
            hint = self._surplus(words, surplus, missing)
            missing = [each for each in missing if each.name not in hint.split()]
            verb = " ".join(("qat", *words))
            stop = "." if missing and not hint.endswith("?") else ""
            parts.append(f"{surplus[0]!r} is a word more than '{verb}' takes; {hint}{stop}")
        if missing:
            names = [*map(_name, missing)]
            are = "is" if len(names) == 1 else "are"
            last = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
            example = str(_verb(self.app, words).help_epilogue or "").removeprefix("Example: ")
            parts.append(f"{last} {are} missing; for example: {example}")
        return " And ".join(parts) or str(self.error)

    def _unvalued(self) -> str | None:
        """The flag behind which the parser found no value."""
        argument = self.error.argument
        if not isinstance(self.error, cyclopts.MissingArgumentError) or argument is None:
            return None
        given = [token for token in self.tokens if token.partition("=")[0] in argument.names]
        return given[0].partition("=")[0] if given else None

    def _surplus(
        self, words: Sequence[str], surplus: Sequence[str], missing: Sequence[Argument]
    ) -> str:
        """Suggest what was probably meant by the first word that no argument takes."""
        word = surplus[0]
        free = [each for each in self.arguments if not each.has_tokens and not each.children]
        if (meant := _value_of(word, free)) is not None:
            return f"did you mean {meant}?"
        # behind the verb there may be one below it, with a typing error
        below = nearest(self.tokens[len(words)], commands(_verb(self.app, words)))
        if below:
            return f"drop it, or did you mean '{' '.join(('qat', *words, below[0]))}'?"
        flags = [each.name for each in missing if not each.field_info.is_positional]
        if len(flags) == len(surplus):
            pairs = [part for pair in zip(flags, surplus, strict=True) for part in pair]
            return f"did you mean {shlex.join(pairs)}?"
        at = self.tokens.index(word)
        if at >= 2 and self.tokens[at - 2].startswith("--"):
            flag, *text = self.tokens[at - 2 : at - 1 + len(surplus) + 1]
            return f"drop it, or quote the words of one value: {shlex.join([flag, ' '.join(text)])}"
        return "drop it"


def unknown_verb(app: App, tokens: Sequence[str]) -> str | None:
    """Return a line about the first word that can only be the name of a verb and is none."""
    words = app.parse_commands(list(tokens))[0]
    verb = _verb(app, words)
    rest = tokens[len(words) :]
    known = commands(verb)
    if not known or not rest or rest[0].startswith("-"):
        return None
    if verb is app and (owner := EXTENSION_OF.get(rest[0])) is not None:
        return (
            f"'qat {rest[0]}' is a verb of the extension {owner!r}, which is not installed; "
            f"{HOW_TO_INSTALL}"
        )
    if verb is not app and verb.default_command is not None:
        arguments = verb.assemble_argument_collection()
        if any(argument.field_info.is_positional for argument in arguments):
            return None
    whole = " ".join(("qat", *words))
    found = nearest(rest[0], known)
    if verb.default_command is not None and not found:  # then it is a value without its flag
        return None
    hint = f"did you mean '{whole} {found[0]}'?" if found else f"there are {', '.join(known)}"
    return f"{whole} has no verb {rest[0]!r}; {hint}"


def unknown_flag(app: App, tokens: Sequence[str]) -> str | None:
    """Return a line about the first flag in `tokens` that their verb does not have."""
    words, known = known_flags(app, tokens)
    for token in takewhile(lambda each: each != "--", tokens):
        flag = token.partition("=")[0]
        # a negative number or a sentence is no flag
        is_flag = flag[:1] == "-" and flag.lstrip("-")[:1].isalpha() and " " not in flag
        if not is_flag or _matches(known, flag):
            continue
        typed = flag.replace("_", "-")
        for theirs in hooks("qat.flags").values():
            module = theirs.load()
            if here := module.FLAGS.get(typed):
                return f"unknown flag {flag}; in qat: {here} ({module.PAGE} has the others)"
        if here := COMMON.get(typed):
            return f"unknown flag {flag}; in qat: {here}"
        found = nearest(flag, [*flag_names(known), *ALWAYS])
        where = f"'{' '.join(('qat', *words, '--help'))}' lists the known ones"
        return f"unknown flag {flag}; {f'did you mean {found[0]}?' if found else where}"
    return None


def known_flags(app: App, tokens: Sequence[str]) -> tuple[tuple[str, ...], ArgumentCollection]:
    """Return the verb that `tokens` name, and its flags with those that all verbs share."""
    words = app.parse_commands(list(tokens))[0]
    verb = _verb(app, words)
    known = app.meta.assemble_argument_collection()
    if verb.default_command is not None and verb is not app:
        known.extend(verb.assemble_argument_collection())
    return words, known


def commands(verb: App) -> list[str]:
    """Return the names of the verbs below `verb`."""
    return [name for name in verb if not name.startswith("-")]


def flag_names(known: ArgumentCollection) -> list[str]:
    """Return all names of flags, with their dashes."""
    return [name for argument in known for name in argument.names if name.startswith("--")]


def _matches(known: ArgumentCollection, flag: str) -> bool:
    if flag in {*ALWAYS, "-h"}:
        return True
    try:
        known.match(flag)
    except ValueError:
        return False
    return True


def _verb(app: App, words: Sequence[str]) -> App:
    return reduce(lambda verb, word: verb[word], words, app)


def _is_missing(argument: Argument) -> bool:
    return argument.required and not argument.has_tokens and not argument.children


def _name(argument: Argument) -> str:
    """The name of an argument as it is typed: a flag, or a word in capitals."""
    if argument.field_info.is_positional:
        return argument.name.removeprefix("--").upper().replace("-", "_")
    return argument.name


def _value_of(word: str, arguments: Iterable[Argument]) -> str | None:
    """The flag and value that `word` may be, by the names that the arguments know."""
    by_name = {}
    for argument in arguments:
        for name in _known_values(argument):
            by_name.setdefault(name, argument.name)
    found = nearest(word, by_name)
    return f"{by_name[found[0]]} {found[0]}" if found else None


def _known_values(argument: Argument) -> tuple[str, ...]:
    """Return all names that an argument takes, or those it knows if it takes others too."""
    metadata = getattr(argument.field_info.annotation, "__metadata__", ())
    known = [each.names for each in metadata if isinstance(each, Knows)]
    return known[0] if known else argument.get_choices(force=True) or ()


def _bad_value(error: cyclopts.CoercionError | cyclopts.ValidationError) -> str:
    argument = error.argument
    token = getattr(error, "token", None) or next(iter(argument.tokens), None)
    given = f"{_name(argument)} {token.value if token else ''}".strip()
    known = _known_values(argument)
    if known:
        found = nearest(token.value if token else "", known)
        hint = f"; did you mean {found[0]}?" if found else ""
        return f"{given}: expected {', '.join(known[:-1])} or {known[-1]}{hint}"
    if isinstance(error, cyclopts.ValidationError):
        return f"{given}: {error.exception_message.rstrip('.').lower()}"
    kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(error.target_type)
    return f"{given}: expected {kind}" if kind else str(error)


ALWAYS = ("--help", "--version", "--install-completion")  # of every verb

MODEL = "the model is the first word behind the verb; in qat cache it is --teacher"

COMMON: dict[str, str] = {  # flags of other programs: what does the same in qat
    "--model": MODEL,
    "--model-name-or-path": MODEL,
    "--checkpoint": MODEL,
    "--epochs": "--max-steps of qat train",
    "--num-train-epochs": "--max-steps of qat train",
    "--learning-rate": "--lr of qat train",
    "--gpu": "--device cuda",
    "--quantize": "--to of qat convert",
    "--bits": "--to of qat convert, a preset such as q2a4 or q4a4",
}
