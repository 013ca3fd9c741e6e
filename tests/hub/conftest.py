"""The fixtures that several tests of the hub share."""

from pathlib import Path

import pytest
from fsspec.registry import _registry as stores
from hub_case import Bucket


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that gs://bucket is, as gcsfs would read it."""
    (tmp_path / "bucket").mkdir()
    monkeypatch.setattr(Bucket, "place", tmp_path / "bucket", raising=False)
    monkeypatch.setitem(stores, "gs", Bucket)
    Bucket.clear_instance_cache()
    return tmp_path / "bucket"
