"""Recipe files of the benchmarks: TOML read with messages that say what was meant."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qat.config import refuse_code
from qat.errors import ConfigError
from qat.files import parse_toml


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The tables of a TOML file that should be a recipe of `kind`.

    Raises:
        ConfigError: it is missing or no TOML, or would run code of others.
    """
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"recipe={path}: {error.strerror}; expected a TOML file; check the path"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"recipe={path} is not TOML ({error}); expected a {kind} recipe; mend that line"
        ) from None
    refuse_code(values, str(path))
    return values


def check_keys(where: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a key that nobody reads, with the nearest one that somebody does.

    Raises:
        ConfigError: naming the first such key.
    """
    known = sorted(known)
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"choose among {', '.join(known)}"
            raise ConfigError(f"{where} has {key!r}, expected a key that it knows; {hint}")
