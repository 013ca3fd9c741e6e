"""A teacher cache that many tests of this folder read."""

import shutil
from pathlib import Path

import pytest
from cache_case import build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache, which nobody changes."""
    out = tmp_path_factory.mktemp("cache") / "c"
    build(out)
    return out


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(built, tmp_path / "copy"))
