"""Forged archives: receipts in them, bombs of names, odd names, and files swapped after a pull."""

import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lz4.frame
from fuzzing import Forged

from qat.errors import QatError
from qat.hub.files import MIB, RECEIPT, sha256_tree
from qat.hub.pull import pull
from qat.hub.push import pack
from qat.hub.registry import HubEntry, verify
from qat.hub.unpack import Limits, unpack

LIMITS = Limits(floor_bytes=MIB)
"""Smaller than the usual ones, so that bombs are cheap to make."""
ODD = "ab.-_~ $%&'()=\u00e9\u4e2d\U0001f600\u202e\u200b\ufeff\u0301\\\n\t\x1b\x7f\udcff:*?\"<>|#"
HONEST = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": bytes(range(256)) * 8}


@contextmanager
def opened(work: Path) -> Iterator[Callable[[int], Forged]]:
    """An honest archive, and the directory that it is pulled to."""
    source = work / "model"
    source.mkdir()
    for name, content in HONEST.items():
        (source / name).write_bytes(content)
    honest, tree = work / "model.tar.lz4", sha256_tree(source)
    pack(source, honest)
    entry = HubEntry(kind="checkpoint", mirrors=(str(honest),), tree_sha256=tree)

    def case_of(seed: int) -> Forged:
        rng = random.Random(seed)
        kind = rng.choice((receipt, bomb, odd, pulled_again))
        out = work / "out"

        def act() -> str:
            try:
                if kind is pulled_again:
                    return pulled_again(rng, entry, out)
                archive = work / "evil.tar.lz4"
                archive.write_bytes(lz4.frame.compress(kind(rng)))
                return judged(archive, out, may_unpack=kind is not receipt)
            finally:
                shutil.rmtree(out, ignore_errors=True)

        return Forged(kind.__name__, act)

    yield case_of


def judged(archive: Path, out: Path, *, may_unpack: bool) -> str:
    """What came of unpacking an archive; none may leave anything where it is refused."""
    try:
        unpack(archive, out, limits=LIMITS)
    except QatError:
        if out.exists():
            return "WRONG: refused, yet the target is there"
        raise
    paths = list(out.rglob("*"))
    if not may_unpack:
        return "WRONG: the receipt was believed"
    if len(paths) > LIMITS.floor_bytes // LIMITS.entry_bytes + 1:
        return f"WRONG: {len(paths)} files and directories"
    if not all(path.name.isprintable() and not path.is_symlink() for path in paths):
        return "WRONG: a name that shows as another one"
    return "unpacked"


def pulled_again(rng: random.Random, entry: HubEntry, out: Path) -> str:
    """Pull, change something in the directory, and ask whether it is still what was pulled."""
    if not pull("model", entry, out).is_verified:
        return "WRONG: an honest pull is not verified"
    name = rng.choice([*HONEST, RECEIPT, "extra.py", "deep/extra.safetensors", "gone"])
    path = out / name
    if name == "gone":
        (out / rng.choice([*HONEST])).unlink()
    elif path.exists():
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        stamp = path.stat()
        path.write_bytes(data)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rng.randbytes(100))
    # a receipt may lie about where files came from: of the files themselves it must say the truth
    is_whole = {n: (out / n).read_bytes() for n in HONEST if (out / n).exists()} == HONEST
    proves = rng.choice(
        (
            lambda: pull("model", entry, out).is_verified,
            lambda: verify(out, {"model": entry}).is_verified,
        )
    )
    if proves() and not (is_whole and name == RECEIPT):
        return f"WRONG: verified after a change of {name}"
    return "not verified"


def receipt(rng: random.Random) -> bytes:
    """An archive that brings what only a pull may write."""
    name = "".join(rng.choice((c.upper(), c)) for c in RECEIPT) if rng.random() < 0.5 else RECEIPT
    place = rng.choice(("", "model/", "./model/", "model/model/", "./", "model/deep/"))
    tail = rng.choice(("", "", "", "/x", "/"))
    members = [*((f"model/{n}", c) for n, c in HONEST.items()), (place + name + tail, b"{}")]
    rng.shuffle(members)
    return tar_of(members)


def bomb(rng: random.Random) -> bytes:
    """Many files, directories, or names that imply directories."""
    count, depth = rng.choice((30, 70, 500, 2000)), rng.randint(0, 14)
    end = rng.choice(("", "/"))
    return tar_of([(f"{i}/{'d/' * depth}f{end}", b"") for i in range(count)])


def odd(rng: random.Random) -> bytes:
    """Names of characters that mean something to a terminal, a shell or another system."""
    words = ("".join(rng.choices(ODD, k=rng.randint(1, 40))) for _ in range(rng.randint(1, 6)))
    return tar_of([(f"model/{word}", b"x") for word in words])


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    """A tar file; names that end in a slash are directories."""
    parts = []
    for name, content in members:
        info = tarfile.TarInfo(name)
        info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
        info.size = 0 if name.endswith("/") else len(content)
        head = info.tobuf(tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape")
        data = content if info.size else b""
        parts.append(head + data + b"\0" * (-len(data) % tarfile.BLOCKSIZE))
    return b"".join(parts) + b"\0" * 2 * tarfile.BLOCKSIZE
