"""Atomic writes of files and directories, and the hashes that identify their content."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, Literal

from qat.errors import HubError
from qat.files import (
    explained,
    listed_files,
    parse_json,
    real_files,
    sha256_file,
    sync,
    whole_directory,
    whole_file,
)
from qat.logs import Ticker, progress

MIB = 2**20
MEND = "remove it, choose another --out, or replace it with --force"
RECEIPT = ".qat-hub.json"
"""File that `qat hub` writes into a directory it fetched; it is not part of the content."""
REPOSITORY = "hf://"
"""The beginning of the address of a model repository, `hf://owner/name`."""
WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pte", ".data", ".mlirb"}
WEIGHTS |= {".tflite", ".litertlm"}
"""Suffixes of files that hold weights."""
SUFFIXES = (".tar.lz4", ".tgz", ".tar.gz")
"""Suffixes of archives, in a reader's order of preference: lz4 packs twenty times faster than
gzip."""


@contextmanager
def atomic_directory(
    out: Path, *, replace: bool = False, place: Path | None = None
) -> Iterator[Path]:
    """Yield a directory to fill; it becomes `out` when the block ends, or is removed on failure.

    A directory that contains only one other directory is skipped: `name/name/files` becomes
    `out/files`. With `replace`, an older `out` stays until the new one is complete; its files that
    `qat hub` did not fetch are kept, and if one of them conflicts, nothing is replaced. The
    temporary directory lies in `place`, on the same disk as `out`; by default next to it.

    Raises:
        ConfigError: `out` is not empty and `replace` is false; or it holds files of the new names
            that `qat hub` did not fetch.
        HubError: `out` cannot be written.
    """
    whole = whole_directory(
        out,
        replace=replace,
        written=lambda out: listed_files(out / RECEIPT, (RECEIPT,)),
        overwrite=False,
        place=place,
        root=innermost_directory,
        mend=MEND,
    )
    with explained(out, HubError), whole as partial:
        yield partial


@contextmanager
def atomic_file(out: Path) -> Iterator[BinaryIO]:
    """Yield a file to write; it becomes `out` at the end of the block, or is removed on failure.

    Raises:
        HubError: `out` cannot be written.
    """
    # unique, because several processes may write at once
    partial = out.with_name(f".{out.name}.part-{token_hex(4)}")
    with explained(out, HubError):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out, partial) as file:
            yield file
        sync(out.parent)


def innermost_directory(directory: Path) -> Path:
    """Descend while a directory contains only one other directory; return the innermost."""
    while True:
        inside = list(directory.iterdir())
        if len(inside) != 1 or inside[0].is_symlink() or not inside[0].is_dir():
            return directory
        directory = inside[0]


def is_archive(name: str) -> bool:
    """Return whether the file name has the suffix of an archive that `qat.hub.push.pack` writes."""
    return name.endswith(SUFFIXES)


def regular_files(directory: Path, skip: str | None = None) -> list[Path]:
    """Return the files below `directory`, sorted by name, without macOS metadata files.

    `skip` names a top-level subdirectory to leave out.

    Raises:
        HubError: an entry is neither a regular file nor a directory.
    """
    return [
        path
        for path in real_files(directory, error=HubError)
        if path.relative_to(directory).parts[0] != skip
        and path.name not in (RECEIPT, ".DS_Store")
        and not path.name.startswith("._")
    ]


def sha256_tree(directory: Path, skip: str | None = None) -> str:
    """Return the SHA-256 of the output of `sha256sum` for all files, sorted by name.

    Without `skip` (see `regular_files`) it equals, in that directory:
    `find * -type f | LC_ALL=C sort | xargs sha256sum | sha256sum`.
    """
    return tree_of(sha256_files(directory, skip))


def sha256_files(directory: Path, skip: str | None = None) -> dict[str, str]:
    """Return the SHA-256 of every file below `directory` (see `regular_files`) by relative path."""
    files = regular_files(directory, skip)
    with progress(f"reading {directory.name}", len(files), "files") as ticker:
        found = {}
        for path in files:
            found[path.relative_to(directory).as_posix()] = sha256_file(path)
            ticker.advance()
    return found


def tree_of(files: dict[str, str]) -> str:
    """Return the `sha256_tree` of files with these hashes."""
    lines = (f"{files[name]}  {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def copy_file(source: Path, out: BinaryIO, ticker: Ticker) -> None:
    """Append `source` to an open file."""
    with source.open("rb") as file:
        while chunk := file.read(MIB):
            out.write(chunk)
            ticker.advance()


def copy_files(files: list[Path], source: Path, into: Path) -> None:
    """Copy files below `source` to the same relative paths below `into`, with a progress bar."""
    total = sum(mebibytes(path.stat().st_size) for path in files)
    with progress(f"copying {source.name}", total, "MiB") as ticker:
        for path in files:
            target = into / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                copy_file(path, out, ticker)


def mebibytes(size: int) -> int:
    """Return `size` in MiB, rounded up: the steps of a progress bar."""
    return -(-size // MIB)


Kind = Literal["cache", "checkpoint"]
Format = Literal["qat", "anemll"]
ANEMLL_CACHE = "qwen_kd_topk_cache_v1"


def format_of(directory: Path, kind: Kind) -> Format:
    """Return whether `directory` is in this package's format or in the reference system's.

    Raises:
        HubError: it contains nothing of this `kind`.
    """
    names = {path.name for path in directory.iterdir()}
    has_pickles = any(directory.rglob("*.pt"))
    if kind == "cache":
        if "manifest.json" in names:
            return "qat"
        if has_pickles and _format_in(directory / "meta.json") == ANEMLL_CACHE:
            return "anemll"
        raise HubError(_nothing(directory, f"manifest.json, or meta.json of {ANEMLL_CACHE}"))
    if has_pickles:
        return "anemll"
    if any(path.suffix in WEIGHTS for path in directory.rglob("*")):
        return "qat"
    raise HubError(_nothing(directory, f"weights ({', '.join(sorted(WEIGHTS))})"))


def kind_of(directory: Path) -> Kind:
    """Return the kind of `directory`, judged by its files; a run counts as a checkpoint."""
    is_cache = (directory / "manifest.json").is_file() or _format_in(directory / "meta.json")
    return "cache" if is_cache else "checkpoint"


def _format_in(path: Path) -> object:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values.get("format") if isinstance(values, dict) else None


def _nothing(directory: Path, expected: str) -> str:
    return f"{directory.name} holds no {expected}; check what was packed, or the entry's kind"
