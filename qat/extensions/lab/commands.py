"""A search for the script or verb of a recorded command, and for each of its flags.

The flags of a script are names of arguments and fields in its source (cyclopts), or strings
(argparse). Reading the source instead of running it works for every commit.
"""

import ast
import re
import shlex
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from qat.cli.parser import parsed
from qat.errors import ConfigError

SCRIPT = re.compile(r"(?!/)[\w./-]+\.(?:py|sh)|\.ci/\w+")  # no absolute paths
LOG = ("log", "--format=%h", "--abbrev=8", "--diff-filter=AMR", "--")
"""Commits that added or changed a file, newest first."""


def current(command: str, root: Path) -> tuple[str, str]:
    """Return `command` with the path that its script has now, and the commit to find it at.

    The commit is "" if the work tree at `root` has the script with these flags, else the newest
    that has it.

    Raises:
        ConfigError: no commit has the script with these flags, or `qat` has no such verb or flag.
    """
    words = shlex.split(re.sub(r"(?<= )([<>]=?)(?= )", r"'\1'", command))  # goals without quotes
    if "qat" in words:
        parsed(words[words.index("qat") + 1 :])
        return command, ""
    at = next((i for i, word in enumerate(words) if SCRIPT.fullmatch(word)), None)
    if at is None:
        raise ConfigError(f"{command!r} names no script and no verb; name what measures the figure")
    script, given = words[at], tuple(words[at + 1 :])
    for path in (script, *_git(root, "ls-files", f"*/{Path(script).name}").split()):
        if (root / path).is_file() and reads((root / path).read_text("utf-8"), given):
            return command.replace(script, path, 1), ""
    for commit in _git(root, *LOG, script).split():
        if reads(_git(root, "show", f"{commit}:{script}"), given):
            return command, commit
    raise ConfigError(f"no commit has the script and all flags of {command!r}; correct its record")


def reads(source: str, words: Sequence[str]) -> bool:
    """True if a script's `source` has the verb and the flags of `words`, or is the shell's."""
    if source.startswith("#!/usr/bin/env bash"):
        return True
    verbs, names = _declared(source)
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}
    is_named = not verbs or None in verbs or (bool(words) and words[0] in verbs)
    return is_named and {flag.removeprefix("no_") for flag in flags} <= names


@cache
def _declared(source: str) -> tuple[set[str | None], set[str]]:
    """Return the verbs of a script, None for that without a name, and all names a flag may have."""
    verbs: set[str | None] = set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("--"):
            names.add(str(node.value)[2:].replace("-", "_"))  # of argparse
        elif isinstance(node, ast.FunctionDef):
            verbs |= {
                _verb(node, each) for each in node.decorator_list if "app." in ast.unparse(each)
            }
    return verbs, names


def _verb(function: ast.FunctionDef, decorator: ast.expr) -> str | None:
    """Return the name of the verb that `decorator` makes of a function."""
    if ast.unparse(decorator).startswith("app.default"):
        return None
    named = [word.value for word in getattr(decorator, "keywords", []) if word.arg == "name"]
    return ast.literal_eval(named[0]) if named else function.name.strip("_").replace("_", "-")


@cache
def _git(root: Path, *words: str) -> str:
    """Return what `git` prints."""
    return subprocess.check_output(("git", *words), cwd=root, text=True)
