"""Fetch an entry of the registry: try its mirrors in order, verify the hash, write atomically."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from qat.errors import HubError
from qat.files import LEAVING, check_free, locked, parents_of, real, sha256_file
from qat.hub.files import (
    MEND,
    Format,
    atomic_directory,
    copy_files,
    format_of,
    innermost_directory,
    regular_files,
    sha256_tree,
)
from qat.hub.mirrors import PICKLE, Arrival, FetchPlaces, fetch
from qat.hub.registry import (
    ASK,
    NO_HASH,
    REPLACE,
    UNPROVEN,
    HubEntry,
    examine,
    extra_files,
    is_registered,
    read_receipt,
    write_receipt,
)
from qat.hub.unpack import OPENERS, extract, is_web_page

logger = logging.getLogger(__name__)
SIDE_FILES = ("config.json",)
"""Files that are copied along with a single-file checkpoint."""


class Pulled(NamedTuple):
    """The location of a pulled entry, and the result of its verification."""

    path: Path
    format: Format
    mirror: str | None
    """Mirror it came from; None if the user placed the files by hand."""
    sha256: str | None
    """SHA-256 of the archive; None if there was none."""
    tree_sha256: str | None
    """SHA-256 of the files; None if they were placed by hand and no hash is registered."""
    is_verified: bool
    """True if every byte was compared with a registered hash: that of the files, or that of the
    archive which was just unpacked."""
    is_new: bool
    """True if it was fetched by this call."""


def pull(
    name: str, entry: HubEntry, out: Path, *, drive: Path | None = None, replace: bool = False
) -> Pulled:
    """Fetch the files of `entry` into `out`, unless they are already there and complete.

    Mirrors are tried in order; the first one whose content matches the registered hashes is used.

    Raises:
        HubError: no mirror works, or `out` holds something else.
    """
    if not replace and (there := _existing(name, entry, out)):
        return there
    check_free(out, replace=replace, mend=MEND)
    problems = []
    with _stage(out) as stage:
        for mirror in entry.mirrors:
            try:
                return _pull_from(mirror, name, entry, (out, FetchPlaces(stage, drive, entry.size)))
            except HubError as error:
                # the final error lists all problems, so the last one is not logged
                if mirror != entry.mirrors[-1]:
                    logger.warning("%s; trying the next mirror", error)
                problems.append(str(error))
    raise HubError(
        f"{name}: no mirror works: {' | '.join(problems)}; or get the archive by other means, then "
        f"'qat hub unpack FILE --out {out}'"
    )


def _pull_from(mirror: str, name: str, entry: HubEntry, to: tuple[Path, FetchPlaces]) -> Pulled:
    out, places = to
    arrival = fetch(mirror, places)
    try:
        sha256 = _verify(arrival, entry, mirror)
        with atomic_directory(out, replace=True, place=places.stage) as partial:
            if not _fill(arrival, partial):
                sha256 = None
            root = innermost_directory(partial)
            found = format_of(root, entry.kind)
            receipt = write_receipt(root, name, mirror, sha256)
            tree = receipt.tree_sha256
            is_verified = is_registered(entry, sha256, tree, where=mirror, mend=ASK) or (
                sha256 is not None and sha256 == entry.sha256
            )
    except HubError as error:
        # keep the download if the disk is full
        if arrival.is_ours and not isinstance(error.__cause__, OSError):
            _remove(arrival.path)
        raise
    if arrival.is_ours:
        _remove(arrival.path)
    pulled = Pulled(out, found, mirror, sha256, tree, is_verified, is_new=True)
    return _warn_if_unproven(pulled, extra_files(out, receipt.files))


def _verify(arrival: Arrival, entry: HubEntry, mirror: str) -> str | None:
    """Check size and hash of an archive; return its SHA-256, or None for a directory."""
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
        raise HubError(f"{mirror}: SHA-256 is {sha256}, registered is {entry.sha256}; {ASK}")
    return sha256


def _fill(arrival: Arrival, partial: Path) -> bool:
    """Write the files into `partial`; return whether the arrival's hash covers all of them."""
    if arrival.path.is_dir():
        copy_files(regular_files(arrival.path), arrival.path, partial)
    elif _is_packed(arrival.path) or not arrival.name.endswith(PICKLE):
        extract(arrival.path, partial)
    elif arrival.is_ours:
        arrival.path.rename(partial / arrival.name)
    else:
        beside = (arrival.path.with_name(each) for each in SIDE_FILES)
        files = [arrival.path, *(path for path in beside if path.is_file())]
        copy_files(files, arrival.path.parent, partial)
        return len(files) == 1
    return True


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith(tuple(OPENERS))


