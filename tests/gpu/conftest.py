"""Every test here runs compilers, which warn of much that is not about us."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture
def nothing_compiled_yet() -> None:
    torch.compiler.reset()
