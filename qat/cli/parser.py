"""Parse a command line into the call of a verb, or report its mistake in one line.

A recipe (`--recipe FILE.toml`) holds one table per verb with the names of its flags; flags win.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import cyclopts
from cyclopts import App, CycloptsError, Group
from cyclopts.argument import Argument
from cyclopts.help import DefaultFormatter, HelpPanel

import qat
from qat.errors import ConfigError, QatError

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


PROSE = {"--prompt", "--sample-prompt", "--note"}  # flags whose text may begin with any character

# Headings of every help, behind those of qat.config, which cyclopts numbers from 0. They are here
# because the list of verbs needs no settings: pydantic takes a fifth of the time of `qat --help`.
OTHERS = Group("Others", sort_key=(None, 1000))  # heading of settings without another one
EVERY_VERB = Group("Every verb", sort_key=(None, 1001))

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


def run_verb(
    tokens: Sequence[str], recipe: Path | None = None, **unparsed: object
) -> dict[str, object]:
    """Parse and run one command line without its `qat`; what the verb found out.

    `unparsed` are arguments of the verb that no flag sets.

    Raises:
        QatError: the user's mistakes.
    """
    found = parsed(tokens, recipe)(**unparsed)
    return found if isinstance(found, dict) else {}


def parsed(tokens: Sequence[str], recipe: Path | None = None) -> Callable[..., object]:
    """The call of the verb that one command line names.

    Args:
        tokens: the words behind `qat`.
        recipe: TOML file whose tables say what the words do not.

    Raises:
        QatError: the user's mistakes.
    """
    from qat.cli.mistakes import unknown_flag, unknown_verb

    if tokens[:1] == ["train"]:  # `--resume` alone means `--resume latest`
        tokens = [
            "--resume=latest" if token == "--resume" and after not in ("auto", "latest") else token
            for token, after in zip(tokens, [*tokens[1:], ""], strict=True)
        ]
    if (unknown := unknown_verb(app, tokens)) is not None:
        raise ConfigError(unknown)
    seen: list[Argument] = []
    sources: list[Callable] = [expand_home, lambda _app, _words, arguments: seen.extend(arguments)]
    if recipe is not None:
        tables = check_recipe(recipe, verb_flags())
        toml = cyclopts.config.Dict(tables, use_commands_as_keys=True)
        toml.source = str(recipe.absolute())
        sources.insert(0, toml)
    app.config = sources
    try:
        verb, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    except (QatError, CycloptsError) as error:
        # first the flag that is unknown: the parser may have stumbled over what it led to
        unknown = unknown_flag(app, tokens)
        if unknown is not None:
            raise ConfigError(unknown) from error
        if isinstance(error, QatError):
            raise
        raise ConfigError(mistake(tokens, error, seen)) from error
    return partial(verb, *bound.args, **bound.kwargs)


def expand_home(_app: App, _words: Sequence[str], arguments: Iterable[Argument]) -> None:
    """Replace the `~` that begins a path: shells leave it in quotes, and bash behind `--flag=`."""
    for argument in arguments:
        if argument.name not in PROSE:
            argument.tokens = [
                token.evolve(value=os.path.expanduser(token.value))  # noqa: PTH111 - maybe no path
                for token in argument.tokens
            ]


def mistake(tokens: Sequence[str], error: CycloptsError, arguments: Sequence[Argument] = ()) -> str:
    """Return one line about what stopped the parser, in the names that the user types."""
    from qat.cli.mistakes import Mistake

    return str(Mistake(app, tokens, error, arguments))


def print_result(found: object) -> None:
    """Write what a verb returned as one line of JSON, paths as strings; nothing if it is empty."""
    if found and isinstance(found, dict):
        sys.stdout.write(json.dumps(found, default=str) + "\n")
        sys.stdout.flush()


@cache
def verb_flags() -> dict[str, set[str]]:
    """The names of each verb's flags without dashes in front; of `--a.b` the `a`."""
    from qat.cli.mistakes import commands, flag_names

    found = {}
    for verb in commands(app):
        has_flags = app[verb].default_command is not None  # else only the verbs below it have some
        names = flag_names(app[verb].assemble_argument_collection()) if has_flags else []
        found[verb] = {name.removeprefix("--").split(".")[0] for name in names}
    return found


def check_recipe(path: Path, flags: Mapping[str, Iterable[str]]) -> dict[str, object]:
    """Read the tables of `path` and compare them with `flags`: those of each verb by name.

    A key is a flag's name with `_` or `-` between its words.

    Raises:
        ConfigError: the file is missing or no TOML, a table or key has no such name, or a key
            would run code of others.
    """
    from qat.config import meant, read_toml
    from qat.files import described

    if not path.is_file():
        raise ConfigError(f"recipe={path} {described(path)}, expected a TOML file; check the path")
    tables = read_toml(path, f"recipe={path}", "a table for each verb")
    for verb, values in tables.items():
        if verb not in flags:
            raise ConfigError(f"{path}: no verb is called [{verb}]; {meant(verb, flags)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {verb} must be a table; write [{verb}] above its keys")
        names = {flag.replace("-", "_") for flag in flags[verb]}
        for key in values:
            if key.replace("-", "_") not in names:
                raise ConfigError(f"{path}: [{verb}] has no key {key!r}; {meant(key, names)}")
    return tables
