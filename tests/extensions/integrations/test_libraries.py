"""A library that is not installed is named, and how to install it."""

import importlib
import importlib.util

import pytest

from qat.errors import ConfigError
from qat.hooks import extension


@pytest.mark.parametrize(("library", "extra"), [("peft", "adapters"), ("trl", "trl")])
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, library: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"library {library} is not .*\[{extra}\]"):
        extension("qat.python", f"load_{library}")()
    module = importlib.import_module(f"qat.integrations.{library}")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing
