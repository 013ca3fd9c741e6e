"""Repositories of a hub: what is pushed is pulled, and what fails says so and changes nothing."""

from pathlib import Path

import cli_case
import pytest
import torch
from cli_case import said
from hub_api_case import Hub, header
from hub_case import checkpoint, contents, legacy_cache
from quantized import SPECS, tiny_quantized
from safetensors.torch import load_file
from tiny import logits, save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

import qat
from qat.errors import VERSION, HubError
from qat.export.model import CARD
from qat.extensions.publish.push import publish
from qat.hub.pull import pull
from qat.hub.registry import HubEntry
from qat.models.checkpoint import save_checkpoint
from qat.models.load import model_identity
from qat.quant.spec import LutSpec

# huggingface_hub 2.4 streams large files by an argument that its HTTP library renamed
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>'.*:DeprecationWarning")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    save_checkpoint(
        tiny_quantized("qwen3", SPECS["lut2"], num_hidden_layers=1),
        tiny_tokenizer(),
        tmp_path / "packed",
    )
    return tmp_path / "packed"


def test_pushed_is_pulled_and_opened(hub: Hub, packed: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("hub", "push", packed, "hf://me/q2", "--private")
    assert cli_case.call(monkeypatch, *words) == 0
    sent = said(capsys)
    assert hub.private == {"me/q2": True} and hub.messages == [f"Upload q2 with qat {VERSION}"]
    pushed = hub.files("me/q2")
    card = pushed.pop(CARD).decode()
    assert pushed == contents(packed) and sent["url"] == f"{hub.url}/me/q2"
    assert sent["files"] == len(pushed) + 1 and sent["commit"] == hub.commits["me/q2"][-1][0]
    assert sent["bytes"] == sum(map(len, [*pushed.values(), card.encode()]))
    assert header(card) == {
        "library_name": "qat",
        "pipeline_tag": "text-generation",
        "tags": ["qat", "packed", "2-bit"],
    }
    assert 'from_pretrained("me/q2"' in card and str(tmp_path) not in card
    assert cli_case.call(monkeypatch, *sent["pull"].split()[1:]) == 0
    there = tmp_path / said(capsys)["path"]
    assert there == tmp_path / "checkpoints" / "q2"
    assert contents(there) == hub.files("me/q2")
    for name, tensor in load_file(packed / "model.safetensors").items():
        assert torch.equal(load_file(there / "model.safetensors")[name], tensor)
    assert cli_case.call(monkeypatch, "hub", "verify", there) == 0
    assert torch.equal(logits(qat.load("me/q2")), logits(qat.load(packed)))
    assert model_identity("me/q2") == sent["commit"]
    assert cli_case.call(monkeypatch, "export", "me/q2", "--to", "dense", "--out", "new") == 1
    assert "run: qat hub pull hf://me/q2\n" in capsys.readouterr().err


def test_a_repository_is_replaced_as_a_whole_and_only_if_told(hub: Hub, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "q2")
    hub.add("ours/q2", {"model-00001-of-00002.safetensors": b"old", ".gitattributes": b"*"})
    hub.private["ours/q2"] = False
    before = hub.files("ours/q2")
    with pytest.raises(HubError, match="holds 1 files .model-00001.* --force"):
        publish(source, "ours/q2")
    with pytest.raises(HubError, match="is public, expected a private one"):
        publish(source, "ours/q2", private=True, replace=True)
    hub.add("ours/q2", {**before, "more.txt": b"of somebody else"})
    publish(source, "ours/q2", replace=True)
    assert hub.files("ours/q2") == contents(source)
    assert publish(source, "ours/q2", replace=True).commit == hub.commits["ours/q2"][-1][0]
    assert len(hub.commits["ours/q2"]) == 3, "the same again is no commit"


FAILURES = [
    ("GET /api/whoami", 401, "does not accept this login.*hf auth login"),
    ("POST /api/repos", 403, "gives this login no right to write.*hf auth login"),
    ("POST .*/preupload", 500, "failed .as the test wishes.*answer 500.*call again later"),
    ("POST .*/batch", 403, "gives this login no right to write"),
    ("PUT /storage", 500, "failed.*answer 500 Internal Server Error"),
    ("POST /verify", 404, "shows no such repository"),
    ("POST .*/commit", 409, "is in conflict.*call again"),
]
"""The request that fails, the status of its answer, and what the line says."""


def test_a_hub_that_fails_is_one_line_and_holds_what_it_held(
    hub: Hub, tmp_path: Path, capfd, caplog
) -> None:
    source = checkpoint(tmp_path / "q2")
    for asked, status, words in FAILURES:
        hub.statuses = {asked: status}
        with pytest.raises(HubError, match=f"^hf://me/q2: the hub {words}") as found:
            publish(source, "me/q2")
        assert "\n" not in str(found.value) and hub.token not in str(found.value)
        assert not hub.commits or hub.files("me/q2") == {}, asked
    assert capfd.readouterr().err + caplog.text == "", "no address, which may be signed, and no bar"
    hub.statuses.clear()
    hub.loses = "more/notes.txt"
    with pytest.raises(HubError, match="holds None bytes of more/notes.txt .* push again"):
        publish(source, "me/q2")
    hub.loses = None
    publish(source, "me/q2", replace=True)  # as the line says
    assert hub.files("me/q2") == contents(source)


def test_what_cannot_be_pushed_asks_for_no_repository(
    hub: Hub, packed: Path, tmp_path: Path, monkeypatch
) -> None:
    for name in ("q2", "me/q2/more", "me/..", "me/q 2", ""):
        with pytest.raises(HubError, match=r"is no name of a repository .*hf://OWNER/NAME"):
            publish(packed, name)
    with pytest.raises(HubError, match="belongs to google, expected me or ours"):
        publish(packed, "google/q2")
    for source in (tmp_path / "nowhere", legacy_cache(tmp_path / "cache")):
        with pytest.raises(HubError, match="expected a model for hf://me/q2"):
            publish(source, "me/q2")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("no model")
    with pytest.raises(HubError, match="text holds no weights"):
        publish(tmp_path / "text", "me/q2")
    (packed / "key").symlink_to(tmp_path / "text" / "a.txt")
    with pytest.raises(HubError, match="key is a symbolic link"):
        publish(packed, "me/q2")
    (packed / "key").unlink()
    hub.others["me/q2"] = "dataset"
    with pytest.raises(HubError, match="is a dataset, expected a repository of models"):
        publish(packed, "me/q2")
    asked = len(hub.asked)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="needs a login.*hf auth login"):
        publish(packed, "me/q2")
    assert not hub.commits and len(hub.asked) == asked
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="cannot be reached from here.*HF_ENDPOINT"):
        publish(packed, "me/q2")


