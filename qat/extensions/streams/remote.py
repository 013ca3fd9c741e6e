"""Read caches from an object store: fetch the manifest now, and shards when they are first needed.

A shard is downloaded whole to a local directory and checked against its SHA-256; the least recently
used shards are evicted when the directory exceeds its budget. Batches are computed ahead, so the
shards of the next steps are downloaded while those of the current step are read.

Addresses with https:// or http:// are downloaded like files of the hub (`qat.hub.web`): redirects
to unencrypted addresses are refused, and stalled downloads are aborted. Other addresses are read
by fsspec.
"""

import errno
import logging
import re
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from qat.config import fingerprint
from qat.data.cache import MANIFEST, SHARD, Shard, parse_manifest, shard_problem, write_atomic
from qat.data.reader import TeacherCache
from qat.errors import CacheError, ConfigError, HubError
from qat.files import inside, partial_file, sync
from qat.hub.mirrors import open_store, store_errors
from qat.hub.web import ATTEMPTS, download, version_file
from qat.secrets import scrubbed

logger = logging.getLogger(__name__)

T = TypeVar("T")
WEB = re.compile(r"https?://")
STREAMS = Path("~/.cache/qat/streams")
BUDGET_BYTES = 64 * 2**30
FRESH = 16
"""Number of most recently fetched shards that are never evicted: a reader may be about to open
them."""
MANIFEST_LIMIT = 2**30  # bytes; a manifest has a few hundred per shard


def open_remote(address: str, *, local: Path | None = None, budget: int = 0) -> TeacherCache:
    """Open the cache below an address such as `s3://bucket/caches/name`.

    Args:
        local: directory for its shards; by default one of its own below ~/.cache/qat/streams.
        budget: maximum bytes of the shards there; 0 is 64 GiB or half of the free disk space,
            whichever is less.

    Raises:
        CacheError: the cache is missing, foreign, unfinished or damaged, or its server fails.
        ConfigError: the address has an unsupported scheme or holds a password.
    """
    if scrubbed(address) != address:
        raise ConfigError(
            f"cache {scrubbed(address)} has a secret in its address, expected none; log in with "
            "the tool of that place, or with its environment variables"
        )
    remote = _Web(address) if WEB.match(address) else _Remote(address)
    raw = remote.read(MANIFEST, MANIFEST_LIMIT)
    manifest = parse_manifest(raw, f"{address}/{MANIFEST}")
    if manifest.state != "complete":
        raise CacheError(
            f"{address} is an unfinished cache of {manifest.total('sequences')} sequences; finish "
            "it where it is built, and copy it anew"
        )
    content = fingerprint([shard.sha256 for shard in manifest.shards])
    name, found_in = f"{manifest.fingerprint}-{content}", f"{address}/{MANIFEST}"
    directory = local or inside(STREAMS.expanduser(), name, found_in=found_in, error=CacheError)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"{directory}: {error.strerror}, expected a directory to keep shards in; make room, or "
            "set HOME to a place that you may write to"
        ) from None
    write_atomic(directory / MANIFEST, raw)
    kept, size = LocalShards(directory, remote.fetch, budget), manifest.total("bytes")
    if size > kept.budget:
        logger.warning(
            "%s has %.1f GiB, of which %.1f are kept in %s: shards will come more than once; make "
            "room there",
            *(address, size / 2**30, kept.budget / 2**30, directory),
        )
    return TeacherCache(directory, manifest, fetch=kept.ensure_local, open_shards=FRESH)


class _Web:
    """Files below an http(s) address."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of a small file."""
        with tempfile.TemporaryDirectory() as directory:
            part = Path(directory, name)
            self._download(name, part, most=limit)
            return part.read_bytes()

    def fetch(self, shard: Shard, to: Path) -> None:
        """Download a shard to `to`."""
        try:
            self._download(shard.file, to, size=shard.bytes)
        finally:
            version_file(to).unlink(missing_ok=True)
        sync(to)

    def _download(self, name: str, to: Path, **sizes: int) -> None:
        try:
            download(f"{self._address}/{name}", to, **sizes)
        except HubError as error:
            raise CacheError(
                f"{scrubbed(str(error))}; expected {name} of a teacher cache that 'qat cache' "
                "built; check the address, or go on with the same command later"
            ) from None


class LocalShards:
    """An LRU cache of shards in a local directory."""

    def __init__(self, directory: Path, fetch: Callable[[Shard, Path], None], budget: int) -> None:
        self._directory = directory
        self._fetch = fetch
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        shards = (path for path in directory.iterdir() if SHARD.fullmatch(path.name))
        for path in sorted(shards, key=lambda each: each.stat().st_mtime):
            self._sizes[path.name] = path.stat().st_size
        room = shutil.disk_usage(directory).free + sum(self._sizes.values())
        self.budget = budget or min(BUDGET_BYTES, room // 2)
        """Maximum size of all shards in bytes."""

    def ensure_local(self, shard: Shard) -> None:
        """Download a shard unless the directory holds a file of its size; evict others if needed.

        Raises:
            CacheError: the download fails, or its bytes are not those of the manifest.
        """
        path = shard.path(self._directory)
        if shard_problem(self._directory, shard, deep=False) is not None:
            with self._lock:
                while (
                    len(self._sizes) > FRESH
                    and sum(self._sizes.values()) + shard.bytes > self.budget
                ):
                    name, _ = self._sizes.popitem(last=False)
                    (self._directory / name).unlink(missing_ok=True)
                    logger.debug("%s made room for another shard", name)
            partial = partial_file(path)
            try:
                self._fetch(shard, partial)
                renamed = shard.model_copy(update={"file": partial.name})
                if problem := shard_problem(self._directory, renamed, deep=True):
                    raise CacheError(
                        f"{shard.file}: what the server sent is damaged ({problem}), expected what "
                        "the manifest names; copy the cache there anew"
                    )
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        with self._lock:
            self._sizes[shard.file] = shard.bytes
            self._sizes.move_to_end(shard.file)


class _Remote:
    """Files below an address that fsspec reads."""

    def __init__(self, address: str) -> None:
        if "::http" in address:
            raise ConfigError(
                f"cache {address} leads to the web through another address, expected that of the "
                "directory that 'qat cache' built; copy it there as it is"
            )
        self._address = address.rstrip("/")
        self._system, self._root = open_store(self._address, ConfigError)

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of a small file."""

        def read() -> bytes:  # not read_block: a file of sftp has no size
            with self._system.open(f"{self._root}/{name}", "rb") as file:
                return file.read(limit)

        return self._tried(name, read)

    def fetch(self, shard: Shard, to: Path) -> None:
        """Download a shard to `to`."""
        path = f"{self._root}/{shard.file}"
        self._tried(shard.file, lambda: self._system.get_file(path, str(to)))
        sync(to)

    def _tried(self, name: str, act: Callable[[], T]) -> T:
        for number in range(1, ATTEMPTS + 1):
            try:
                return act()
            except FileNotFoundError:
                raise CacheError(
                    f"{self._address}/{name} is not there, expected a teacher cache that 'qat "
                    "cache' built; check the address"
                ) from None
            except store_errors() as error:
                if getattr(error, "errno", None) == errno.ENOSPC:
                    raise
                why = scrubbed(" ".join(str(error).split()) or type(error).__name__)
                if number == ATTEMPTS:
                    raise CacheError(
                        f"{self._address}/{name} does not come ({why}), tried {ATTEMPTS} times, "
                        "expected a server that answers; go on with the same command later"
                    ) from None
                logger.warning("%s/%s: %s; trying again", self._address, name, why)
        raise AssertionError("unreachable")
