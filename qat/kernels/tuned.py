"""Which configuration a kernel runs with: its own default, or a device's table of tuned ones.

A configuration says how a kernel cuts its work: no result depends on it beyond the order of sums.
Tables lie in `tuned/DEVICE.toml` and are written by `qat bench kernels --tune`.
"""

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from qat.backend.device import on
from qat.errors import ConfigError

FOLDER = Path(__file__).parent / "tuned"

C = TypeVar("C", bound=tuple)
"""A kernel's configuration: a named tuple of whole numbers."""
Key = tuple[int, ...]
"""What the best configuration depends on, such as a matrix's shape."""


class Used(NamedTuple):
    """The configuration that a kernel last ran with, and where it is from."""

    requested: tuple
    """The kernel's default."""
    effective: tuple
    source: Literal["default", "table", "forced"]


_FORCED: dict[tuple[str, Key], tuple] = {}
_USED: dict[tuple[str, Key], Used] = {}


def chosen(kernel: str, key: Key, default: C, device: torch.device) -> C:
    """The configuration of `kernel` at `key`: a forced one, else the table's, else `default`.

    Always `default` inside a graph that PyTorch compiles, which would guard on the table.

    Raises:
        ConfigError: the device's table does not fit the kernel.
    """
    if torch.compiler.is_compiling():
        return default
    found, source = _FORCED.get((kernel, key)), "forced"
    if found is None:
        found, source = _from_table(kernel, key, default, device), "table"
    if found is None:
        found, source = default, "default"
    _USED[kernel, key] = Used(default, found, source)
    return found


def used() -> dict[str, dict[str, Any]]:
    """What every kernel last ran with in this process, by `kernel KEY`."""
    return {
        f"{kernel} {named(key)}": {
            "requested": dict(entry.requested._asdict()),
            "effective": dict(entry.effective._asdict()),
            "source": entry.source,
        }
        for (kernel, key), entry in _USED.items()
    }


def forget_used() -> None:
    """Begin anew to note what runs."""
    _USED.clear()


@contextmanager
def forcing(kernel: str, key: Key, configuration: tuple) -> Iterator[None]:
    """Inside, `kernel` at `key` runs with this configuration: to measure it."""
    before = _FORCED.get((kernel, key))
    _FORCED[kernel, key] = configuration
    try:
        yield
    finally:
        del _FORCED[kernel, key]
        if before is not None:
            _FORCED[kernel, key] = before


def table_path(device_name: str) -> Path:
    """Where the table of a device of that name lies."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '_', device_name.lower()).strip('_')}.toml"


def named(key: Key) -> str:
    """A key as a table holds it: `3072x1024x2`."""
    return "x".join(map(str, key))


def forget_tables() -> None:
    """Read tables anew from here on."""
    _from_table.cache_clear()


@cache
def _from_table(kernel: str, key: Key, default: C, device: torch.device) -> C | None:
    path = table_path(on(device).name())
    fields = read_table(path).get(kernel, {}).get(named(key))
    if fields is None:
        return None
    if set(fields) != set(default._fields) or any(type(v) is not int for v in fields.values()):
        raise ConfigError(
            f"{path}: {kernel} {named(key)} holds {fields}, expected whole numbers called "
            f"{', '.join(default._fields)}; delete that entry or tune again"
        )
    return type(default)(**fields)


def read_table(path: Path) -> dict[str, Any]:
    """A table's kernels; nothing where there is no file.

    Raises:
        ConfigError: it is no TOML.
    """
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is no TOML ({error}), expected a table of 'qat bench kernels --tune'; "
            "delete it or tune again"
        ) from None
