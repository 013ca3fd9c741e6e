"""A run that has begun, and a folder that it is sent to."""

from pathlib import Path

import pytest
from run_case import begin


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run without a step yet."""
    begin(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, as of a mounted Drive."""
    (tmp_path / "Drive").mkdir()
    return tmp_path / "Drive"
