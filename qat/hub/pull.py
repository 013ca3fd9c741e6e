"""Fetches an entry of the registry once: mirror by mirror, checked, whole or not at all."""

import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from qat.config import Settings, explain
from qat.errors import HubError
from qat.files import LEAVING, check_free, sha256_file
from qat.folders import parents_of, real
from qat.hub.config import Entry
from qat.hub.contents import Format, format_of
from qat.hub.files import (
    MEND,
    RECEIPT,
    atomic_directory,
    copy_files,
    peeled,
    regular_files,
    sha256_tree,
)
from qat.hub.mirrors import PICKLE, Arrival, Places, fetch
from qat.hub.tar_stream import OPENERS, is_web_page
from qat.hub.unpack import extract
from qat.secrets import scrubbed

logger = logging.getLogger(__name__)
LITTLE = ("config.json",)
"""What is taken along with a checkpoint that is a single file."""


class Pulled(NamedTuple):
    """Where an entry lies now, and how sure that is."""

    path: Path
    format: Format
    mirror: str | None
    """Where it came from; None if it was placed there by hand."""
    sha256: str | None
    """Of the archive; None if there was none."""
    tree_sha256: str | None
    """Of the files; None if nobody asked, as the archive's was compared or can be."""
    is_verified: bool
    """A hash was known and is equal."""
    is_new: bool
    """It was fetched just now."""


class Receipt(Settings):
    """What a pulled directory says of itself: where it came from, and the sizes of its files."""

    name: str
    format: Format
    mirror: str
    sha256: str | None
    tree_sha256: str | None
    is_verified: bool
    files: dict[str, int]


def pull(
    name: str, entry: Entry, out: Path, *, drive: Path | None = None, replace: bool = False
) -> Pulled:
    """Have the files of `entry` in `out`; what is there, and complete, is not fetched again.

    Every mirror is tried in order; the first that gives what was registered wins.

    Raises:
        HubError: no mirror works, or `out` holds something else.
    """
    if not replace and (there := _there_already(name, entry, out)):
        return there
    check_free(out, replace=replace, mend=MEND)
    problems = []
    with _stage(out) as stage:
        for mirror in entry.mirrors:
            try:
                return _pull_from(mirror, name, entry, (out, Places(stage, drive, entry.size)))
            except HubError as error:
                if mirror != entry.mirrors[-1]:  # the error below has all of them, once
                    logger.warning("%s; trying the next mirror", error)
                problems.append(str(error))
    raise HubError(
        f"{name}: no mirror works: {' | '.join(problems)}; or get the archive by other means, then "
        f"'qat hub unpack FILE --out {out}'"
    )


def _pull_from(mirror: str, name: str, entry: Entry, to: tuple[Path, Places]) -> Pulled:
    out, places = to
    arrival = fetch(mirror, places)
    try:
        sha256 = _verify(arrival, entry, mirror)
        with atomic_directory(out, replace=True, place=places.stage) as partial:
            _fill(arrival, partial)
            pulled = _inspect(peeled(partial), entry, mirror, sha256)
            _write_receipt(peeled(partial), name, pulled)
    except HubError as error:
        if arrival.is_ours and not isinstance(error.__cause__, OSError):  # a full disk is no fault
            _remove(arrival.path)
        raise
    if arrival.is_ours:
        _remove(arrival.path)
    return pulled._replace(path=out)


def _verify(arrival: Arrival, entry: Entry, mirror: str) -> str | None:
    """The SHA-256 of an archive; None for a directory."""
    if arrival.path.is_dir():
        return None
    with arrival.path.open("rb") as file:
        if is_web_page(file.read(512)):
            raise HubError(
                f"{mirror}: a web page came instead of a file (a used up quota, or a login); fetch "
                "it in a browser, or use another mirror"
            )
    size, sha256 = arrival.path.stat().st_size, sha256_file(arrival.path)
    if entry.size is not None and size != entry.size:
        raise HubError(f"{mirror}: {size:,} bytes came, {entry.size:,} were registered")
    if entry.sha256 is not None and sha256 != entry.sha256:
        raise HubError(
            f"{mirror}: SHA-256 is {sha256}, registered is {entry.sha256}; ask who registered it"
        )
    return sha256


