"""Forged caches: manifests, local or in an object store, that name what they should not.

Every manifest carries hashes that fit it, as from somebody who means it.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from fuzzing import Forged
from kill_case import build

from qat.data import remote
from qat.data.cache import MANIFEST
from qat.data.reader import TeacherCache
from qat.data.shard_file import check_shards, raise_if_any_damaged

ADDRESS = "memory://forged/cache"
PLACES = (
    *(["fingerprint"], ["shards", 0, "file"], ["shards", -1, "file"]),
    *(["shards", 0, "sha256"], ["shards", 0, "content"]),
)
"""Identifiers in a manifest; the first three become paths."""
DIGITS = "0123456789abcdef"


@contextmanager
def opened(work: Path) -> Iterator[Callable[[int], Forged]]:
    """A small cache, in a directory and in memory, whose manifest each case forges."""
    text = work / "text.txt"
    text.write_text("\n".join(f"line {i} of {i * i} says {'so ' * (i % 7)}" for i in range(60)))
    build(work / "cache", text=text)
    sound = json.loads((work / "cache" / MANIFEST).read_bytes())
    store = fsspec.filesystem("memory")
    store.put(f"{work / 'cache'}/", "/forged/cache/", recursive=True)
    remote.STREAMS = work / "streams"

    def case_of(seed: int) -> Forged:
        rng = random.Random(seed)
        place = rng.choice(PLACES)
        raw = sealed(sound, place, identifier(rng, work.parent))
        read = rng.choice((open_local, verify, open_remote))

        def act() -> str:
            (work / "cache" / MANIFEST).write_bytes(raw)
            store.pipe(f"/forged/cache/{MANIFEST}", raw)
            read(work / "cache")
            shutil.rmtree(remote.STREAMS, ignore_errors=True)
            return f"WRONG: {place} was believed by {read.__name__}"

        return Forged(f"{place[0]} {read.__name__}", act)

    try:
        yield case_of
    finally:
        store.rm("/forged", recursive=True)


def identifier(rng: random.Random, outside: Path) -> object:
    """What no identifier and no name of a shard may be."""
    climb = "../" * rng.randint(1, 6)
    digits = "".join(rng.choices(DIGITS, k=rng.choice((1, 11, 13, 63, 65))))
    word = "".join(rng.choices("abcxyz-_. /\\~\0\n\x1b\u202e\udcff", k=rng.randint(1, 300)))
    forged = (
        *(f"{climb}sentinel/{digits}", f"{climb}sentinel/secret", str(outside / "sentinel" / "x")),
        *(
            f"{digits}/{climb}sentinel",
            f"train-00000.safetensors/{climb}sentinel",
            climb + MANIFEST,
        ),
        *("", ".", "..", "/", "~", "~root/x", "C:\\x", "\\\\host\\x", "file:///etc/passwd"),
        *(f"{digits}\n", f" {digits}", digits.upper() + "G", f"{digits}\0", "con", "-rf"),
        *(word + "/", "\uff0e\uff0e/x", "%2e%2e/x", None, 12, ["a"], {"a": 1}, True, 1e400),
    )
    return rng.choice(forged)


def sealed(sound: dict, place: list[str | int], value: object) -> bytes:
    """The bytes of a manifest with one other value, and a hash that fits."""
    values = json.loads(json.dumps(sound))
    values.pop("sha256")
    owner = values
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    body = (json.dumps(values, indent=1) + "\n").encode()
    values["sha256"] = hashlib.sha256(body).hexdigest()
    return (json.dumps(values, indent=1) + "\n").encode()


def open_local(directory: Path) -> None:
    """As `qat train --cache-dir DIRECTORY` begins."""
    TeacherCache.open(directory)


def verify(directory: Path) -> None:
    """As `qat cache verify` does."""
    raise_if_any_damaged(directory, check_shards(directory)[1])


def open_remote(_: Path) -> None:
    """As `qat train --cache-dir ADDRESS` begins."""
    cache = remote.open_cache(ADDRESS)
    cache.batch([0])
