"""Downloads over https that go on where they broke off."""

import http.client
import logging
import re
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

from qat.errors import HubError
from qat.hub.files import mebibytes
from qat.hub.limits import MIB
from qat.logs import progress

logger = logging.getLogger(__name__)
TIMEOUT_S = 60.0
"""Without a byte, before a connection counts as broken."""
ATTEMPTS = 3
"""In a row that may end without a byte more than before."""
PAUSE_S = 1.0
"""Before the second attempt; doubled before each further one."""
BROKEN = (http.client.HTTPException, urllib.error.URLError, ConnectionError, TimeoutError)
BUSY = (408, 429, 500, 502, 503, 504)


def download(url: str, part: Path, size: int | None = None) -> None:
    """Fetch `url` into the file `part`, going on after what is there already.

    What is there is kept only if the server says that its file is still the same one (If-Range);
    a server that cannot send parts sends all of it again.

    Args:
        url: https:// or http://.
        part: the file; it stays, for the next time, if the download breaks off.
        size: bytes that the file has to have, if known.

    Raises:
        HubError: the server refuses, sends a web page or another size, or stays away.
    """
    failures, furthest = 0, _length(part)
    while True:
        try:
            return _attempt(url, part, size)
        except BROKEN as error:
            if isinstance(error, urllib.error.HTTPError) and error.code not in BUSY:
                raise HubError(f"{url}: the server answers {error.code} {error.reason}") from None
            failures = 0 if _length(part) > furthest else failures + 1
            furthest = max(furthest, _length(part))
            if failures >= ATTEMPTS:
                raise HubError(f"{url}: {_reason(error)} ({_length(part):,} bytes kept)") from None
            logger.info("%s: %s; going on", url, _reason(error))
            time.sleep(PAUSE_S * 2 ** max(0, failures - 1))


def _attempt(url: str, part: Path, size: int | None) -> None:
    start, validator = _length(part), _validator_file(part)
    headers = {"User-Agent": "qat", "Accept-Encoding": "identity"}
    version = validator.read_text() if start and validator.exists() else ""
    if version:
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    try:
        request = urllib.request.Request(url, headers=headers)
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        _accept_if_whole(part, error.headers.get("Content-Range", ""))
        return
    with answer:
        start = start if answer.status == 206 else 0
        total = _total(url, answer, start)
        _check(url, answer, part, (size, total, start))
        validator.write_text(_validator(answer.headers))
        limit = size or shutil.disk_usage(part.parent).free
        _receive(answer, part, (start, total, limit))


def _accept_if_whole(part: Path, content_range: str) -> None:
    """A server has nothing after what is here: either all is here, or too much is."""
    if content_range != f"bytes */{_length(part)}":
        part.unlink()
        raise http.client.HTTPException("the file there is another one now")


def _total(url: str, answer: http.client.HTTPResponse, start: int) -> int | None:
    if answer.status != 206:
        length = answer.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != start:
        raise HubError(f"{url}: the server sent another part than the one asked for")
    return int(found[2])


def _check(
    url: str,
    answer: http.client.HTTPResponse,
    part: Path,
    sizes: tuple[int | None, int | None, int],
) -> None:
    wanted, total, start = sizes
    if url.startswith("https://") and not answer.url.startswith("https://"):
        raise HubError(f"{url}: the server leads to {answer.url}, which is not encrypted")
    if answer.headers.get_content_type() == "text/html":
        raise HubError(f"{url}: the server sends a web page instead of a file; is it public?")
    if wanted is not None and total is not None and total != wanted:
        raise HubError(f"{url}: the server has {total:,} bytes, expected {wanted:,}")
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - start > free:
        raise HubError(f"{url}: {total - start:,} bytes to come, {free:,} free at {part.parent}")


def _receive(
    answer: http.client.HTTPResponse, part: Path, sizes: tuple[int, int | None, int]
) -> None:
    start, total, limit = sizes
    bar = progress(f"fetching {part.stem}", None if total is None else mebibytes(total), "MiB")
    with bar as ticker, part.open("r+b" if start else "wb") as file:
        ticker.advance(start // MIB)
        received = file.seek(start)
        while chunk := answer.read(MIB):
            file.write(chunk)
            received += len(chunk)
            if total is None and received > limit:
                part.unlink()
                raise HubError(f"{answer.url}: the server sends more than {limit:,} bytes")
            ticker.advance(received // MIB - (received - len(chunk)) // MIB)
    if total is not None and received != total:
        raise http.client.HTTPException(f"broke off after {received:,} of {total:,} bytes")


def _validator(headers: http.client.HTTPMessage) -> str:
    """What tells one version of a file from the next; empty if the server does not say."""
    etag = headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")


def _validator_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _length(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error or type(error).__name__)
