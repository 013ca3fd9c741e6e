"""Model cards: what they tell of a run, its suite, the licence and the base model."""

import json
from pathlib import Path

import pytest
from hub_api_case import header
from quantized import SPECS, tiny_quantized

from qat.convert.config import REPORT_NAME
from qat.errors import CheckpointError
from qat.export.config import ExportConfig
from qat.export.model import CARD, IMPORT, export_model, float_base
from qat.extensions.publish.card import metadata_of
from qat.hub.files import RECEIPT
from qat.models.checkpoint import save_checkpoint


def test_the_card_tells_the_runs_own_measures(tmp_path: Path) -> None:
    run, source = tmp_path / "run", tmp_path / "converted"
    source.mkdir()
    (source / REPORT_NAME).write_text(json.dumps({"source": "owner/base", "plan": "q2a4"}))
    checkpoint = run / "checkpoints/step-000020"
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"], num_hidden_layers=1), None, checkpoint)
    (run / "best").write_text("checkpoints/step-000020")
    facts = {"commit": "abc", "cache_settings": {"data": "/home/me/chats.jsonl"}}
    (run / "run.json").write_text(json.dumps({**facts, "device": "a GPU", "world_size": 2}))
    (run / "recipe.toml").write_text(f'[train]\nstudent = "{source}"\n')
    rows = [{"kind": "eval", "step": s, "kl_tail_nats": s / 100, "ppl": None} for s in (10, 20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"code": {"questions": 4, "student": {"value": 0.5, "stderr": 0.25}}}
    suite = {"suite": "s", "student": "runs/run", "seconds": {}, "tasks": tasks, "retention": None}
    for place, student in (("tasks", "runs/run"), ("others", "runs/other")):
        (run / place).mkdir()
        (run / place / "suite.json").write_text(json.dumps({**suite, "student": student}))
    export_model(str(run), ExportConfig(to="packed"), tmp_path / "out")
    shown = (tmp_path / "out" / CARD).read_text()
    assert "\n# base, q2a4, packed\n" in shown and "DIR" not in shown
    assert header(shown) == {
        "base_model": "owner/base",
        "base_model_relation": "quantized",
        "library_name": "qat",
        "pipeline_tag": "text-generation",
        "tags": ["qat", "packed", "2-bit"],
    }
    assert "| code | 4 |  | 50.0 +- 25.0 |" in shown and shown.count("## Tasks: ") == 1
    for line in ("| base model | owner/base |", "| trained | 20 steps on chats.jsonl |"):
        assert line in shown
    assert "| 0.2000 |" in shown and "abc" in shown and "/home/me" not in shown
    assert "perplexity" not in shown and "cost of training" not in shown
    done = {"best_step": 20, "train_s": 1234.5, "tokens": 56789}  # the run has ended
    (run / "metrics.json").write_text(json.dumps(done))
    checkpoint.rename(run / "final")
    export_model(str(run / "final"), ExportConfig(to="dense"), tmp_path / "done")
    shown = (tmp_path / "done" / CARD).read_text()
    assert "| 1,234 s of steps, 56,789 tokens, on 2 x a GPU |" in shown
    assert header(shown)["library_name"] == "transformers" and "| 0.2000 |" in shown
    (run / "metrics.jsonl").write_text("{\n")
    with pytest.raises(Exception, match="is damaged"):
        export_model(str(run / "final"), ExportConfig(to="packed"), tmp_path / "again")


def test_the_float_model_is_found_through_runs_conversions_and_imports(tmp_path: Path) -> None:
    imported, run = tmp_path / "imported", tmp_path / "run"
    student = run / "checkpoints" / "step-000020"
    imported.mkdir()
    student.mkdir(parents=True)
    (imported / IMPORT).write_text(json.dumps({"base": "owner/base"}))
    (run / "run.json").write_text("{}")
    (run / "recipe.toml").write_text(f'[train]\nstudent = "{imported}"\n')
    assert float_base(student) == float_base(run) == float_base(imported) == "owner/base"
    assert float_base(tmp_path) == str(tmp_path) and float_base("owner/base") == "owner/base"
    (imported / IMPORT).write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        float_base(student)


def test_licence_and_base_are_what_the_teacher_says(tmp_path: Path, monkeypatch) -> None:
    def told(base: Path | str) -> tuple[object, object]:
        found = metadata_of(str(base), "gguf", data=None, bits=[4, 2])
        assert found["library_name"] == "gguf" and found["tags"] == [
            "qat",
            "gguf",
            "2-bit",
            "4-bit",
        ]
        return found.get("license"), found.get("base_model")

    place = tmp_path / "base"
    place.mkdir()
    (place / "config.json").write_text('{"license": "mit"}')
    assert told(place) == ("mit", None)
    (place / CARD).write_text("---\nlicense: 'apache-2.0' \ntags:\n- license\n---\nlicense: no\n")
    assert told(place) == ("apache-2.0", None)
    receipt = {"name": "x", "mirror": "hf://owner/base@v1", "sha256": None, "files": {}}
    (place / RECEIPT).write_text(json.dumps(receipt))  # of `qat hub pull`
    assert told(place) == ("apache-2.0", "owner/base")
    (place / RECEIPT).unlink()
    (place / CARD).write_text("# license: mit\n")
    (place / "config.json").write_text("{")
    assert told(place) == told(tmp_path / "nowhere" / "to" / "be") == (None, None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert told("owner/base") == (None, "owner/base")
    cached = tmp_path / "cache" / "models--owner--base"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc" / CARD).write_text("---\nlicense: llama3\n---\n")
    assert told("owner/base") == ("llama3", "owner/base")
    data = metadata_of("owner/base", "packed", data="owner/chats:sub@train", bits=[])
    assert data["datasets"] == ["owner/chats"]


def test_licence_and_base_of_a_gguf_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "base.gguf", "llama")
    writer.add_license("apache-2.0")
    writer.add_license_name("Apache")
    writer.add_base_model_count(1)
    writer.add_base_model_repo_url(0, "https://huggingface.co/owner/base")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = metadata_of(str(tmp_path / "base.gguf"), "packed", data="texts/a.jsonl", bits=[])
    wished = {"license": "apache-2.0", "license_name": "Apache", "base_model": "owner/base"}
    assert wished.items() <= found.items() and "datasets" not in found
