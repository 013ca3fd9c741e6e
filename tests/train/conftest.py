"""The place of most runs."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache and a student of one layer, which no test changes."""
    from train_case import make_place  # not where tests are only handed out to workers

    return make_place(tmp_path_factory.mktemp("place"), layers=1)
