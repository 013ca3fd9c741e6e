"""Hostile answers of a web server on this machine: to downloads of the hub and to remote caches."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fuzzing import Forged

from qat.data.remote import open_cache
from qat.errors import QatError
from qat.hub import web

ONE, OTHER = (random.Random(i).randbytes(5000) for i in (1, 2))
"""Two versions of a file, equally long."""
HEADS = 60
"""Bytes of the file that the first answer brings before it breaks off."""
Answer = Callable[[bytes], bytes]
"""From a request to all bytes of the answer; the connection is closed then."""


@contextmanager
def opened(work: Path) -> Iterator[Callable[[int], Forged]]:
    """A server that answers each case in its own way, and a trap that nobody may ask."""
    web.PAUSE_S, web.TIMEOUT_S, web.PATIENCE_S = 0.001, 0.3, 1.0
    with Server() as server, Server() as trap:

        def case_of(seed: int) -> Forged:
            rng = random.Random(seed)
            make = rng.choice((splice, splice, chunks, heads, statuses, redirects, manifest))
            part = work / "file.part"

            def act() -> str:
                for path in work.iterdir():
                    path.unlink()
                server.answers, trap.asked = make(rng, trap.port), 0
                try:
                    if make is manifest:
                        open_cache(f"http://127.0.0.1:{server.port}/cache", local=work / "kept")
                        return "WRONG: a manifest was believed"
                    web.download(f"http://127.0.0.1:{server.port}/file", part)
                except QatError:
                    if trap.asked:
                        return "WRONG: asked where it may not"
                    raise
                whole = part.read_bytes()
                is_one = whole in (ONE, OTHER) or (make is not splice and whole in whole_parts())
                return "as one version has it" if is_one else "WRONG: a file that no server has"

            return Forged(make.__name__, act)

        yield case_of


def whole_parts() -> tuple[bytes, ...]:
    """What an answer that is sound, though odd, may bring."""
    return (b"", ONE[:HEADS], ONE[:5])


def splice(rng: random.Random, _: int) -> Iterator[Answer]:
    """Half of one version, and then a part, of another one or of nothing that fits."""
    etag = rng.choice(('"1"', "", "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT"))
    version = f"ETag: {etag}" if etag.startswith('"') else etag
    cut = rng.randrange(1, len(ONE))
    yield lambda _: head("200 OK", version, f"Content-Length: {len(ONE)}") + ONE[:cut]
    for _ in range(12):
        named = rng.choice(('ETag: "2"', 'ETag: W/"1"', "", 'ETag: "1\r\n x"', "ETag: \xff"))
        total = rng.choice((len(ONE), len(ONE) + 1, "*", -1, "", 10**30, "0x10"))
        begin = rng.choice((cut, cut, cut, 0, cut - 1, cut + 1, "-5"))
        status = rng.choice(("206 Partial Content", "206 Partial Content", "416 No", "200 OK"))
        place = f"Content-Range: bytes {begin}-{len(ONE) - 1}/{total}"
        if status.startswith("416"):
            place = f"Content-Range: bytes */{rng.choice((cut, total))}"
        body = OTHER if status.startswith("200") else OTHER[cut:]
        length = f"Content-Length: {len(body)}"
        yield lambda _, a=(status, named, place, length), b=body: head(*a) + b


def chunks(rng: random.Random, _: int) -> Iterator[Answer]:
    """Lengths of chunks that are none."""
    sizes = (
        "-5",
        "-1",
        "+5",
        "0x5",
        "5_0",
        " 5",
        "5 ",
        "",
        "f" * 17,
        "f" * 400,
        "5;a=\x00",
        "\u0665",
    )
    while True:
        size = rng.choice(sizes)
        end = rng.choice(("0\r\n\r\n", "0\r\nX: 1\r\n\r\n", "", "0\r\n" + "X: 1\r\n" * 5000))
        body = f"{size}\r\n".encode() + ONE[:5] + b"\r\n" + end.encode()
        yield lambda _, b=body: head("200 OK", "Transfer-Encoding: chunked") + b


def heads(rng: random.Random, _: int) -> Iterator[Answer]:
    """Heads that are none, endless ones, and ones that contradict themselves."""
    lines = (
        *("Content-Length: -5", "Content-Length: 5, 6", "Content-Length: 5\r\nContent-Length: 6"),
        *("Content-Length: " + "9" * 5000, "Content-Length: 1e3", "Content-Length: \xb2"),
        *("Content-Length: 5\r\nTransfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked"),
        *("X" * 70000 + ": 1", "X: " + "x" * 200000, "\r\n".join(["X: 1"] * 20000), ": x", "X : 1"),
        *(" folded: 1", "X: \x00", "X: \x1b[2J", "Content-Type: text/html", "Content-Encoding: br"),
        *("ETag: " + "x" * 60000, "Set-Cookie: " + "a=b; " * 5000, "Connection: upgrade"),
    )
    while True:
        chosen = rng.sample(lines, k=rng.randint(1, 3))
        yield lambda _, c=chosen: head("200 OK", *c) + ONE[:HEADS]


def statuses(rng: random.Random, _: int) -> Iterator[Answer]:
    """Answers that are no answer to a GET, or are endless."""
    first = (
        *("HTTP/1.1 099 x", "HTTP/1.1 1000 x", "HTTP/1.1 -1 x", "HTTP/9.9 200 OK", "HTTP/1.1 abc"),
        *(
            "HTTP/1.1 204 No",
            "HTTP/1.1 304 No",
            "HTTP/1.1 205 No",
            "HTTP/1.1 101 Switch",
            "ICY 200",
        ),
        *("HTTP/1.1 206 Part", "HTTP/1.1 416 No", "HTTP/1.1 418 \x1b[31mred", "HTTP/1.1 503 Busy"),
        *("SSH-2.0-OpenSSH", "", "\x16\x03\x01", "220 ftp ready", "HTTP/1.1 407 Proxy", "<html>"),
    )
    while True:
        line = rng.choice(first)
        before = rng.choice(("", "", "HTTP/1.1 100 Continue\r\n\r\n" * rng.choice((1, 5000))))
        yield lambda _, b=before + line: b.encode("latin-1") + b"\r\n\r\n" + ONE[:HEADS]


def redirects(rng: random.Random, trap: int) -> Iterator[Answer]:
    """Places that are not to be asked, or are no places."""
    host = f"127.0.0.1:{trap}"
    places = (
        *(f"ftp://{host}/x", f"file://{host}/etc/passwd", "file:///etc/passwd", f"gopher://{host}"),
        *(
            f"ftps://{host}/x",
            f"ws://{host}/x",
            "data:,x",
            "javascript:1",
            "mailto:a@b",
            f"tcp://{host}",
        ),
        *("http://[", "http://[::1", "http://127.0.0.1:99999/", "http://127.0.0.1:-1/", "http://"),
        *("http://" + "a" * 70 + ".x/", "http://\xe9\xe9.invalid/", "//", "", "/file", "?", "\x00"),
        *("http://" + "a." * 200 + "x/", "HTTP:///x", f"http:ftp://{host}", "http://a@b@c:d/"),
    )
    while True:
        code, place = rng.choice((301, 302, 303, 307, 308, 300, 305)), rng.choice(places)
        yield lambda _, c=code, p=place: head(f"{c} Found", f"Location: {p}")


def manifest(rng: random.Random, _: int) -> Iterator[Answer]:
    """To whoever asks for a cache's manifest: something else, or something broken."""
    bodies = (b"{}", b"[" * 10**5, b"\xff" * 100, b"null", b'{"format": 3, "shards": 1}')
    while True:
        body, code = rng.choice(bodies), rng.choice((206, 302, 403, 404, 500, 503))
        length = f"Content-Length: {len(body)}"
        answers = (
            head("200 OK", length) + body,
            head("200 OK", length + "9") + body,
            head("200 OK", "Transfer-Encoding: chunked") + b"-5\r\n" + body,
            head(f"{code} X", "Location: ftp://h/x"),
            b"SSH-2.0\r\n",
            b"",
            head("200 OK", "Content-Length: x") + body,
            head("200 OK", "Content-Encoding: gzip", length) + body,
        )
        yield lambda _, data=rng.choice(answers): data  # noqa: B008 - drawn now, sent later


def head(status: str, *lines: str) -> bytes:
    """The head of an answer."""
    return "\r\n".join([f"HTTP/1.1 {status}", *filter(None, lines), "", ""]).encode(
        "latin-1", "replace"
    )


class Server:
    """Answers each request with the next of its answers, byte for byte, and hangs up."""

    def __init__(self) -> None:
        self.answers: Iterator[Answer] = iter(())
        self.asked = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> "Server":
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.asked += 1
                with suppress(OSError), connection:
                    connection.settimeout(1.0)
                    request = connection.recv(2**16)
                    answer = next(self.answers, None)
                    connection.sendall(b"" if answer is None else answer(request))
