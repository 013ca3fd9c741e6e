"""Kernel configurations: a kernel's default, or an entry in the device's table of tuned ones.

A configuration is the tiling of a kernel; results do not depend on it except for the order of sums.
Tables are in `tuned/DEVICE.toml` and are written by `qat bench kernels --tune`.
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
"""A kernel's configuration: a named tuple of integers."""
Key = tuple[int, ...]
"""The sizes on which the best configuration depends, such as a matrix's shape."""


class Used(NamedTuple):
    """The configuration that a kernel last ran with, and its source."""

    requested: tuple
    """The kernel's default."""
    effective: tuple
    source: Literal["default", "table", "forced"]


_FORCED: dict[tuple[str, Key], tuple] = {}
_USED: dict[tuple[str, Key], Used] = {}


def chosen(kernel: str, key: Key, default: C, device: torch.device) -> C:
    """Return the forced configuration of `kernel` at `key`, else the table's, else `default`.

    The result is always `default` inside a graph that PyTorch compiles, since the graph would guard
    on the table.

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
    """Return the last configuration of every kernel in this process, by `kernel KEY`."""
    return {
        f"{kernel} {named(key)}": {
            "requested": dict(entry.requested._asdict()),
            "effective": dict(entry.effective._asdict()),
            "source": entry.source,
        }
        for (kernel, key), entry in _USED.items()
    }


def forget_used() -> None:
    """Clear the record of configurations."""
    _USED.clear()


@contextmanager
def forcing(kernel: str, key: Key, configuration: tuple) -> Iterator[None]:
    """Force a configuration of `kernel` at `key` inside the block, to measure it."""
    before = _FORCED.get((kernel, key))
    _FORCED[kernel, key] = configuration
    try:
        yield
    finally:
        del _FORCED[kernel, key]
        if before is not None:
            _FORCED[kernel, key] = before


def table_path(device_name: str) -> Path:
    """Return the path of a device's table."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '_', device_name.lower()).strip('_')}.toml"


def named(key: Key) -> str:
    """Return a key as a table writes it, such as `3072x1024x2`."""
    return "x".join(map(str, key))


def forget_tables() -> None:
    """Clear the cache of tables, so that they are read again."""
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
    """Return a table's kernels; an empty one if there is no file.

    Raises:
        ConfigError: the file is not TOML.
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
