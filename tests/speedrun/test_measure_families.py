"""The script behind the page of models: a refusal is told in words that fit any user."""

from collections.abc import Callable
from pathlib import Path

import pytest

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


def test_a_refusal_names_no_directory_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import measure_families

    def walk(family: str, folder: Path, call: Callable[..., int], device: str, dtype: str) -> str:
        how = ("--device", device, "--dtype", dtype)
        assert call("generate", folder / "float", "--prompt", family, *how) == 1
        return "generate"

    monkeypatch.setattr(measure_families, "walk", walk)
    assert measure_families.tried("Any").startswith("`qat generate`: MODEL does not exist; expec")
    monkeypatch.setattr(measure_families, "walk", lambda *_: "")
    assert measure_families.tried("Any") == ""
