"""Opening of a teacher cache, in a directory or at an address."""

import os
import re
from pathlib import Path

from qat.data.reader import TeacherCache
from qat.hooks import extension

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://")


def open_cache(location: str | Path) -> TeacherCache:
    """Open the cache in a directory, or below an address such as `s3://bucket/caches/name`.

    Raises:
        CacheError: the cache is missing, foreign, unfinished or damaged, or its server fails.
        ConfigError: the address has an unsupported scheme or holds a password, or the extension
            that reads addresses is not installed.
    """
    if ADDRESS.match(os.fspath(location)):
        return extension("qat.caches", "streams")(os.fspath(location))
    return TeacherCache.open(location)
