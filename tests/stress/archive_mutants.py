"""Makes archives that are damaged or evil, each from a seed."""

import gzip
import io
import random
import tarfile
from collections.abc import Callable
from typing import NamedTuple

import lz4.frame

BLOCK = tarfile.BLOCKSIZE
TYPES = (
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CONTTYPE,
    tarfile.DIRTYPE,
    tarfile.REGTYPE,
    tarfile.AREGTYPE,
)
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
FIELDS = {
    "name": (0, 100),
    "mode": (100, 108),
    "uid": (108, 116),
    "size": (124, 136),
    "mtime": (136, 148),
    "type": (156, 157),
    "linkname": (157, 257),
    "magic": (257, 265),
    "device": (329, 345),
    "prefix": (345, 500),
}


class Mutant(NamedTuple):
    """One archive to unpack."""

    kind: str
    data: bytes
    is_checked: bool
    """Damaged below a checksum: if it unpacks at all, its files must be the original ones."""


class Source(NamedTuple):
    """What mutants are made of."""

    tar: bytes
    outside: str
    """A path that nothing may be written to."""


def make(source: Source, seed: int) -> Mutant:
    """The mutant of `seed`; the kinds take turns."""
    rng = random.Random(seed)
    names = sorted(KINDS)
    kind = names[seed % len(names)]
    is_checked = kind in ("flip", "cut", "shift")
    return Mutant(kind, KINDS[kind](source, rng), is_checked)


def compress(data: bytes, rng: random.Random) -> bytes:
    """As one of the two kinds of archive."""
    if rng.random() < 0.5:
        return lz4.frame.compress(data, content_checksum=True)
    return gzip.compress(data, 1, mtime=0)


def flip(source: Source, rng: random.Random) -> bytes:
    """A few bytes of the compressed file changed."""
    return flipped(compress(source.tar, rng), rng)


def cut(source: Source, rng: random.Random) -> bytes:
    """The file ends early."""
    packed = compress(source.tar, rng)
    return packed[: rng.randrange(len(packed))]


def shift(source: Source, rng: random.Random) -> bytes:
    """Bytes of the compressed file taken out or put in."""
    packed = compress(source.tar, rng)
    start = rng.randrange(len(packed))
    if rng.random() < 0.5:
        return packed[:start] + packed[start + rng.randint(1, 64) :]
    return packed[:start] + rng.randbytes(rng.randint(1, 64)) + packed[start:]


def splice(source: Source, rng: random.Random) -> bytes:
    """The beginning of one compressed file and the end of another, or rubbish behind one."""
    one, other = compress(source.tar, rng), compress(source.tar[BLOCK:], rng)
    if rng.random() < 0.5:
        return one + rng.choice((other, rng.randbytes(100), b"\0" * 100, b"<html>"))
    return one[: rng.randrange(len(one))] + other[rng.randrange(len(other)) :]


def tar_flip(source: Source, rng: random.Random) -> bytes:
    """Bytes of the tar file changed before it is compressed."""
    return compress(flipped(source.tar, rng), rng)


def tar_cut(source: Source, rng: random.Random) -> bytes:
    """A tar file that ends early, inside a whole compressed file."""
    end = rng.choice((rng.randrange(len(source.tar)), rng.randrange(20) * BLOCK))
    return compress(source.tar[:end], rng)


def tar_splice(source: Source, rng: random.Random) -> bytes:
    """Blocks of the tar file left out, doubled or swapped, or other data behind its end."""
    blocks = [source.tar[i : i + BLOCK] for i in range(0, len(source.tar), BLOCK)]
    for _ in range(rng.randint(1, 4)):
        i, j = rng.randrange(len(blocks)), rng.randrange(len(blocks))
        action = rng.randrange(3)
        if action == 0:
            blocks[i], blocks[j] = blocks[j], blocks[i]
        elif action == 1:
            blocks.insert(i, blocks[j])
        else:
            del blocks[i]
    tail = rng.choice((b"", b"", source.tar, rng.randbytes(BLOCK), b"\0" * rng.randrange(2**21)))
    return compress(b"".join(blocks) + tail, rng)


def header(source: Source, rng: random.Random) -> bytes:
    """Fields of a header changed, its checksum made right again."""
    data = bytearray(source.tar)
    for _ in range(rng.randint(1, 3)):
        places = [i for i in range(0, len(data), BLOCK) if data[i + 257 : i + 262] == b"ustar"]
        if not places:
            break
        at = rng.choice(places)
        start, stop = FIELDS[rng.choice(sorted(FIELDS))]
        value = field(stop - start, source, rng)
        data[at + start : at + stop] = value[: stop - start].ljust(stop - start, b"\0")
        seal(data, at)
    return compress(bytes(data), rng)


def field(width: int, source: Source, rng: random.Random) -> bytes:
    """Something a field of a header should not hold."""
    return rng.choice(
        (
            rng.randbytes(width),
            b"\x80" + rng.randbytes(width - 1),  # a number in base 256
            b"\xff" * rng.randint(1, width),  # a negative one
            b"7" * (width - 1),
            b"-1",
            evil_name(source, rng).encode("utf-8", "surrogateescape"),
            bytes([rng.choice(b"0123456789SDKLVMNxgX\0\xff")]),
        )
    )


