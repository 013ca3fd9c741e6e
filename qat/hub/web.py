"""Resumable downloads over http(s), and what every HTTP client here retries after which pause."""

import logging
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self
from weakref import WeakSet

import httpx2

from qat.errors import HubError
from qat.hub.files import MIB, mebibytes
from qat.logs import progress

logger = logging.getLogger(__name__)
TIMEOUT_S = 60.0
"""Read and connect timeout in seconds."""
PATIENCE_S = 600.0
"""Time in seconds within which each further MiB has to arrive."""
ATTEMPTS = 3
"""Maximum number of consecutive attempts without progress."""
PAUSE_S, LONGEST_S = 1.0, 60.0
"""Pause before the second attempt, doubled before each further one, and the longest pause, in
seconds."""
BUSY = (408, 425, 429, 500, 502, 503, 504)  # HTTP status codes after which a request is retried
REDIRECTS = 10
VALIDATORS = {"ETag": re.compile(r'"[!#-~]{0,256}"'), "Last-Modified": re.compile(r"[ -~]{1,64}")}
"""Headers that identify a version of a file, with their syntax; weak ETags do not qualify."""
# Content-Range of a partial response
PART = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})")


class Retryable(Exception):  # noqa: N818 - not an error: a retry follows
    """A response that may differ on the next attempt; `wait_s` is when, if the server said so."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


RETRYABLE = (Retryable, httpx2.TransportError)


def status_of(answer: httpx2.Response) -> str:
    """Return a response's status as `503 Service Unavailable`."""
    code = answer.status_code
    return f"{code} {httpx2.codes.get_reason_phrase(code)}".rstrip()


def check_busy(answer: httpx2.Response, message: str) -> None:
    """Raise `Retryable` with `message` for a server that may answer later."""
    if answer.status_code in BUSY:
        wait = answer.headers.get("Retry-After", "")
        raise Retryable(message, min(LONGEST_S, float(wait)) if wait.isdecimal() else None)


