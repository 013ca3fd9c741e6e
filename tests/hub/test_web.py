"""Downloads go on where they broke off, and nothing but the wished file comes of them."""

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import httpx2
import pytest
from hub_case import Server, serving

from qat.errors import HubError
from qat.hub import web
from qat.hub.files import MIB
from qat.hub.web import download

DATA = os.urandom(3 * MIB + 17)


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(web, "PAUSE_S", 0.001)
    monkeypatch.setattr(web, "TIMEOUT_S", 5.0)
    with serving(DATA) as server:
        yield server


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "file.part"


@pytest.mark.parametrize(
    ("behaviour", "asked"),
    [
        ({"break_after": [MIB, 2 * MIB]}, [None, f"bytes={MIB}-", f"bytes={3 * MIB}-"]),
        ({"break_after": [2 * MIB], "has_ranges": False}, [None, f"bytes={2 * MIB}-"]),
        ({"break_after": [2 * MIB], "version": 'W/"weak"'}, [None, None]),
        ({"statuses": [503, 429]}, [None, None, None]),
    ],
)
def test_a_broken_download_goes_on(server: Server, part: Path, behaviour: dict, asked) -> None:
    vars(server).update(behaviour)
    download(server.url, part)
    assert part.read_bytes() == DATA and server.asked == asked


def test_a_whole_file_is_not_sent_again(server: Server, part: Path) -> None:
    download(server.url, part)
    download(server.url, part)
    assert part.read_bytes() == DATA
    assert server.asked == [None, f"bytes={len(DATA)}-"]


def test_a_shorter_version_replaces_a_longer_one(server: Server, part: Path) -> None:
    download(server.url, part)
    server.data = DATA[: MIB + 3]  # the version says nothing of it
    download(server.url, part)
    assert part.read_bytes() == server.data


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (MIB + 5, {"version": '"2"'}),
        (3 * MIB, {"heeds_if_range": False, "version": '"2"'}),
        (3 * MIB, {"heeds_if_range": False, "version": 'W/"1"'}),
        (3 * MIB, {"heeds_if_range": False, "version": ""}),
        (2 * MIB, {}),  # and the version is the same
    ],
)
def test_a_part_of_another_file_is_not_spliced(server, part, size: int, changes: dict) -> None:
    server.break_after = [MIB, 0, 0, 0]
    with pytest.raises(HubError, match=r"1,048,576 bytes kept"):
        download(server.url, part)
    vars(server).update(data=os.urandom(size), **changes)
    download(server.url, part)
    assert part.read_bytes() == server.data


OK = b"HTTP/1.1 200 OK\r\n"


def test_an_answer_that_is_no_http_is_one_line(server: Server, part: Path) -> None:
    for raw in (
        OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabcde\r\n0\r\n\r\n",
        OK + b"Content-Length: -5\r\n\r\nabcde",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        OK + b"X: " + b"x" * 10**6,
        b"HTTP/1.1 302 Found\r\nLocation: http://[/\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://" + b"a" * 70 + b".x/\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ):
        server.raw = [raw] * 4
        with pytest.raises(HubError) as caught:
            download(server.url, part)
        assert "\n" not in str(caught.value) and not (part.exists() and part.stat().st_size)


def test_a_version_over_two_lines_is_none(server: Server, part: Path) -> None:
    server.raw = [OK + b'ETag: "1\r\n 2"\r\nContent-Length: 9\r\n\r\nabc']
    download(server.url, part)
    assert part.read_bytes() == DATA and server.asked == [None, None]


def test_a_place_that_is_not_http_is_not_asked(server: Server, part: Path) -> None:
    for scheme in ("ftp", "file", "gopher"):
        with socket.create_server(("127.0.0.1", 0)) as elsewhere:
            place = f"{scheme}://127.0.0.1:{elsewhere.getsockname()[1]}/etc/passwd"
            server.raw = [f"HTTP/1.1 302 Found\r\nLocation: {place}\r\n\r\n".encode()]
            with pytest.raises(HubError, match="leads to .*expected http or https"):
                download(server.url, part)
            elsewhere.setblocking(False)
            with pytest.raises(BlockingIOError):
                elsewhere.accept()


def test_what_is_to_be_encrypted_stays_so(part: Path, monkeypatch) -> None:
    def lead(request: httpx2.Request) -> httpx2.Response:
        assert request.url.scheme == "https"
        return httpx2.Response(302, headers={"Location": "http://host/file"})

    client, transport = httpx2.Client, httpx2.MockTransport(lead)
    monkeypatch.setattr(httpx2, "Client", lambda **given: client(transport=transport, **given))
    with pytest.raises(HubError, match="http://host/file"):
        download("https://host/file", part)


def test_a_server_that_leads_in_circles_is_left(server: Server, part: Path) -> None:
    server.raw = [f"HTTP/1.1 302 Found\r\nLocation: {server.url}\r\n\r\n".encode()] * 20
    with pytest.raises(HubError, match="leads on more than 10 times"):
        download(server.url, part)


@pytest.mark.parametrize("head", [b"", OK, OK + b"\r\n"], ids=["silence", "head", "body"])
def test_a_server_that_drips_is_left(part: Path, monkeypatch, head: bytes) -> None:
    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with suppress(OSError), connection:
            connection.sendall(head)
            while True:
                connection.sendall(b"x")
                time.sleep(0.01)

    monkeypatch.setattr(web, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=drip, args=(listener,), daemon=True).start()
        with pytest.raises(HubError, match="less than 1,048,576 bytes came in 0 s"):
            download(f"http://127.0.0.1:{listener.getsockname()[1]}/x", part)


def test_a_server_that_never_gets_further_is_left(server: Server, part: Path) -> None:
    server.has_ranges = False
    server.break_after = [2 * MIB, *[MIB // 2, MIB] * 20]
    with pytest.raises(HubError, match="broke off after"):
        download(server.url, part)
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"statuses": [404]}, "the server answers 404"),
        ({"statuses": [503] * 9}, "Service Unavailable .0 bytes kept."),
        ({"content_type": "text/html; charset=utf-8"}, "a web page instead of a file"),
        ({"data": b"short"}, "the server has 5 bytes, expected 3,145,745"),
    ],
)
def test_other_answers_are_refused(change: dict, message: str, server: Server, part: Path) -> None:
    vars(server).update(change)
    with pytest.raises(HubError, match=message):
        download(server.url, part, len(DATA))
    assert not part.exists()


def test_an_answer_of_unknown_length(server: Server, part: Path) -> None:
    server.has_length = False
    download(server.url, part, len(DATA))
    assert part.read_bytes() == DATA
    part.unlink()
    with pytest.raises(HubError, match="the server sends more than 2,000,000 bytes"):
        download(server.url, part, 2_000_000)
    assert not part.exists()


def test_a_file_that_does_not_fit_is_not_begun(server: Server, part: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    with pytest.raises(HubError, match="3,145,745 bytes to come, 1,048,576 free at"):
        download(server.url, part)
    assert not part.exists()


def test_nobody_answers(part: Path, monkeypatch) -> None:
    monkeypatch.setattr(web, "PAUSE_S", 0.001)
    with serving(b"") as gone:
        pass
    with pytest.raises(HubError, match="refused"):
        download(gone.url, part)


def test_pauses_double_up_to_the_longest() -> None:
    assert [web.pause_s(failures) for failures in (0, 1, 2, 5, 7, 10**5)] == [1, 1, 2, 16, 60, 60]
