"""Directories, archives and a small web server for the tests of the hub."""

import copy
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import http_case
import lz4.frame
from fsspec.implementations.local import LocalFileSystem


def checkpoint(directory: Path, size: int = 3000) -> Path:
    """A directory with the files of a checkpoint and one below it; its weights hardly compress."""
    blocks = (hashlib.sha256(i.to_bytes(4)).digest() for i in range(size // 32 + 1))
    (directory / "more").mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    (directory / "model.safetensors").write_bytes(b"".join(blocks)[:size])
    (directory / "more" / "notes.txt").write_text("words " * 50)
    return directory


def legacy_cache(directory: Path) -> Path:
    """A directory that looks like a cache of the reference system."""
    directory.mkdir(parents=True)
    (directory / "meta.json").write_text(json.dumps({"format": "qwen_kd_topk_cache_v1"}))
    (directory / "shard_00000.pt").write_bytes(b"PK\3\4" + bytes(range(200)))
    return directory


def tar_bytes(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A tar file of these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in members:
            info = copy.copy(info)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def named(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """A header."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def write_archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """A .tar.lz4 of these members."""
    path.write_bytes(lz4.frame.compress(tar_bytes(*members), content_checksum=True))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`, but the receipt of a pull."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    found = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    found.pop(".qat-hub.json", None)
    return found


class Server:
    """Serves one file, well or badly; `asked` lists the Range header of every request."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.version = '"1"'
        self.asked: list[str | None] = []
        self.break_after: list[int] = []
        """Bytes after which the next answers break off."""
        self.statuses: list[int] = []
        """Statuses of the next answers, which do not send the file."""
        self.raw: list[bytes] = []
        """Bytes of the next answers."""
        self.has_ranges = True
        self.heeds_if_range = True
        self.has_length = True
        self.content_type = "application/octet-stream"
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    """Answers GET as its server's settings say."""

    settings: ClassVar[Server]

    def do_GET(self) -> None:  # noqa: N802
        """Send the file or the rest of it."""
        server = self.settings
        asked = self.headers.get("Range")
        server.asked.append(asked)
        if server.raw:
            self.wfile.write(server.raw.pop(0))
            self.close_connection = True
            return
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start = 0
        is_same = self.headers.get("If-Range") == server.version or not server.heeds_if_range
        if asked and server.has_ranges and is_same:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        total = len(server.data)
        if start and start >= total:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{total}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("ETag", server.version)
        self.send_header("Content-Type", server.content_type)
        if server.has_length:
            self.send_header("Content-Length", str(total - start))
        self.end_headers()
        end = start + server.break_after.pop(0) if server.break_after else total
        self.wfile.write(server.data[start:end])

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def serving(data: bytes) -> Iterator[Server]:
    """A server on this machine for the time of the block."""
    server = Server(data)
    with http_case.serving(type("OneFile", (Handler,), {"settings": server})) as address:
        server.url = f"{address}/files/small.tar.lz4"
        yield server


class Bucket(LocalFileSystem):
    """A store whose `gs://bucket` is a directory on this machine."""

    protocol = "gs"
    place: ClassVar[Path]

    def __init__(self, **how: object) -> None:
        super().__init__(auto_mkdir=True, **how)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("gs://bucket", str(cls.place)))