def pause_s(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row."""
    return min(LONGEST_S, PAUSE_S * 2 ** min(max(0, failures - 1), 16))  # no float holds 2**1024


class _Version(NamedTuple):
    """The version of a file to which the bytes of a partial download belong."""

    validator: str
    """Its ETag or Last-Modified; empty if the server sends none."""
    total: int | None
    """Size in bytes, if the server sent it."""


def download(url: str, part: Path, size: int | None = None, most: int | None = None) -> None:
    """Download `url` into the file `part`, resuming after the bytes that are already there.

    Bytes are only reused if the server confirms the same version: the request is conditional
    (If-Range), and the response must name the same validator. A server without range support sends
    the whole file again.

    Args:
        url: https:// or http://.
        part: target file; if the download fails it is kept for the next attempt.
        size: expected size in bytes, if known.
        most: maximum size in bytes; by default the free disk space.

    Raises:
        HubError: the server refuses, sends a web page or another size, redirects to an unencrypted
            address, or is too slow.
    """
    failures, furthest = 0, _length(part)
    with _Watchdog() as watchdog:
        while True:
            try:
                return _attempt(url, part, (size, most), watchdog)
            except (httpx2.InvalidURL, UnicodeError) as error:
                raise HubError(
                    f"{url}: what this address leads to is none ({error}); check the mirror"
                ) from None
            except RETRYABLE as error:
                kept = f"({_length(part):,} bytes kept)"
                if watchdog.is_over:
                    raise HubError(
                        f"{url}: less than {MIB:,} bytes came in {PATIENCE_S:.0f} s {kept}; go on "
                        "with the same command later, or use another mirror"
                    ) from None
                failures = 0 if _length(part) > furthest else failures + 1
                furthest = max(furthest, _length(part))
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                if failures >= ATTEMPTS:
                    raise HubError(f"{url}: {reason} {kept}") from None
                logger.info("%s: %s; going on", url, reason)
                time.sleep(pause_s(failures))


def _attempt(
    url: str, part: Path, wished: tuple[int | None, int | None], watchdog: "_Watchdog"
) -> None:
    size, most = wished
    start, known = _length(part), _known_version(part)
    headers = {"User-Agent": "qat", "Accept-Encoding": "identity"}
    if not (start and known.validator):
        start = 0
    else:
        headers |= {"Range": f"bytes={start}-", "If-Range": known.validator}
    with _answer(url, headers, watchdog) as answer:
        if answer.status_code == 416 and start:
            return _accept_if_whole(part, known, answer)
        message = f"the server answers {status_of(answer)}"
        check_busy(answer, message)
        if answer.status_code not in (200, 206):
            raise HubError(f"{url}: {message}")
        version = _version(url, answer, start)
        # a part has to continue the bytes on disk; a server need not say how many there are in all
        is_same = version.validator == known.validator and known.total in (None, version.total)
        if answer.status_code == 206 and not is_same:
            part.unlink()
            raise Retryable("the file there is another one now")
        start = start if answer.status_code == 206 else 0
        _check(url, answer, part, (size, version.total, start))
        if most is not None and (version.total or 0) > most:
            raise HubError(f"{url}: the server has {version.total:,} bytes, expected {most:,}")
        version_file(part).write_text("\n".join(map(str, version)), encoding="utf-8")
        _receive(answer, part, (start, version.total, size or most), watchdog)


@contextmanager
def _answer(url: str, headers: dict[str, str], watchdog: "_Watchdog") -> Iterator[httpx2.Response]:
    """Yield the server's response; check each redirect before it is followed."""
    schemes = ("https",) if url.startswith("https://") else ("http", "https")
    with httpx2.Client(timeout=TIMEOUT_S, headers=headers) as client:
        request = client.build_request("GET", url, extensions={"trace": watchdog.note})
        # not httpx2's own redirects: before it follows one, it reads the body, however long
        for _ in range(REDIRECTS):
            answer = client.send(request, stream=True)
            try:
                if answer.next_request is None:
                    yield answer
                    return
            finally:
                answer.close()
            request = answer.next_request
            if request.url.scheme not in schemes:
                raise HubError(
                    f"{url}: the server leads to {str(request.url)[:200]}, which is not encrypted, "
                    f"expected {' or '.join(schemes)}; use another mirror"
                )
    raise HubError(f"{url}: the server leads on more than {REDIRECTS} times; use another mirror")


def _accept_if_whole(part: Path, known: _Version, answer: httpx2.Response) -> None:
    """Handle status 416: accept `part` if it is the whole file, otherwise delete it and retry."""
    length = _length(part)
    is_whole = answer.headers.get("Content-Range") == f"bytes */{length}" and known.total == length
    if not is_whole or _validator(answer) not in ("", known.validator):
        part.unlink()
        raise Retryable("the file there is another one now")


def _version(url: str, answer: httpx2.Response, start: int) -> _Version:
    if answer.status_code != 206:
        length = answer.headers.get("Content-Length", "")
        return _Version(_validator(answer), int(length) if length.isdecimal() else None)
    found = PART.fullmatch(answer.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != start or not start:
        raise HubError(f"{url}: the server sent another part than the one asked for")
    return _Version(_validator(answer), int(found[2]))


def _check(
    url: str,
    answer: httpx2.Response,
    part: Path,
    sizes: tuple[int | None, int | None, int],
) -> None:
    wanted, total, start = sizes
    kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "text/html":
        raise HubError(f"{url}: the server sends a web page instead of a file; is it public?")
    if wanted is not None and total is not None and total != wanted:
        raise HubError(f"{url}: the server has {total:,} bytes, expected {wanted:,}")
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - start > free:
        raise HubError(f"{url}: {total - start:,} bytes to come, {free:,} free at {part.parent}")


def _receive(
    answer: httpx2.Response,
    part: Path,
    sizes: tuple[int, int | None, int | None],
    watchdog: "_Watchdog",
) -> None:
    start, total, size = sizes
    most = total or size or shutil.disk_usage(part.parent).free
    bar = progress(f"fetching {part.stem}", None if total is None else mebibytes(total), "MiB")
    watchdog.begin(start)
    with bar as ticker, part.open("r+b" if start else "wb") as file:
        ticker.reach(start // MIB)
        received, cause = file.seek(start), None
        try:
            for chunk in answer.iter_raw():
                file.write(chunk)
                received += len(chunk)
                if received > most:
                    part.unlink()
                    raise HubError(f"{answer.url}: the server sends more than {most:,} bytes")
                watchdog.advance(received)
                ticker.reach(received // MIB)
        except httpx2.TransportError as error:
            cause = error
    if watchdog.is_over or total not in (None, received):
        of = "" if total is None else f" of {total:,}"
        raise Retryable(f"broke off after {received:,}{of} bytes")
    if cause is not None:
        raise cause


def _validator(answer: httpx2.Response) -> str:
    for name, form in VALIDATORS.items():
        if form.fullmatch(answer.headers.get(name, "")):
            return answer.headers[name]
    return ""


def _known_version(part: Path) -> _Version:
    """Return validator and size of the file whose first bytes lie in `part`."""
    path = version_file(part)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    validator, _, total = text.partition("\n")
    return _Version(validator, int(total) if total.isdecimal() else None)


def version_file(part: Path) -> Path:
    """Return the file that records the version of the bytes in `part`."""
    return part.with_name(f"{part.name}.version")


def _length(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


class Connections:
    """The connections of an HTTP client, which another thread can shut down.

    Read timeouts are not enough against a slow server: a byte per minute, even within the headers,
    keeps a connection alive.
    """

    def __init__(self) -> None:
        self.is_over = False
        """True after `end`."""
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.Lock()

    def note(self, event: str, info: dict) -> None:
        """Remember the socket of each new connection (a trace callback of the HTTP library)."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._sockets.add(info["return_value"].get_extra_info("socket"))
            if self.is_over:
                self.shut()

    def shut(self) -> None:
        """Abort all requests in flight."""
        with self._lock:
            sockets = [*self._sockets]
        for each in sockets:  # closing a socket does not wake a thread that reads from it
            with suppress(OSError):  # it is closed already
                each.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Abort all requests in flight, and those that begin later."""
        self.is_over = True
        self.shut()


class _Watchdog(Connections):
    """Ends a download's connections after `PATIENCE_S` without a further MiB."""

    def __enter__(self) -> Self:
        self._mark = 0
        self._start_timer()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def begin(self, start: int) -> None:
        """Set the position of the first byte to receive."""
        self._mark = start

    def advance(self, received: int) -> None:
        """Restart the timer whenever another MiB of the file has arrived."""
        if received >= self._mark + MIB:
            self._mark = received
            self._timer.cancel()
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(PATIENCE_S, self.end)
        self._timer.daemon = True
        self._timer.start()
