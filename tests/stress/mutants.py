"""Makes damaged files out of sound ones, each from a seed: JSON, TOML, safetensors and text."""

import copy
import json
import random
import tomllib
from collections.abc import Callable
from typing import NamedTuple

import tomli_w

Files = dict[str, bytes]
Path = list[str | int]
"""The place of a value in nested tables and lists."""

VALUES = (None, True, -1, 0, 1, 2**31, 2**63, 10**30, 10**400, 1e308, float("nan"), "", "x" * 5000)
"""Values that replace another one, in addition to those of other types."""
TEXTS = ("../../etc/passwd", "/dev/zero", "a\0b", "a\nb", "\ud800", "caf\u00e9", "{}", "-1", "NaN")


class Mutant(NamedTuple):
    """A kind of mutation, and the files that it changed."""

    kind: str
    files: Files
    """Files that changed."""


def mutate(files: Files, seed: int) -> Mutant:
    """The mutant of `seed`; the kinds take turns, the files are drawn."""
    rng = random.Random(seed)
    names = sorted(KINDS)
    kind = names[seed % len(names)]
    name = rng.choice(sorted(files))
    if kind == "swap" and len(files) > 1:
        other = rng.choice(sorted(files.keys() - {name}))
        changed = {name: files[other], other: files[name]}
    else:
        changed = {name: KINDS[kind](name, files[name], rng)}
    if all(files[each] == data for each, data in changed.items()):
        return Mutant("flip", {name: flip(name, files[name], rng)})
    return Mutant(kind, changed)


def flip(_: str, data: bytes, rng: random.Random) -> bytes:
    """One to eight bits are others."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(_: str, data: bytes, rng: random.Random) -> bytes:
    """The file ends early, or has nothing in it."""
    return data[: rng.choice((0, rng.randrange(len(data) + 1), max(0, len(data) - 1)))]


def splice(_: str, data: bytes, rng: random.Random) -> bytes:
    """A piece is missing, doubled, or something else."""
    start, length = rng.randrange(len(data) + 1), rng.randint(1, 64)
    piece = rng.choice((b"", data[start : start + length] * 2, rng.randbytes(length)))
    return data[:start] + piece + data[start + length :]


def tail(_: str, data: bytes, rng: random.Random) -> bytes:
    """A power failure left zeros, or something was written behind the end."""
    cut = rng.randrange(len(data) + 1) if rng.random() < 0.5 else len(data)
    return data[:cut] + rng.choice((b"\0" * rng.randint(1, 4096), rng.randbytes(64), data, b"\n{}"))


def delete_key(name: str, data: bytes, rng: random.Random) -> bytes:
    """A key or an element is missing."""

    def act(owner: dict | list, key: str | int) -> None:
        del owner[key]

    return edited(name, data, rng, act)


def huge(name: str, data: bytes, rng: random.Random) -> bytes:
    """A number is enormous, negative or none."""

    def act(owner: dict | list, key: str | int) -> None:
        owner[key] = rng.choice(VALUES)

    def is_number(value: object) -> bool:
        return type(value) in (int, float)

    return edited(name, data, rng, act, is_number)


def wrong_type(name: str, data: bytes, rng: random.Random) -> bytes:
    """A value is of another type, or a text that means something elsewhere."""

    def act(owner: dict | list, key: str | int) -> None:
        owner[key] = rng.choice((*VALUES, *TEXTS, [], {}, [owner[key]], {"x": owner[key]}))

    return edited(name, data, rng, act)


def duplicate(name: str, data: bytes, rng: random.Random) -> bytes:
    """A value stands in two places, or a line is there twice."""
    if rng.random() < 0.3 and (lines := data.splitlines(keepends=True)):
        at = rng.randrange(len(lines))
        return b"".join([*lines[:at], lines[at], *lines[at:]])

    def act(owner: dict | list, key: str | int) -> None:
        if isinstance(owner, list):
            owner.append(copy.deepcopy(owner[key]))
        else:
            owner[rng.choice(sorted(owner))] = copy.deepcopy(owner[key])

    return edited(name, data, rng, act)


def swap(_: str, data: bytes, __: random.Random) -> bytes:
    """Two files have each other's names; `mutate` does it."""
    return data


def edited(  # noqa: PLR0917 - what every kind is given, and what it does
    name: str,
    data: bytes,
    rng: random.Random,
    act: Callable[[dict | list, str | int], None],
    is_meant: Callable[[object], bool] = lambda value: True,
) -> bytes:
    """The file with `act` done to one of its values; without any, with some bits flipped."""
    read, write = FORMATS.get(name.rpartition(".")[2], FORMATS["txt"])
    try:
        values, rest = read(data)
        places = [place for place in walk(values) if is_meant(at(values, place))]
        if not places:
            return flip(name, data, rng)
        place = rng.choice(places)
        act(at(values, place[:-1]), place[-1])
        return write(values, rest)
    except (ValueError, TypeError):  # a value that the format cannot hold
        return flip(name, data, rng)


def walk(values: object) -> list[Path]:
    """The paths of all values below the top."""
    if isinstance(values, dict):
        items = list(values.items())
    elif isinstance(values, list):
        items = list(enumerate(values))
    else:
        return []
    return [path for key, value in items for path in ([key], *([key, *p] for p in walk(value)))]


def at(values: object, place: Path) -> object:
    """The value at a path."""
    for key in place:
        values = values[key]
    return values


def _read_lines(data: bytes) -> tuple[object, bytes]:
    return [json.loads(line) for line in data.splitlines()], b""


def _write_lines(values: object, _: bytes) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _read_tensors(data: bytes) -> tuple[object, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def _write_tensors(values: object, rest: bytes) -> bytes:
    header = json.dumps(values).encode()
    return len(header).to_bytes(8, "little") + header + rest


FORMATS: dict[str, tuple[Callable, Callable]] = {
    "json": (lambda data: (json.loads(data), b""), lambda v, _: json.dumps(v, indent=1).encode()),
    "jsonl": (_read_lines, _write_lines),
    "safetensors": (_read_tensors, _write_tensors),
    "toml": (
        lambda data: (tomllib.loads(data.decode()), b""),
        lambda v, _: tomli_w.dumps(v).encode("utf-8", "surrogatepass"),
    ),
    "txt": (lambda data: (None, data), lambda _, data: data),
}
"""Functions that take a file apart and put it together, by the end of its name."""

KINDS: dict[str, Callable[[str, bytes, random.Random], bytes]] = {
    each.__name__: each
    for each in (flip, truncate, splice, tail, delete_key, huge, wrong_type, duplicate, swap)
}
