"""The command line: each verb parses into a typed config, makes one call, prints JSON last.

Nothing heavy is imported before a verb runs.
"""

import errno
import logging
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import CycloptsError, Parameter

from qat.backend.before_torch import before_torch, keep_bytecode, keep_to_own_cores
from qat.cli.parser import EVERY_VERB, app, mistake, parsed, print_result, run_verb
from qat.errors import QatError
from qat.hooks import hooks
from qat.process import GAPS, collect_rarely, gaps_gib, is_out_of_memory

__all__ = ["VERBS", "app", "main", "run_verb"]


UNREACHABLE = ("DistNetworkError", "DistStoreError")
"""Names of torch's errors of its network, which is loaded by a verb alone; gloo has none."""


class Verb(NamedTuple):
    """A verb whose module is imported when it is called or asked for its help."""

    path: str | None  # the function, or an app that names its own example; None: an extension's
    help: str  # its line in the list of verbs; the function's docstring begins with it
    example: str | None = None


VERBS = {  # in the order of a student's life
    "sample": Verb(
        None,
        "Write what MODEL says as rows that 'qat cache --data' reads; goes on where it stopped.",
        "qat sample MODEL --prompts FILE --out corpus.jsonl",
    ),
    "cache": Verb("cache:cache_app", "Build, import, inspect or verify a teacher cache."),
    "convert": Verb(
        "convert:convert",
        "Quantize SOURCE, or change its attention, without training; write a checkpoint.",
        "qat convert MODEL --to q2a4 --calibration FILE --out checkpoints/q2",
    ),
    "train": Verb(
        "train:train",
        "Train STUDENT, a packed checkpoint, against a teacher cache.",
        "qat train checkpoints/q2 --cache-dir caches/mine --out runs/q2",
    ),
    "eval": Verb(
        "eval:evaluate",
        "Judge STUDENT by a teacher cache, by its teacher, on a text, and on tasks.",
        "qat eval runs/q2 --cache-dir caches/mine --teacher MODEL",
    ),
    "export": Verb(
        "export:export",
        "Write MODEL in a deployable form, read it back and compare its logits with MODEL's.",
        "qat export runs/q2 --to gguf --out q2-gguf",
    ),
    "verify-export": Verb(
        None,
        "Compare FILE with REFERENCE, the model that it was made from; exit code 1 if they differ.",
        "qat verify-export MODEL q2-gguf/model.gguf",
    ),
    "generate": Verb(
        "generate:generate",
        "Continue a prompt with MODEL, printing as it goes; say how repetitive the result is.",
        "qat generate runs/q2 --prompt 'Once upon a time'",
    ),
    "report": Verb(
        "report:report",
        "Write one self-contained HTML page, and its pictures as PNG, about RUNS.",
        "qat report runs/q2",
    ),
    "hub": Verb("hub:hub_app", "Fetch, share, pack and unpack caches and checkpoints."),
    "bench": Verb(None, "Measure the training step of a student."),
    "env": Verb(
        None,
        "Say which versions, devices and memory are here, and what each extra would add.",
        "qat env",
    ),
    "run": Verb(
        "run:run",
        "Take MODEL to a student: cache its words on a text, quantize, train, judge, export.",
        "qat run MODEL --data FILE --out students/mine",
    ),
    "demo": Verb(
        "demo:demo",
        "Take a small teacher to a 2-bit student: up to nine minutes on two CPU cores.",
        "qat demo --out demo",
    ),
}
_of_extensions = hooks("qat.verbs")
VERBS = {name: verb for name, verb in VERBS.items() if verb.path or name in _of_extensions}

app.meta.suppress_keyboard_interrupt = False  # main says it in a line
app.command(
    "qat.cli.completion:install",
    name="--install-completion",
    help="Let the shell complete verbs and flags.",
)
for _number, (_name, _verb) in enumerate(VERBS.items()):
    _own = {}
    if _verb.example:
        _own = {"help_format": "markdown", "help_epilogue": f"Example: {_verb.example}"}
    _path = f"qat.cli.{_verb.path}" if _verb.path else _of_extensions[_name].value
    app.command(_path, name=_name, help=_verb.help, sort_key=_number, **_own)


