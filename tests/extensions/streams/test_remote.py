"""Caches in an object store: read like local ones, fetched once, kept within a budget."""

import errno
import logging
import shutil
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import BinaryIO

import fsspec
import httpx2
import pytest
import torch
from cache_case import build
from fsspec.implementations.memory import MemoryFileSystem
from http_case import serving

from qat.data.cache import MANIFEST, read_manifest
from qat.data.opening import open_cache
from qat.data.reader import TeacherCache
from qat.errors import CacheError, ConfigError
from qat.extensions.streams import remote
from qat.extensions.streams.remote import open_remote
from qat.hub import web

ADDRESS = "memory://bucket/caches/c"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache, which nobody changes."""
    out = tmp_path_factory.mktemp("cache") / "c"
    build(out)
    return out


@pytest.fixture
def store(built: Path) -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    system.put(f"{built}/", "/bucket/caches/c/", recursive=True)
    yield system
    system.rm("/bucket", recursive=True)


@pytest.fixture
def opened(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths in the store that were opened."""
    paths, real = [], MemoryFileSystem._open

    def note(self: MemoryFileSystem, path: str, *arguments: object, **more: object) -> object:
        paths.append(path.rpartition("/")[2])
        return real(self, path, *arguments, **more)

    monkeypatch.setattr(MemoryFileSystem, "_open", note)
    return paths


def test_it_reads_like_a_local_one(built: Path, opened: list[str], tmp_path: Path) -> None:
    local, far = TeacherCache.open(built), open_remote(ADDRESS, local=tmp_path / "kept")
    assert opened == [MANIFEST]
    for indices in ([3, 25, 0], [25, 1]):
        for one, other in zip(local.batch(indices), far.batch(indices), strict=True):
            assert torch.equal(one, other)
    assert opened == [MANIFEST, "train-00000.safetensors", "train-00002.safetensors"]
    assert read_manifest(tmp_path / "kept") == local.manifest
    again = open_remote(ADDRESS, local=tmp_path / "kept")
    again.batch([3, 25])
    assert opened[3:] == [MANIFEST]


def test_shards_are_kept_within_a_budget(built, opened, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(remote, "FRESH", 1)
    size = (built / "train-00000.safetensors").stat().st_size
    with caplog.at_level(logging.WARNING):
        cache = open_remote(ADDRESS, local=tmp_path / "kept", budget=2 * size + 10)
    assert "come more than once" in caplog.text
    for index in (0, 11, 0, 22, 0, 11):  # the one unused for longest makes room
        cache.batch([index])
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) <= 2
    assert [opened.count(f"train-0000{i}.safetensors") for i in range(3)] == [1, 2, 1]
    assert not list((tmp_path / "kept").glob(".*"))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"budget": 1}, [["00"], ["00", "01"], ["01", "02"]]),  # the newest stay whatever it is
        ({}, [["00"], ["00", "01"], ["00", "01", "02"]]),
    ],
)
def test_the_newest_shards_stay_and_all_where_there_is_room(
    store, tmp_path, monkeypatch, budget: dict, expected: list
) -> None:
    monkeypatch.setattr(remote, "FRESH", 1)
    cache, kept = open_remote(ADDRESS, local=tmp_path / "kept", **budget), []
    for index in (0, 11, 22):
        cache.batch([index])
        kept.append(sorted(path.name[9:11] for path in (tmp_path / "kept").glob("*.safetensors")))
    assert kept == expected


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    """Have the store raise; return the paths that it is asked for."""
    asked: list[str] = []

    def fail(self: MemoryFileSystem, path: str, *arguments: object, **more: object) -> object:
        asked.append(path)
        raise error

    monkeypatch.setattr(MemoryFileSystem, "_open", fail)
    return asked


@pytest.mark.parametrize(
    ("error", "kind", "message", "times"),
    [
        (
            OSError("503\nslow down, token=abcdefgh1234"),
            CacheError,
            r"\(503 slow down.*tried 3 times",
            3,
        ),
        (OSError(errno.ENOSPC, "No space left"), OSError, "No space left", 1),
    ],
)
def test_a_server_that_fails_is_asked_three_times_and_a_full_disk_once(
    store, tmp_path, monkeypatch, error: OSError, kind: type, message: str, times: int
) -> None:
    cache = open_remote(ADDRESS, local=tmp_path / "kept")
    asked = failing(monkeypatch, error)
    with pytest.raises(kind, match=message) as caught:
        cache.batch([0])
    assert "\n" not in str(caught.value) and "abcdefgh1234" not in str(caught.value)
    assert len(asked) == times
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [MANIFEST]


def test_an_error_of_a_stores_own_library_is_one_line(store, tmp_path, monkeypatch) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    failing(monkeypatch, aiohttp.ClientPayloadError("400, message:\n  not gzip"))
    with pytest.raises(CacheError, match=r"does not come \(400, message: not gzip\)") as caught:
        open_remote(ADDRESS, local=tmp_path / "kept")
    assert "\n" not in str(caught.value)