def member(source: Source, rng: random.Random) -> bytes:
    """Members of evil names, types and links among honest ones."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        info = tarfile.TarInfo(evil_name(source, rng) if rng.random() < 0.7 else "name/link")
        info.type = rng.choice(TYPES)
        info.linkname = evil_name(source, rng)
        info.mode = rng.choice((0o644, 0o7777, 0))
        content = rng.randbytes(rng.choice((0, 10, BLOCK)))
        info.size = len(content) if info.isreg() else 0
        parts.append(written(info, rng) + padded(content if info.isreg() else b""))
    parts.insert(rng.randrange(len(parts) + 1), source.tar.rstrip(b"\0").ljust(BLOCK, b"\0"))
    data = b"".join(padded(part) for part in parts)
    return compress(data + b"\0" * 2 * BLOCK, rng)


def extended(source: Source, rng: random.Random) -> bytes:
    """Headers that describe the next one: wrong lengths, huge ones, chains, sparse files."""
    payload = rng.choice(
        (
            record("path", evil_name(source, rng)),
            record("linkpath", evil_name(source, rng)) + record("size", "1" * rng.randint(1, 30)),
            record("size", rng.choice(("-1", "-512", "nan", "1e9", "99999999999999999999"))),
            record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0"),
            record("GNU.sparse.size", "1" + "0" * 15) + record("GNU.sparse.map", "0,1,5,6"),
            record("hdrcharset", rng.choice(("BINARY", "\udcff", "none"))),
            b"2 2 " * rng.randint(1, 8000) + b"=",
            b"9" * rng.randint(1, 30000),
            b"0 a=b\n",
            rng.randbytes(rng.randint(1, 2000)),
        )
    )
    kind = rng.choice((b"x", b"g", b"X", b"L", b"K", b"S", b"D", b"V"))
    info = tarfile.TarInfo("extended")
    info.type, info.size = kind, len(payload) if rng.random() < 0.8 else rng.randrange(2**40)
    block = info.tobuf(tarfile.GNU_FORMAT) + padded(payload)
    return compress(block * rng.choice((1, 1, 2, 50, 3000)) + source.tar, rng)


def bomb(source: Source, rng: random.Random) -> bytes:
    """Much in little: zeros of a member, behind the end, or as thousands of members."""
    choice = rng.randrange(4)
    zeros = b"\0" * rng.choice((2**20, 2**22, 2**23))
    if choice == 0:
        info = tarfile.TarInfo("name/zeros")
        info.size = len(zeros)
        data = info.tobuf() + zeros + source.tar
    elif choice == 1:
        data = source.tar + zeros
    elif choice == 2:
        names = (f"name/{'d/' * rng.randint(0, 40)}{i}" for i in range(rng.choice((50, 3000))))
        data = b"".join(tarfile.TarInfo(name).tobuf() for name in names) + source.tar
    else:
        data = compress(compress(zeros, rng), rng)
    return compress(data, rng)


def evil_name(source: Source, rng: random.Random) -> str:
    """A name that leads elsewhere, or to trouble."""
    return rng.choice(
        (
            source.outside,
            "../" * rng.randint(1, 5) + "sentinel/secret",
            "name/../../sentinel/secret",
            "name/" + "a" * rng.choice((90, 255, 256, 5000)),
            "d/" * rng.choice((10, 17, 300)) + "f",
            "name/config.json",
            "name/link/secret",
            "./name//x",
            "C:\\evil",
            "name\\..\\..\\evil",
            "name/\x01\n\x1b[2J",
            "name/\udcff\udcfe",
            "name/caf\u00e9",
            "~/evil",
            "/",
            ".",
            "..",
            "",
            "name",
            "/dev/null",
        )
    )


def written(info: tarfile.TarInfo, rng: random.Random) -> bytes:
    """The header of a member in a format that can hold it."""
    for how in rng.sample(FORMATS, k=len(FORMATS)):
        try:
            return info.tobuf(how, errors="surrogateescape")
        except (ValueError, UnicodeError):
            continue
    return tarfile.TarInfo("name/other").tobuf()


def record(key: str, value: str) -> bytes:
    """One record of a pax header."""
    rest = f" {key}={value}\n".encode("utf-8", "surrogateescape")
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


def seal(data: bytearray, at: int) -> None:
    """Make the checksum of the header at `at` right."""
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])


def padded(data: bytes) -> bytes:
    """`data` and zeros up to a whole block."""
    return data + b"\0" * (-len(data) % BLOCK)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to eight bytes changed."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def tar_of(files: dict[str, bytes]) -> bytes:
    """A plain tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


KINDS: dict[str, Callable[[Source, random.Random], bytes]] = {
    each.__name__: each
    for each in (
        *(flip, cut, shift, splice),
        *(tar_flip, tar_cut, tar_splice),
        *(header, member, extended, bomb),
    )
}
