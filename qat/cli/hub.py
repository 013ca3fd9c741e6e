"""`qat hub`: fetch, share, pack and unpack caches and checkpoints."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from qat.cli.parser import OTHERS
from qat.config import Required
from qat.errors import ConfigError, HubError
from qat.files import described, inside, is_real
from qat.hooks import extension
from qat.hub.registry import HubEntry
from qat.logs import METRICS, SUMMARY
from qat.secrets import scrubbed

if TYPE_CHECKING:
    from qat.hub.registry import Registry

DEFAULT_PLACES = {"cache": Path("caches"), "checkpoint": Path("checkpoints")}
Own = Annotated[Path | None, Parameter(name="--registry")]

hub_app = App(
    name="hub",
    help="Fetch, share, pack and unpack caches and checkpoints.",
    help_format="markdown",
    help_epilogue="Example: qat hub pull NAME",
    group_parameters=OTHERS,
)


@hub_app.command(help_epilogue="Example: qat hub pull NAME --out caches/mine")
def pull(
    name: Required[str],
    *,
    out: Path | None = None,
    drive: str | None = None,
    force: Annotated[bool, Parameter(negative=())] = False,
    own: Own = None,
) -> dict[str, object]:
    """Fetch the cache or checkpoint NAME once; what is there already is not fetched again.

    Args:
        name: One of `qat hub list`, or hf://OWNER/NAME[@REVISION].
        out: Directory to make; by default caches/NAME or checkpoints/NAME.
        drive: Where a Google Drive is mounted, or gs://BUCKET with its files, for mirrors on it.
        force: Fetch it even if it is there, and replace what 'qat hub' brought; other files stay,
            and one that is in the way is left and named.
        own: TOML file with your own entries; by default ~/.config/qat/hub.toml.
    """
    from qat.hub.files import REPOSITORY
    from qat.hub.mirrors import in_bucket
    from qat.hub.pull import pull as fetch
    from qat.hub.registry import find, learn_tree, user_file

    if name.startswith(REPOSITORY):
        entry = HubEntry(kind="checkpoint", mirrors=(name,))
    else:
        entry = find(_registry(own), name)
    if drive is not None and drive.startswith("gs://"):
        entry = entry.model_copy(update={"mirrors": in_bucket(entry.mirrors, drive)})
        drive = None
    out = out or DEFAULT_PLACES[entry.kind] / name.partition("@")[0].rpartition("/")[2]
    pulled = fetch(name, entry, out, drive=drive and Path(drive), replace=force)
    if pulled.is_new:
        learn_tree(own or user_file(), name, pulled.sha256, pulled.tree_sha256)
    return dict(name=name, kind=entry.kind, **pulled._asdict())


@hub_app.command(name="list", help_epilogue="Example: qat hub list")
def list_entries(*, own: Own = None) -> dict[str, object]:
    """Show what can be pulled.

    Args:
        own: TOML file with your own entries; by default ~/.config/qat/hub.toml.
    """
    from rich.table import Table
    from rich.text import Text

    from qat.logs import Terminal, printable

    registry = _registry(own)
    table = Table("name", "kind", "hash", "what, and where", show_lines=True)
    for name, entry in registry.items():
        is_known = "known" if entry.sha256 or entry.tree_sha256 else "unknown"
        lines = "\n".join(map(scrubbed, filter(None, [entry.note, *entry.mirrors])))
        table.add_row(name, entry.kind, is_known, Text(printable(lines), overflow="fold"))
    Terminal().print(table)
    return {"names": list(registry)}


@hub_app.command(help_epilogue="Example: qat hub add NAME --kind cache --mirror hf:owner/name")
def add(
    name: Required[str],
    *,
    config: Annotated[HubEntry, Parameter(name="*")],
    force: Annotated[bool, Parameter(negative=())] = False,
    own: Own = None,
) -> dict[str, object]:
    """Register NAME in your own file, so that `qat hub pull NAME` knows it.

    Args:
        name: What to call it; a directory will be called so.
        config: The entry.
        force: Replace an entry of that name.
        own: TOML file to write; by default ~/.config/qat/hub.toml.
    """
    from qat.hub.registry import add_entry, user_file

    path = own or user_file()
    add_entry(path, name, config, replace=force)
    return {"name": name, "registry": path}


@hub_app.command(help_epilogue="Example: qat hub pack runs/q2")
def pack(directory: Required[Path], *, out: Path | None = None) -> dict[str, object]:
    """Pack DIRECTORY into one file; equal content gives equal bytes.

    Args:
        directory: A cache, a checkpoint or a run.
        out: .tar.lz4 or .tgz to write; by default DIRECTORY.tar.lz4.
    """
    from qat.cli.inputs import check_inputs
    from qat.files import sha256_file
    from qat.hub.files import innermost_directory, sha256_tree
    from qat.hub.push import pack as write

    path = directory.resolve()
    out = out or path.with_name(f"{path.name}.tar.lz4")
    check_inputs(out=out.absolute().parent)
    num_files = write(directory, out)
    hashes = dict(sha256=sha256_file(out), tree_sha256=sha256_tree(innermost_directory(directory)))
    return dict(out=out, files=num_files, bytes=out.stat().st_size, **hashes)


@hub_app.command(help_epilogue="Example: qat hub unpack q2.tar.lz4 --out checkpoints/q2")
def unpack(
    archive: Required[Path],
    *,
    out: Required[Path],
    force: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, object]:
    """Unpack ARCHIVE (.tar.lz4 or .tgz), whole or not at all, trusting nothing in it.

    Args:
        archive: File to read.
        out: Directory to make; the files lie in it, without the archive's own directory.
        force: Replace what 'qat hub' brought to OUT; other files stay, and one that is in the
            way is left and named.
    """
    from qat.cli.inputs import check_inputs
    from qat.hub.files import regular_files
    from qat.hub.unpack import unpack as write

    check_inputs(out=out)
    write(archive, out, replace=force)
    files = regular_files(out)
    return dict(out=out, files=len(files), bytes=sum(path.stat().st_size for path in files))


@hub_app.command(help_epilogue="Example: qat hub verify caches/mine")
def verify(directory: Required[Path], *, own: Own = None) -> dict[str, object]:
    """Read every byte of a directory that was pulled or unpacked, and compare it with its hashes.

    Those are the ones that were kept then, and those that the registry has now.

    Args:
        directory: What was pulled or unpacked.
        own: TOML file with your own entries; by default ~/.config/qat/hub.toml.
    """
    from qat.hub.registry import verify as prove

    return dict(path=directory, **prove(directory, _registry(own))._asdict())


@hub_app.command(help_epilogue="Example: qat hub push runs/q2 /content/drive/MyDrive/qat")
def push(
    path: Required[Path],
    to: Required[str],
    *,
    drive: Path | None = None,
    with_trainer: Annotated[bool, Parameter(negative=())] = False,
    private: Annotated[bool, Parameter(negative=())] = False,
    force: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, object]:
    """Pack the directory PATH, copy it to the folder or gs:// path TO, and say how to register it.

    Of a run its final student is packed, or its best checkpoint where it has not ended, under the
    name of the run. To a repository hf://OWNER/NAME a model's files go as they are, with a card.

    Args:
        path: A cache, a checkpoint, a run, or for hf:// an export too.
        to: A folder (a mounted Drive, say), gs://BUCKET/PATH or hf://OWNER/NAME.
        drive: Where a Google Drive is mounted, if TO lies on it: the mirror is named below it.
        with_trainer: Pack all that is in PATH: logs, checkpoints and the state of the optimizer.
        private: Make a new repository private.
        force: Replace another archive of that name, or all that the repository holds.
    """
    from qat.hub.files import REPOSITORY
    from qat.hub.push import push as put
    from qat.logs import Terminal

    source, name = path if with_trainer else _student(path), path.resolve().name
    if to.startswith(REPOSITORY):
        how = dict(with_trainer=with_trainer, private=private, replace=force)
        pusher = extension("qat.publish", "push")
        sent = pusher.publish(source, to.removeprefix(REPOSITORY), **how)
        line = f"qat hub pull {to}@{sent.commit}"
        Terminal().print(line, highlight=False, soft_wrap=True)
        return dict(pull=line, packed=source, **sent._asdict())
    if private:
        raise ConfigError(
            f"private=True of {to}, expected {REPOSITORY}OWNER/NAME: a folder is as private as its "
            "owner made it; drop --private"
        )
    pushed = put(source, to, name=name, with_trainer=with_trainer, replace=force)
    line = pushed.add_line(name, _mirror(pushed.to, drive))
    Terminal().print(line, highlight=False, soft_wrap=True)
    return dict(add=line, packed=source, **pushed._asdict())


def _student(path: Path) -> Path:
    """Return the final student of a run, else its best checkpoint; any other `path` as it is."""
    if not (path / METRICS).is_file():
        return path
    if (path / SUMMARY).is_file():
        words = (path / SUMMARY).read_text(encoding="utf-8")
        found = re.search(r'"final": "([^"]+)"', words)
        final = found and inside(path, found[1], found_in=path / SUMMARY, error=HubError)
        if final and final.is_dir() and is_real(final, path):
            return final
    from qat.models.directory import resolve

    return Path(resolve(str(path)))


def _registry(own: Path | None) -> "Registry":
    from qat.hub.registry import load_registry, user_file

    if own is not None and not own.is_file():
        raise HubError(
            f"registry={own} {described(own)}, expected a TOML file with entries; check the "
            "path, or write it with 'qat hub add'"
        )
    return load_registry(own or user_file())


def _mirror(pushed_to: str, drive: Path | None) -> str:
    if pushed_to.startswith("gs://"):
        return pushed_to
    path = Path(pushed_to).resolve()
    if drive is not None and path.is_relative_to(drive.resolve()):
        return f"drive:{path.relative_to(drive.resolve()).as_posix()}"
    return str(path)