def test_what_comes_damaged_is_not_kept(store: MemoryFileSystem, tmp_path: Path) -> None:
    path = "/bucket/caches/c/train-00000.safetensors"
    store.pipe(path, store.cat(path)[:-1] + b"\x7f")
    cache = open_remote(ADDRESS, local=tmp_path / "kept")
    with pytest.raises(
        CacheError, match="train-00000.safetensors: what the server sent is damaged"
    ):
        cache.batch([0])
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [MANIFEST]


@pytest.mark.parametrize("forged", ["../../evil", "/{}/evil", "0123456789a", "0123456789ab\n"])
def test_a_forged_fingerprint_makes_no_directory(
    built: Path,
    store: MemoryFileSystem,
    tmp_path: Path,
    forged: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "STREAMS", tmp_path / "deep" / "streams")
    evil = read_manifest(built).model_copy(update={"fingerprint": forged.format(tmp_path)})
    store.pipe("/bucket/caches/c/manifest.json", evil.to_bytes())
    with pytest.raises(CacheError, match="fingerprint=.*should match pattern") as caught:
        open_cache(ADDRESS)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_bad_addresses_are_one_line(built: Path, store: MemoryFileSystem, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="manifest.json is not there"):
        open_remote("memory://bucket/none", local=tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_remote("nosuch://bucket/none", local=tmp_path)
    with pytest.raises(ConfigError, match=r"\[hidden\]@host.* has a secret"):
        open_remote("ftp://me:pass@host/c", local=tmp_path)
    store.pipe("/bucket/caches/c/manifest.json", b"{}")
    with pytest.raises(CacheError, match="not the manifest of a teacher cache"):
        open_remote(ADDRESS, local=tmp_path)
    store.pipe("/bucket/caches/c/manifest.json", b"[" * 10**5)
    with pytest.raises(CacheError, match="it is not JSON"):
        open_remote(ADDRESS, local=tmp_path)
    (tmp_path / "file").touch()
    shutil.copy(built / MANIFEST, tmp_path / MANIFEST)
    store.pipe("/bucket/caches/c/manifest.json", (built / MANIFEST).read_bytes())
    with pytest.raises(CacheError, match="expected a directory to keep shards in"):
        open_remote(ADDRESS, local=tmp_path / "file" / "kept")


def test_a_shard_is_on_the_disk_before_it_has_its_name(store, tmp_path, monkeypatch) -> None:
    cache, synced = open_remote(ADDRESS, local=tmp_path / "kept"), []
    monkeypatch.setattr("os.fsync", lambda _: synced.extend((tmp_path / "kept").iterdir()))
    cache.batch([0])
    assert [path.name.startswith(".train-00000") for path in sorted(synced)] == [True, False]


@pytest.fixture
def web_address(built: Path) -> Iterator[str]:
    """A plain server of the directory that the cache is in."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with serving(partial(Quiet, directory=built.parent)) as address:
        yield f"{address}/c"


def test_a_cache_of_the_web_reads_like_a_local_one(built: Path, web_address: str, tmp_path) -> None:
    far, local = open_remote(web_address, local=tmp_path / "kept"), TeacherCache.open(built)
    for one, other in zip(local.batch([3, 25]), far.batch([3, 25]), strict=True):
        assert torch.equal(one, other)
    assert not list((tmp_path / "kept").glob(".*"))
    with pytest.raises(CacheError, match=r"404 Not Found; expected manifest.json of a teacher"):
        open_remote(f"{web_address}/none", local=tmp_path / "kept")


def test_an_encrypted_cache_is_led_to_nothing_that_is_not(tmp_path: Path, monkeypatch) -> None:
    def lead(request: httpx2.Request) -> httpx2.Response:
        assert request.url.scheme == "https"
        return httpx2.Response(302, headers={"Location": "http://host/c/manifest.json"})

    client, transport = httpx2.Client, httpx2.MockTransport(lead)
    monkeypatch.setattr(httpx2, "Client", lambda **given: client(transport=transport, **given))
    with pytest.raises(CacheError, match="which is not encrypted, expected https") as caught:
        open_remote("https://host/c", local=tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="leads to the web through another address"):
        open_remote("zip://c::https://host/c.zip", local=tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, "train-00000.safetensors"])
def test_a_cache_that_drips_is_left(built, web_address, tmp_path, monkeypatch, name) -> None:
    def drip(handler: SimpleHTTPRequestHandler, source: BinaryIO, to: BinaryIO) -> None:
        if source.name.endswith(name):
            while True:
                to.write(source.read(1))
                time.sleep(0.05)
        shutil.copyfileobj(source, to)

    monkeypatch.setattr(web, "PATIENCE_S", 0.3)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "copyfile", drip)
    with pytest.raises(CacheError, match="less than 1,048,576 bytes came in 0 s") as caught:
        open_remote(web_address, local=tmp_path / "kept").batch([0])
    assert "\n" not in str(caught.value) and not list((tmp_path / "kept").glob(".*"))


def test_a_manifest_has_an_end(web_address: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "MANIFEST_LIMIT", 100)
    with pytest.raises(CacheError, match="bytes, expected 100"):
        open_remote(web_address, local=tmp_path)
