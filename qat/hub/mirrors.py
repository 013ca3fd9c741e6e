"""Copy the content of a mirror to the local disk, with one function per kind of mirror."""

import errno
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qat.config import fingerprint
from qat.errors import HubError, QatError, how_to_install
from qat.files import inside
from qat.hooks import extension
from qat.hub.files import MIB, SUFFIXES, copy_file, is_archive, mebibytes
from qat.hub.web import TIMEOUT_S, download
from qat.logs import progress
from qat.secrets import scrubbed

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PICKLE = ".pt"
"""Suffix of a checkpoint file of the reference system."""
OF_STORES = {
    "aiohttp": "ClientError",
    "botocore.exceptions": "BotoCoreError",
    "gcsfs.retry": "HttpError",
    "google.auth.exceptions": "GoogleAuthError",
}
"""Exceptions of the libraries that access object stores, by module, besides Python's own."""


class FetchPlaces(NamedTuple):
    """Local directories and sizes that a fetch uses."""

    stage: Path
    """A private directory, where interrupted downloads are kept for a resume."""
    drive: Path | None = None
    """Mount point of a Google Drive; None if not given."""
    size: int | None = None
    """Size of the archive in bytes, if known."""


class Arrival(NamedTuple):
    """A fetched file or directory on the local disk."""

    path: Path
    name: str
    """File name at the origin."""
    is_ours: bool
    """True if it lies in the stage and may be moved or removed."""


def fetch(mirror: str, places: FetchPlaces) -> Arrival:
    """Fetch the content of `mirror` to the local disk.

    Raises:
        HubError: the mirror lacks it, or the transfer fails; one line with the reason.
    """
    try:
        for scheme, fetcher in FETCHERS.items():
            if mirror.startswith(scheme):
                return fetcher(mirror.removeprefix(scheme), places)
        found = lookup(Path(mirror))
        return Arrival(found, found.name, is_ours=False)
    except OSError as error:  # an unmounted Drive or a full disk
        raise HubError(f"{mirror}: {error.strerror or error}") from error


def lookup(path: Path) -> Path:
    """Find `path` as an archive (.tar.lz4 before .tgz), else as it is.

    Raises:
        HubError: neither exists.
    """
    names = [path] if is_archive(path.name) else [Path(f"{path}{suffix}") for suffix in SUFFIXES]
    for candidate in [*names, path]:
        if candidate.exists():
            return candidate
    raise HubError(f"{path} is not there, neither as {', '.join(SUFFIXES)} nor as a directory")


def in_bucket(mirrors: tuple[str, ...], bucket: str) -> tuple[str, ...]:
    """Translate `drive:` mirrors for a Drive in a gs:// bucket into the paths that `lookup` tries.

    Checking a bucket costs a request, so each candidate path becomes a mirror of its own.
    """
    places: list[str] = []
    for mirror in mirrors:
        path = f"{bucket.rstrip('/')}/{mirror.removeprefix('drive:')}"
        if not mirror.startswith("drive:"):
            places.append(mirror)
        elif is_archive(path) or path.endswith(PICKLE):
            places.append(path)
        else:
            places += [*(f"{path}{suffix}" for suffix in SUFFIXES), path]
    return tuple(places)


def open_store(address: str, error: type[QatError]) -> tuple["AbstractFileSystem", str]:
    """Return the fsspec file system for an address such as `s3://bucket/path`, and the path.

    Raises:
        error: no installed library supports the address.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as found:
        raise error(
            f"{address} cannot be read ({found}), expected an address that fsspec knows; for "
            f"s3:// and gs:// install what reads it: {how_to_install('remote')}"
        ) from None


def store_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of store access: Python's own, and those of imported libraries."""
    found = ((sys.modules.get(module), name) for module, name in OF_STORES.items())
    own = (getattr(module, name) for module, name in found if module is not None)
    return (OSError, RuntimeError, ValueError, *own)


@contextmanager
def in_store(address: str) -> Iterator[tuple["AbstractFileSystem", str]]:
    """Yield the store of `address` and the path in it; turn its exceptions into one-line errors.

    Raises:
        HubError: no installed library supports the address, or the store fails.
    """
    store, root = open_store(address, HubError)
    try:
        yield store, root
    except store_errors() as error:
        if getattr(error, "errno", None) == errno.ENOSPC:  # the local disk is full, not the store
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise HubError(f"{address}: {scrubbed(why)}") from None


