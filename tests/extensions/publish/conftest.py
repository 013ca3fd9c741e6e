"""The hub that several tests push to."""

from collections.abc import Iterator
from pathlib import Path

import hub_api_case
import pytest


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_api_case.Hub]:
    """A hub on this machine, to which `huggingface_hub` is logged in; its cache is the test's."""
    with hub_api_case.logged_in(tmp_path, monkeypatch) as hub:
        yield hub
