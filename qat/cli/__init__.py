"""The command line: each verb parses into a typed config, makes one call, prints JSON last.

A recipe (`--recipe FILE.toml`) holds one table per verb with the names of its flags; flags win.
Nothing heavy is imported before a verb runs.
"""

import errno
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import App, Parameter

import qat
from qat import logs
from qat.backend.libtpu import before_torch
from qat.backend.threads import keep_to_own_cores
from qat.cli.bench import bench_app
from qat.cli.cache import cache_app
from qat.cli.convert import convert
from qat.cli.demo import demo
from qat.cli.eval import evaluate
from qat.cli.export import export
from qat.cli.generate import generate
from qat.cli.hub import hub_app
from qat.cli.mistakes import mistake, unknown_flag
from qat.cli.recipe import check_recipe
from qat.cli.report import report
from qat.cli.result import print_result
from qat.cli.train import train
from qat.errors import ConfigError, QatError
from qat.secrets import Scrub, scrubbed

SCRUB = Scrub()
app = App(
    name="qat",
    help="Quantization-aware distillation: causal language models at 2-4 bits per weight.",
    version=qat.__version__,
    suppress_keyboard_interrupt=False,
)
app.meta.suppress_keyboard_interrupt = False  # main says it in a line
app.command(cache_app, name="cache")
app.command(convert)
app.command(train)
app.command(bench_app, name="bench")
app.command(evaluate, name="eval")
app.command(generate)
app.command(export)
app.command(report)
app.command(hub_app, name="hub")
app.command(demo)
VERBS = (
    "cache",
    "convert",
    "train",
    "bench",
    "eval",
    "generate",
    "export",
    "report",
    "hub",
    "demo",
)


def run_verb(tokens: list[str]) -> dict[str, object]:
    """Parse and run one command line without its `qat`; what the verb found out.

    Raises:
        QatError: the user's mistakes.
    """
    tokens = _with_resume(tokens)
    try:
        found = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except (QatError, cyclopts.CycloptsError) as error:
        unknown = unknown_flag(app, tokens)  # the parser may have stumbled over what it led to
        if unknown is not None:
            raise ConfigError(unknown) from error
        if isinstance(error, QatError):
            raise
        raise ConfigError(mistake(app, tokens, error)) from error
    return found if isinstance(found, dict) else {}


def _with_resume(tokens: list[str]) -> list[str]:
    """The tokens, where `--resume` alone means `--resume auto`."""
    if tokens[:1] != ["train"]:
        return tokens
    following = [*tokens[1:], ""]
    pairs = zip(tokens, following, strict=True)
    return [
        "--resume=auto" if token == "--resume" and after != "auto" else token
        for token, after in pairs
    ]


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    recipe: Annotated[Path | None, Parameter(help="TOML file with one table per verb.")] = None,
    verbose: Annotated[bool, Parameter(help="Log more.", negative=())] = False,
) -> None:
    logs.configure(verbose)
    for handler in logging.getLogger().handlers:
        handler.addFilter(SCRUB)
    if recipe is not None:
        check_recipe(recipe, {verb: _flags(verb) for verb in VERBS})
        app.config = cyclopts.config.Toml(recipe, must_exist=True, use_commands_as_keys=True)
    if tokens[:1] == ("help",):
        tokens = (*tokens[1:], "--help")
    print_result(run_verb(list(tokens)))


def main() -> None:
    """Run the verb named on the command line; a user's mistake is one line and exit code 1."""
    # a notebook sets it to a module of its own, without which matplotlib cannot even be imported
    os.environ.pop("MPLBACKEND", None)  # noqa: TID251
    before_torch()
    keep_to_own_cores()
    try:
        app.meta(sys.argv[1:], exit_on_error=False, print_error=False)
    except QatError as error:
        _fail(str(error), code=error.exit_code)
    except cyclopts.CycloptsError as error:  # of the flags that every verb has
        _fail(mistake(app, sys.argv[1:], error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            where = f" ({error.filename})" if error.filename else ""
            _fail(
                f"the disk is full{where}; free some space, then go on with the same command "
                "(--resume)"
            )
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}; check the path and who may write there")
    except RuntimeError as error:
        _fail_if_out_of_memory(error)
        raise
    except KeyboardInterrupt:
        _fail("stopped by the keyboard", code=130)


def _flags(verb: str) -> set[str]:
    """The names of a verb's flags without dashes in front; of `--a.b` the `a`."""
    if app[verb].default_command is None:  # only the verbs below it have flags
        return set()
    arguments = app[verb].assemble_argument_collection()
    names = {name for argument in arguments for name in argument.names if name.startswith("--")}
    return {name.removeprefix("--").split(".")[0] for name in names}


def _fail_if_out_of_memory(error: RuntimeError) -> None:
    from qat.backend.device import select  # torch is loaded by now: it raised the error

    if select("cpu").is_out_of_memory(error):
        _fail(
            "device memory ran out; lower --batch-size (and raise --grad-accum-steps), or add "
            "--gradient-checkpointing"
        )


def _fail(message: str, code: int = 1) -> None:
    sys.stderr.write(f"qat: {scrubbed(' '.join(message.split()))}\n")
    sys.exit(code)