def _existing(name: str, entry: HubEntry, out: Path) -> Pulled | None:
    """Return the content of `out` if it is the complete entry, or files placed by hand; else None.

    Raises:
        HubError: `out` holds another entry, or its files differ from those fetched or registered.
    """
    if not out.is_dir() or not any(out.iterdir()):
        return None
    receipt = read_receipt(out)
    if receipt is None:
        return _placed_by_hand(entry, out)
    # None: unpacked by 'qat hub unpack', as an error below advises
    if receipt.name not in (None, name):
        raise HubError(f"{out} is not {name!r}: it is {receipt.name!r}; {REPLACE}")
    extra, tree = examine(out, receipt), receipt.tree_sha256
    is_verified = is_registered(entry, receipt.sha256, tree, where=str(out), mend=REPLACE)
    found, mirror = format_of(out, entry.kind), receipt.mirror
    return _warn_if_unproven(
        Pulled(out, found, mirror, receipt.sha256, tree, is_verified, False), extra
    )


def _placed_by_hand(entry: HubEntry, out: Path) -> Pulled:
    """Describe files that the user placed in `out`; hash them if a hash is registered."""
    tree = sha256_tree(out) if entry.tree_sha256 else None
    is_verified = tree is not None and tree == entry.tree_sha256
    note = "its files are the registered ones" if is_verified else "it is taken as it is"
    logger.info("%s was not pulled by qat; %s", out, note)
    pulled = Pulled(out, format_of(out, entry.kind), None, None, tree, is_verified, is_new=False)
    names = [path.relative_to(out).as_posix() for path in regular_files(out)]
    return _warn_if_unproven(pulled, extra_files(out, names)) if is_verified else pulled


def _warn_if_unproven(pulled: Pulled, extra: list[str]) -> Pulled:
    """Warn if the result is unproven: no hash, or extra files; extra files clear `is_verified`."""
    if extra:
        logger.warning(
            "%s also holds %d files that were not pulled (%s), so it is not verified",
            *(pulled.path, len(extra), extra[0]),
        )
    elif not pulled.is_verified:
        sha256 = pulled.sha256 or pulled.tree_sha256
        note = NO_HASH if pulled.is_new else f"{UNPROVEN}; {NO_HASH}"
        logger.warning("%s: SHA-256 %s; %s", pulled.mirror, sha256, note)
    return pulled._replace(is_verified=pulled.is_verified and not extra)


@contextmanager
def _stage(out: Path) -> Iterator[Path]:
    """Yield a private directory next to `out`; it is kept if it holds a partial download.

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
            stack.enter_context(locked(stage / "lock", out))
        except TimeoutError:
            raise HubError(f"another process is pulling to {out}; wait for it") from None
        except OSError as error:
            raise HubError(
                f"{stage}: {error.strerror}; choose an --out below a directory that you may write "
                "to"
            ) from None
        try:
            for left in filter(Path.is_dir, stage.iterdir()):
                if LEAVING.fullmatch(left.name):  # left by a killed process
                    shutil.rmtree(left)
            yield stage
        finally:
            if not any(path.is_file() for path in stage.rglob("*.part")):
                shutil.rmtree(stage)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)  # a single file was moved into the directory