def _fill(arrival: Arrival, partial: Path) -> None:
    if arrival.path.is_dir():
        copy_files(regular_files(arrival.path), arrival.path, partial)
    elif _is_packed(arrival.path) or not arrival.name.endswith(PICKLE):
        extract(arrival.path, partial)
    elif arrival.is_ours:
        arrival.path.rename(partial / arrival.name)
    else:
        beside = (arrival.path.with_name(each) for each in LITTLE)
        files = [arrival.path, *(path for path in beside if path.is_file())]
        copy_files(files, arrival.path.parent, partial)


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith(tuple(OPENERS))


def _inspect(root: Path, entry: Entry, mirror: str, sha256: str | None) -> Pulled:
    found = format_of(root, entry.kind)
    tree = sha256_tree(root) if entry.tree_sha256 or sha256 is None else None
    if entry.tree_sha256 and tree != entry.tree_sha256:
        raise HubError(
            f"{mirror}: SHA-256 of the files is {tree}, registered is {entry.tree_sha256}; ask who "
            "registered it"
        )
    is_verified = bool(entry.tree_sha256 or (entry.sha256 and sha256))
    if not is_verified:
        logger.info("%s: SHA-256 %s; nothing to compare it with", mirror, sha256 or tree)
    return Pulled(root, found, mirror, sha256, tree, is_verified, is_new=True)


def _write_receipt(root: Path, name: str, pulled: Pulled) -> None:
    sizes = {p.relative_to(root).as_posix(): p.stat().st_size for p in regular_files(root)}
    facts = {key: getattr(pulled, key) for key in Receipt.model_fields if key in pulled._fields}
    receipt = Receipt(name=name, files=sizes, **facts | {"mirror": scrubbed(pulled.mirror)})
    (root / RECEIPT).write_text(receipt.model_dump_json(indent=1), encoding="utf-8")


def _there_already(name: str, entry: Entry, out: Path) -> Pulled | None:
    """What `out` holds if that is `name`, complete, or something placed there by hand.

    Raises:
        HubError: `out` holds another entry, or files of it are missing or cut.
    """
    if not out.is_dir() or not any(out.iterdir()):
        return None
    if not (out / RECEIPT).is_file():
        logger.info("%s was not pulled by qat; it is taken as it is", out)
        return Pulled(out, format_of(out, entry.kind), None, None, None, False, is_new=False)
    receipt = _read_receipt(out / RECEIPT)
    if why := _missing(out, receipt, name):
        raise HubError(f"{out} is not all of {name!r}: {why}; replace it with --force")
    known = {key: getattr(receipt, key) for key in Receipt.model_fields if key in Pulled._fields}
    return Pulled(out, is_new=False, **known)


def _read_receipt(path: Path) -> Receipt:
    try:
        return Receipt.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise HubError(f"{path}: {explain(error)}; pull again with --force") from None


def _missing(out: Path, receipt: Receipt, name: str) -> str:
    """Why `out` is not what was pulled as `name`; empty if it is."""
    if receipt.name != name:
        return f"it is {receipt.name!r}"
    for each, size in receipt.files.items():
        path = out / each
        if not path.is_file() or path.stat().st_size != size:
            return f"{each} is missing or cut"
    return ""


@contextmanager
def _stage(out: Path) -> Iterator[Path]:
    """A directory beside `out` for this pull alone; it stays if a download waits in it.

    Raises:
        HubError: another process is pulling to `out`, or nothing can be written there.
    """
    stage = real(out).parent / f".{real(out).name}.pull"
    with ExitStack() as stack:
        try:
            stack.enter_context(parents_of(stage))
            if stage.exists() and any(stage.iterdir()) and not (stage / "lock").is_file():
                raise HubError(
                    f"{stage} is in the way, expected a place for downloads; move it or choose "
                    "another --out"
                )
            stage.mkdir(exist_ok=True)
            lock = stack.enter_context((stage / "lock").open("w"))
        except OSError as error:
            raise HubError(
                f"{stage}: {error.strerror}; choose an --out below a directory that you may write "
                "to"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(f"another process is pulling to {out}; wait for it") from None
        try:
            for left in filter(Path.is_dir, stage.iterdir()):
                if LEAVING.fullmatch(left.name):  # by a process that was killed
                    shutil.rmtree(left)
            yield stage
        finally:
            if not any(path.is_file() for path in stage.rglob("*.part")):
                shutil.rmtree(stage)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)  # a single file became part of the directory