def _drive(relative: str, places: FetchPlaces) -> Arrival:
    if places.drive is None:
        raise HubError(
            f"drive:{relative} needs the place of a mounted Drive; add --drive DIR (for setup.sh: "
            "GDRIVE_PATH=DIR)"
        )
    if not places.drive.is_dir():
        raise HubError(f"Drive is not mounted at {places.drive}; mount it, or mend --drive")
    mirror = f"mirror drive:{relative}"
    found = lookup(inside(places.drive, relative, found_in=mirror, error=HubError))
    if not is_archive(found.name):
        return Arrival(found, found.name, is_ours=False)
    part = _part(places, f"drive:{relative}", found.name)
    bar = progress(f"copying {found.name}", mebibytes(found.stat().st_size), "MiB")
    with bar as ticker, part.open("wb") as out:
        copy_file(found, out, ticker)
    return Arrival(part, found.name, is_ours=True)


def _web(scheme: str, address: str, places: FetchPlaces) -> Arrival:
    url = f"{scheme}{address}"
    name = address.partition("?")[0].rstrip("/").rpartition("/")[2]
    part = _part(places, url, name)
    download(url, part, places.size)
    return Arrival(part, name, is_ours=True)


def _storage(address: str, places: FetchPlaces) -> Arrival:
    url = f"gs://{address}".rstrip("/")
    name = url.rpartition("/")[2]
    part = _part(places, url, name)
    with in_store(url) as (store, root):
        if store.isfile(root):
            store.get_file(root, str(part))
            return Arrival(part, name, is_ours=True)
        files = store.find(root)
        if not files:
            raise HubError(f"{url} is not there, neither as a file nor as a directory")
        # remove files of an earlier attempt, since the mirror may have changed
        shutil.rmtree(part, ignore_errors=True)
        for file in files:
            inner = file.removeprefix(root).lstrip("/")
            to = inside(part, inner, found_in=url, error=HubError)
            to.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(file, str(to))
    return Arrival(part, name, is_ours=True)


def _google_drive(file_id: str, places: FetchPlaces) -> Arrival:
    import gdown

    directory = _part(places, f"gdrive:{file_id}", "download")
    directory.mkdir(exist_ok=True)
    bar = progress(f"fetching gdrive:{file_id}", places.size and mebibytes(places.size), "MiB")
    with bar as ticker:
        try:
            path = gdown.download(
                id=file_id,
                output=f"{directory}/",
                quiet=True,
                resume=True,
                use_cookies=False,
                progress=lambda received, _: ticker.reach(received // MIB),
                timeout=TIMEOUT_S,
                retries=2,
            )
        except (gdown.exceptions.DownloadError, OSError) as error:
            raise HubError(f"gdrive:{file_id}: {_drive_reason(str(error))}") from None
    return Arrival(Path(path), Path(path).name, is_ours=True)


def _drive_reason(message: str) -> str:
    words = " ".join(message.split())
    if "many users" in words or "quota" in words.casefold():
        return (
            "Google's quota of downloads of this file is used up for a day; make a copy in your "
            "own Drive, mount that and add --drive DIR"
        )
    if "ConnectionPool" in words:
        return "Google Drive cannot be reached from here"
    return f"{words[:160]}; is it shared with anyone who has the link?"


def _model_hub(address: str, places: FetchPlaces) -> Arrival:
    address = address.removeprefix("//")
    directory = _part(places, f"hf:{address}", "repository")
    extension("qat.publish", "repository").download(address, directory)
    name = address.partition("@")[0].rpartition("/")[2]
    return Arrival(directory, name, is_ours=True)


def _part(places: FetchPlaces, mirror: str, name: str) -> Path:
    """Return the path of a partial download, different for each mirror."""
    return places.stage / f"{fingerprint(mirror)}-{name[:100]}.part"


FETCHERS: dict[str, Callable[[str, FetchPlaces], Arrival]] = {
    "drive:": _drive,
    "gdrive:": _google_drive,
    "https://": partial(_web, "https://"),
    "http://": partial(_web, "http://"),
    "gs://": _storage,
    "hf:": _model_hub,
}
