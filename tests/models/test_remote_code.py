"""Code that comes with a model does not run unless somebody says so, and then that is noted."""

import json
import sys
from pathlib import Path

import pytest
from cache_case import info, settings

from qat.data.cache import new_manifest
from qat.errors import CheckpointError
from qat.models.load import load_config, load_model, load_teacher, load_tokenizer, model_identity

CODE = """
from pathlib import Path
from transformers import PreTrainedConfig

(Path(__file__).parent / "ran").touch()

class OwnConfig(PreTrainedConfig):
    model_type = "own"
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory that brings code, and a place of its own for what runs of it."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = tmp_path / "model"
    source.mkdir()
    (source / "own.py").write_text(CODE)
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    names["AutoTokenizer"] = ["own.OwnTokenizer", None]
    (source / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    tokenizer = {"auto_map": names, "tokenizer_class": "OwnTokenizer"}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return source


def ran(place: Path) -> bool:
    return any(place.rglob("ran"))


@pytest.mark.parametrize("load", [load_config, load_model, load_teacher, load_tokenizer])
def test_code_does_not_run_unasked(model: Path, load: object, capsys: object) -> None:
    with pytest.raises(CheckpointError, match="brings code .* --trust-remote-code") as caught:
        load(str(model))
    assert "\n" not in str(caught.value)
    assert not ran(model.parent)
    assert not capsys.readouterr().out  # transformers asks nothing


def test_code_runs_when_asked(model: Path) -> None:
    assert load_config(str(model), trust_remote_code=True).model_type == "own"
    assert ran(model.parent)
    assert len(model_identity(str(model), trust_remote_code=True)) == 32


@pytest.mark.parametrize("has_run", [False, True])
def test_a_cache_remembers_it(has_run: bool) -> None:
    manifest = new_manifest(settings(), info(remote_code=has_run), "0" * 16)
    assert json.loads(manifest.to_bytes())["teacher"]["remote_code"] is has_run
