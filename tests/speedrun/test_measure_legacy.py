"""The script that compares imports with the reference: it passes what is right, and only that."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from legacy_case import (
    legacy_state,
    parts_of,
    save_base,
    save_legacy,
    save_legacy_cache,
    second_parts,
    second_weight,
)
from safetensors.torch import load_file, save_file

IDS = torch.arange(40).view(2, 20) * 7 % 320


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "speedrun"))
    import measure_legacy

    return measure_legacy


@pytest.fixture
def data(tmp_path: Path) -> Path:
    model = save_base(tmp_path / "base")
    state = legacy_state(model, second_parts)
    save_legacy(tmp_path / "v2", state)
    save_legacy_cache(tmp_path / "cache_L9_K4_R3")
    names = [key.removesuffix(".lut") for key in state if key.endswith(".lut")]
    for name in names:
        weight = model.get_submodule(name).weight
        weight.data = second_weight(parts_of(state, name)).float()
    with torch.no_grad():
        logits = model(IDS).logits
    save_file({"input_ids": IDS, "v2": logits}, tmp_path / "expected.safetensors")
    return tmp_path


def test_what_is_right_and_what_is_not(script: ModuleType, data: Path, monkeypatch, capsys) -> None:
    out = data / "figures.jsonl"
    monkeypatch.setattr(sys, "argv", ["measure_legacy.py", str(data), "--figures", str(out)])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code is False
    figure = json.loads(out.read_text())
    assert figure["figure"] == "legacy_max_logit_diff" and figure["value"] <= 1e-5
    assert "cache_L9_K4_R3: log-probs within" in capsys.readouterr().out
    expected = load_file(data / "expected.safetensors")
    save_file({**expected, "v2": expected["v2"] + 1e-4}, data / "expected.safetensors")
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code is True
