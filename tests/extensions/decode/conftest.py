"""The teacher of most corpora."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model that ends its rows, now and then; nobody changes it."""
    from tiny import save_tiny  # not where tests are only handed out to workers

    folder = tmp_path_factory.mktemp("teacher")
    save_tiny(folder, initializer_range=0.1)
    return folder
