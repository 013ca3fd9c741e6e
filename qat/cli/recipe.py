"""Checks a recipe before any verb reads it: every table is a verb, every key one of its flags."""

import difflib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from qat.config import refuse_code
from qat.errors import ConfigError
from qat.files import parse_toml


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