def test_a_student_in_memory_pushes_itself(hub: Hub, tmp_path: Path) -> None:
    save_tiny(tmp_path / "teacher", num_hidden_layers=1)
    (tmp_path / "teacher" / CARD).write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n# It\n")
    hub.add("ours/teacher", contents(tmp_path / "teacher"))
    hub.private["ours/teacher"] = False
    student = tiny_quantized("qwen3", SPECS["lut2"], num_hidden_layers=1)
    save_checkpoint(student, None, tmp_path / "q2")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "q2")
    student.name_or_path = "ours/teacher"
    assert student.push_to_hub("me/own", private=True, commit_message="mine") == f"{hub.url}/me/own"
    assert hub.messages == ["mine"]
    assert hub.private["me/own"] and "tokenizer.json" in hub.files("me/own")
    told = header(hub.files("me/own")[CARD].decode())
    assert told["license"] == "apache-2.0" and told["base_model"] == "ours/teacher"
    again = qat.load("me/own")
    assert torch.equal(logits(again), logits(student))
    with pytest.raises(HubError, match="holds .* files"):
        student.push_to_hub("me/own")
    before = hub.files("me/own")
    again.push_to_hub("me/own", replace=True)
    prepared = qat.prepare(tiny_model(num_hidden_layers=1), "q2a4", group_size=8)
    finished = qat.finish(prepared)
    finished.push_to_hub("me/finished")
    assert torch.equal(logits(qat.load("me/finished")), logits(finished))
    assert hub.files("me/own").keys() == before.keys()
    assert "base_model" not in header(hub.files("me/own")[CARD].decode()), "not its own base"


def test_an_export_is_pushed_once_the_hub_agreed(hub: Hub, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    spec = LutSpec(bits=4, codebook="int", group_size=32)
    model = tiny_quantized("llama", spec, num_hidden_layers=1)
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "q4")
    words = ("export", "q4", "--to", "gguf", "--out", "files", "--push")
    assert cli_case.call(monkeypatch, *words, "google/q4") == 1
    error = capsys.readouterr().err.strip()
    assert "belongs to google" in error and "\n" not in error
    assert cli_case.call(monkeypatch, *words[:-1], "--private") == 1
    assert "private=True without push" in capsys.readouterr().err
    assert not (tmp_path / "files").exists()
    assert cli_case.call(monkeypatch, *words, "ours/q4", "--private") == 0
    assert said(capsys)["pushed"] == f"{hub.url}/ours/q4" and hub.private["ours/q4"]
    assert hub.files("ours/q4") == contents(tmp_path / "files")
    card = hub.files("ours/q4")[CARD].decode()
    assert "hf download ours/q4 --local-dir q4" in card and "-m q4/model.gguf" in card
    assert cli_case.call(monkeypatch, "hub", "pull", "hf://ours/q4", "--out", "again") == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "files")


def test_a_pull_that_fails_is_one_line(hub: Hub, tmp_path: Path) -> None:
    def refused(mirror: str, said: str) -> None:
        entry = HubEntry(kind="checkpoint", mirrors=(mirror,))
        with pytest.raises(HubError, match=said) as found:
            pull("x", entry, tmp_path / "out")
        assert "\n" not in str(found.value) and not (tmp_path / "out").exists()

    refused("hf:me/nothing", "hf://me/nothing: the hub shows no such repository")
    hub.add("me/q2", contents(checkpoint(tmp_path / "q2")))
    hub.private["me/q2"] = False
    refused("hf:me/q2@v1", "shows no such repository")
    hub.statuses["/resolve/.*safetensors"] = 403
    refused("hf://me/q2", "no right")
    hub.statuses.clear()
    entry = HubEntry(kind="checkpoint", mirrors=(f"hf:me/q2@{hub.commits['me/q2'][0][0]}",))
    assert pull("x", entry, tmp_path / "out").format == "qat"
    assert contents(tmp_path / "out") == contents(tmp_path / "q2")
