"""Names of lm-eval's tasks, read from its files without the harness.

The harness parses each of its 14,000 YAML files before it knows a name, which takes minutes on a
busy machine.
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from qat.errors import ConfigError, how_to_install, is_installed, nearest

NAMED = re.compile(
    rb"""^["']?(?:task|group|tag)["']?[ \t]*:(.*(?:\n[ \t]*(?:[-#].*)?$)*)""", re.MULTILINE
)
"""The keys of a file that name a task, a group or tags, with a value of one line or a list."""
WORD = re.compile(r"""[^\s\[\],'"]+""")
COMMENT = re.compile(rb"#.*")


def check_installed(flag: str) -> None:
    """Refuse a flag that needs the harness where it is not installed.

    Raises:
        ConfigError: it is not.
    """
    if not is_installed("lm_eval"):
        raise ConfigError(
            f"{flag}, but the library lm-eval is not installed; expected it beside qat; "
            f"run: {how_to_install('eval')}"
        )


def check_tasks(names: Iterable[str], own: Path | None) -> None:
    """Refuse names that are no tasks, groups or tags of lm-eval or of the directory `own`.

    Raises:
        ConfigError: `own` is no directory, or one of `names` is unknown.
    """
    if own is not None and not own.is_dir():
        raise ConfigError(
            f"tasks_dir={own} is not there, expected a directory of YAML files; check the path"
        )
    missing = set(names) - (set() if own is None else _read_names(own))
    for name in sorted(missing):
        known = _harness_names()
        if name not in known:
            near = ", ".join(nearest(name, known, 3))
            raise ConfigError(
                f"tasks={name!r}, but lm-eval knows no such task among its {len(known):,}; "
                + (f"did you mean {near}?" if near else "see 'lm-eval ls tasks'")
            )


@cache
def _harness_names() -> set[str]:
    spec = find_spec("lm_eval")
    return _read_names(Path(spec.submodule_search_locations[0], "tasks"))


def _read_names(directory: Path) -> set[str]:
    """Return the names in all YAML files of `directory`; some included ones have no suffix."""
    lines = set()
    for folder, _, files in os.walk(directory):
        for name in files:
            if name.endswith("yaml") or "." not in name:
                lines.update(NAMED.findall(Path(folder, name).read_bytes()))
    text = COMMENT.sub(b"", b"\n".join(lines)).decode(errors="replace")
    return set(WORD.findall(text)) - {"-"}
