"""Extensions are found by their entry points."""

import pytest

from qat import hooks
from qat.errors import ConfigError


def test_a_missing_extension_is_named_and_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "entry_points", lambda group: ())
    hooks.hooks.cache_clear()
    with pytest.raises(ConfigError, match="'lab' is not installed.*pip install"):
        hooks.extension("qat.verbs", "lab")
    hooks.hooks.cache_clear()
