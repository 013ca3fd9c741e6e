"""Brings what a mirror holds to this machine's own disk, one function for each kind of mirror."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from qat.config import fingerprint
from qat.errors import HubError
from qat.files import inside
from qat.hub.files import MIB, SUFFIXES, copy_file, is_archive, mebibytes
from qat.hub.web import TIMEOUT_S, download
from qat.logs import progress

PICKLE = ".pt"
"""A checkpoint of the reference system that lies alone."""


class FetchPlaces(NamedTuple):
    """Where mirrors read and write."""

    stage: Path
    """A directory of ours, where broken downloads wait to be taken up again."""
    drive: Path | None = None
    """Where a Drive is mounted; None if nobody said so."""
    size: int | None = None
    """Bytes of the archive, if known."""


class Arrival(NamedTuple):
    """What came: a file or a directory on this machine."""

    path: Path
    name: str
    """What it is called at its origin."""
    is_ours: bool
    """It lies in the stage and may be moved or removed."""


def fetch(mirror: str, places: FetchPlaces) -> Arrival:
    """What `mirror` holds, on the local disk.

    Raises:
        HubError: it is not there, or does not come; one line with the reason.
    """
    try:
        for scheme, fetcher in FETCHERS.items():
            if mirror.startswith(scheme):
                return fetcher(mirror.removeprefix(scheme), places)
        return _local(Path(mirror))
    except OSError as error:  # of a Drive that went away, or a full disk
        raise HubError(f"{mirror}: {error.strerror or error}") from error


def lookup(path: Path) -> Path:
    """`path` itself, or the archive of that name: .tar.lz4 before .tgz before a directory.

    Raises:
        HubError: none of them is there.
    """
    names = [path] if is_archive(path.name) else [Path(f"{path}{suffix}") for suffix in SUFFIXES]
    for candidate in [*names, path]:
        if candidate.exists():
            return candidate
    raise HubError(f"{path} is not there, neither as {', '.join(SUFFIXES)} nor as a directory")


def in_bucket(mirrors: tuple[str, ...], bucket: str) -> tuple[str, ...]:
    """Mirrors for a Drive that is a gs:// bucket: each `drive:` becomes what `lookup` would try.

    Nobody can look into a bucket without a request, so each place is a mirror of its own.
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


def storage_command(verb: str, *words: str) -> list[str]:
    """A command line of Google's own tool for gs:// paths: `cp`, or `rsync` of directories.

    Raises:
        HubError: neither gcloud nor gsutil is on the PATH.
    """
    recursive = ["-r"] if verb == "rsync" else []
    if shutil.which("gcloud"):
        return ["gcloud", "storage", verb, *recursive, *words]
    if shutil.which("gsutil"):
        return ["gsutil", "-q", verb, *recursive, *words]
    raise HubError("gs:// needs gcloud or gsutil, and neither is on the PATH; install gcloud")


def run_storage(verb: str, *words: str) -> None:
    """Run Google's tool, silently.

    Raises:
        HubError: it is missing or fails; the line that says why.
    """
    command = storage_command(verb, *words)
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        why = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise HubError(f"{' '.join(command[:3])} {words[0]}: {why}")


def _local(path: Path) -> Arrival:
    found = lookup(path)
    return Arrival(found, found.name, is_ours=False)


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


def _web(scheme: str) -> Callable[[str, FetchPlaces], Arrival]:
    def fetch_web(address: str, places: FetchPlaces) -> Arrival:
        url = f"{scheme}{address}"
        name = address.partition("?")[0].rstrip("/").rpartition("/")[2]
        part = _part(places, url, name)
        download(url, part, places.size)
        return Arrival(part, name, is_ours=True)

    return fetch_web


def _storage(address: str, places: FetchPlaces) -> Arrival:
    url = f"gs://{address}".rstrip("/")
    name = url.rpartition("/")[2]
    part = _part(places, url, name)
    if is_archive(name) or name.endswith(PICKLE):
        run_storage("cp", url, str(part))
    else:
        part.mkdir(exist_ok=True)
        run_storage("rsync", url, str(part))
    return Arrival(part, name, is_ours=True)


def _google_drive(file_id: str, places: FetchPlaces) -> Arrival:
    import gdown

    directory = _part(places, f"gdrive:{file_id}", "download")
    directory.mkdir(exist_ok=True)
    bar = progress(f"fetching gdrive:{file_id}", places.size and mebibytes(places.size), "MiB")
    with bar as ticker:
        shown = 0

        def show(received: int, _: int | None) -> None:
            nonlocal shown
            ticker.advance(received // MIB - shown)
            shown = received // MIB

        try:
            path = gdown.download(
                id=file_id,
                output=f"{directory}/",
                quiet=True,
                resume=True,
                use_cookies=False,
                progress=show,
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


def _model_hub(address: str, _: FetchPlaces) -> Arrival:
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = address.partition("@")
    try:
        path = snapshot_download(name, revision=revision or None)
    except (LocalEntryNotFoundError, httpx2.ConnectError):
        raise HubError(f"hf:{address}: the model hub cannot be reached from here") from None
    except (HfHubHTTPError, HFValidationError, httpx2.HTTPError, OSError) as error:
        raise HubError(f"hf:{address}: {' '.join(str(error).split())[:160]}") from None
    return Arrival(Path(path), name.rpartition("/")[2], is_ours=False)


def _part(places: FetchPlaces, mirror: str, name: str) -> Path:
    """Where a download of `mirror` waits: another one for every mirror."""
    return places.stage / f"{fingerprint(mirror)}-{name[:100]}.part"


FETCHERS: dict[str, Callable[[str, FetchPlaces], Arrival]] = {
    "drive:": _drive,
    "gdrive:": _google_drive,
    "https://": _web("https://"),
    "http://": _web("http://"),
    "gs://": _storage,
    "hf:": _model_hub,
}