@app.meta.default
def _call(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    recipe: Annotated[
        Path | None, Parameter(group=EVERY_VERB, help="TOML file with one table per verb.")
    ] = None,
    verbose: Annotated[bool, Parameter(group=EVERY_VERB, help="Log more.", negative=())] = False,
) -> Callable[[], object]:
    """The call that a command line stands for; what all verbs log is set up."""
    from qat import logs  # here and in _fail, as `qat --help` logs nothing
    from qat.secrets import SCRUB

    logs.configure(verbose)
    for handler in logging.getLogger().handlers:
        handler.addFilter(SCRUB)
    if tokens[:1] == ("help",):
        tokens = (*tokens[1:], "--help")
    verb = VERBS.get(tokens[0]) if tokens else None
    if verb is not None and verb.example:
        app[tokens[0]].help = None  # its page shows the whole docstring
    return parsed(list(tokens), recipe)


def main() -> None:
    """Run the verb named on the command line, and exit: by code 1 and one line for a mistake."""
    # a notebook sets it to a module of its own, without which matplotlib cannot even be imported
    os.environ.pop("MPLBACKEND", None)  # noqa: TID251
    _open_closed_outputs()
    collect_rarely()
    keep_bytecode()
    before_torch()
    keep_to_own_cores()
    try:
        how = {"exit_on_error": False, "print_error": False, "result_action": "return_value"}
        verb = app.meta(sys.argv[1:], **how)
        if verb is not None:  # as behind --help or --version
            print_result(verb())
        sys.exit(0)
    except QatError as error:
        _fail(str(error), code=error.exit_code)
    except CycloptsError as error:  # of the flags that every verb has
        _fail(mistake(sys.argv[1:], error))
    except BrokenPipeError:  # what reads our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail_if_out_of_memory(error)
        if error.errno == errno.ENOSPC:
            where = f" ({error.filename})" if error.filename else ""
            _fail(
                f"the disk is full{where}; free some space, then go on with the same command "
                "(--resume)"
            )
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}; check the path and who may write there")
    except (RuntimeError, MemoryError, ImportError) as error:
        _fail_if_out_of_memory(error)
        _fail_if_unreachable(error)
        raise
    except KeyboardInterrupt:
        _fail("stopped by the keyboard", code=130)


def _open_closed_outputs() -> None:
    """Discard what is written to an output that the caller closed (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))


def _fail_if_out_of_memory(error: Exception) -> None:
    if is_out_of_memory(error):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        room = "" if limit == resource.RLIM_INFINITY else f" (ulimit -v: {limit / 2**30:.3g} GiB)"
        gaps = gaps_gib(error)
        room += (
            f" with {gaps:.3g} GiB in gaps of the allocator, which {GAPS} closes" if gaps else ""
        )
        _fail(
            f"memory ran out{room}; lower --batch-size, in training with more --grad-accum-steps "
            "or --gradient-checkpointing, where the verb has them; else end other programs, or "
            "raise the limit of this one"
        )


def _fail_if_unreachable(error: Exception) -> None:
    """Exit with one line if `error` says that another rank is gone or cannot be reached."""
    kind, said = type(error).__name__, str(error).partition("\n")[0]
    if kind in UNREACHABLE or "gloo/transport" in said:
        _fail(
            f"another rank is gone or cannot be reached ({said}), expected all hosts to run and "
            "to see each other; look at what the others printed, or name the network between "
            "them in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )


def _fail(message: str, code: int = 1) -> None:
    from qat import logs
    from qat.secrets import scrubbed

    sys.stderr.write(f"qat: {logs.printable(scrubbed(' '.join(message.split())))}\n")
    sys.exit(code)
