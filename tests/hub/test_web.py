"""Downloads go on where they broke off, and nothing but the wished file comes of them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_case import Server, serving

from qat.errors import HubError
from qat.hub import web
from qat.hub.limits import MIB
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


def test_a_file_comes_whole(server: Server, part: Path) -> None:
    download(server.url, part, len(DATA))
    assert part.read_bytes() == DATA
    assert server.asked == [None]


def test_a_broken_download_goes_on(server: Server, part: Path) -> None:
    server.break_after = [MIB, 2 * MIB]
    download(server.url, part)
    assert part.read_bytes() == DATA
    assert server.asked == [None, f"bytes={MIB}-", f"bytes={3 * MIB}-"]


def test_the_next_call_goes_on(server: Server, part: Path) -> None:
    server.break_after = [MIB, 0, 0, 0]
    with pytest.raises(HubError, match=r"broke off after 1,048,576 of .* \(1,048,576 bytes kept\)"):
        download(server.url, part)
    server.asked.clear()
    download(server.url, part)
    assert part.read_bytes() == DATA
    assert server.asked == [f"bytes={MIB}-"]


def test_a_whole_file_is_not_sent_again(server: Server, part: Path) -> None:
    download(server.url, part)
    download(server.url, part)
    assert part.read_bytes() == DATA
    assert server.asked == [None, f"bytes={len(DATA)}-"]


def test_another_version_is_fetched_from_its_beginning(server: Server, part: Path) -> None:
    server.break_after = [2 * MIB, 0, 0, 0]
    with pytest.raises(HubError):
        download(server.url, part)
    server.data, server.version = os.urandom(MIB + 5), '"2"'
    download(server.url, part)
    assert part.read_bytes() == server.data


def test_a_shorter_version_replaces_a_longer_one(server: Server, part: Path) -> None:
    download(server.url, part)
    server.data = DATA[: MIB + 3]  # the version says nothing of it
    download(server.url, part)
    assert part.read_bytes() == server.data


def test_a_server_without_ranges_sends_all_again(server: Server, part: Path) -> None:
    server.has_ranges = False
    server.break_after = [2 * MIB]
    download(server.url, part)
    assert part.read_bytes() == DATA


def test_a_server_that_never_gets_further_is_left(server: Server, part: Path) -> None:
    server.has_ranges = False
    server.break_after = [2 * MIB, *[MIB // 2, MIB] * 20]
    with pytest.raises(HubError, match="broke off after"):
        download(server.url, part)
    assert len(server.asked) == 4


def test_without_a_version_nothing_is_continued(server: Server, part: Path) -> None:
    server.version = 'W/"weak"'
    server.break_after = [2 * MIB]
    download(server.url, part)
    assert part.read_bytes() == DATA
    assert server.asked == [None, None]


def test_a_busy_server_is_asked_again(server: Server, part: Path) -> None:
    server.statuses = [503, 429]
    download(server.url, part)
    assert part.read_bytes() == DATA


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
