"""Packs a directory and puts it where others can pull it from."""

import tempfile
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from qat.errors import HubError
from qat.files import sha256_file
from qat.hub.files import (
    Kind,
    atomic_file,
    copy_file,
    kind_of,
    mebibytes,
    peeled,
    sha256_tree,
)
from qat.hub.mirrors import run_storage
from qat.hub.pack import pack
from qat.logs import progress


class Pushed(NamedTuple):
    """Where a push put an archive, its kind and size, and the hashes that identify it."""

    to: str
    kind: Kind
    bytes: int
    sha256: str
    tree_sha256: str

    def add_line(self, name: str, mirror: str) -> str:
        """The command that registers it under `name`."""
        return (
            f"qat hub add {quote(name)} --kind {self.kind} --mirror {quote(mirror)} "
            f"--size {self.bytes} --sha256 {self.sha256} --tree-sha256 {self.tree_sha256}"
        )


TRAINER = "trainer"
"""The directory of a checkpoint that holds what only training needs."""


def push(
    directory: Path,
    to: str,
    *,
    name: str | None = None,
    with_trainer: bool = False,
    replace: bool = False,
) -> Pushed:
    """Pack `directory` as NAME.tar.lz4 and copy that to the folder `to`, or below gs://.

    In a folder the archive appears whole, after its bytes were read back and compared. It is called
    `name`, else as `directory` is.

    Raises:
        HubError: there is nothing to pack, no such folder, or another archive of that name in it.
    """
    inside, skip = name or directory.resolve().name, None if with_trainer else TRAINER
    name = f"{inside}.tar.lz4"
    is_remote = to.startswith("gs://")
    if not is_remote and not Path(to).is_dir():
        raise HubError(f"{to} is not there, expected a folder (is the Drive mounted?) or gs://...")
    target = f"{to.rstrip('/')}/{name}"
    with tempfile.TemporaryDirectory(prefix=".qat-push-", dir=directory.resolve().parent) as place:
        archive = Path(place, name)
        pack(directory, archive, name=inside, skip=skip)
        root, size, sha256 = peeled(directory), archive.stat().st_size, sha256_file(archive)
        if is_remote:
            run_storage("cp", str(archive), target)
        else:
            put(archive, Path(target), replace=replace)
        return Pushed(target, kind_of(root), size, sha256, sha256_tree(root, skip))


def put(source: Path, target: Path, *, replace: bool = False) -> None:
    """Copy a file under another name, read that back, and only then give it its own name.

    An equal file that is there already is left alone.

    Raises:
        HubError: another file is there (and `replace` is false), or what was read back differs.
    """
    sha256 = sha256_file(source)
    if target.exists() and not replace:
        if sha256_file(target) == sha256:
            return
        raise HubError(f"{target} is there already and differs; replace it with --force")
    bar = progress(f"copying {source.name}", mebibytes(source.stat().st_size), "MiB")
    with atomic_file(target) as file:
        with bar as ticker:
            copy_file(source, file, ticker)
        file.flush()
        if sha256_file(Path(file.name)) != sha256:
            raise HubError(f"{target}: what was written reads back differently; try again")
