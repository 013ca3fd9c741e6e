"""`qat hub` as a user meets it."""

from pathlib import Path

import cli_case
import pytest
from cli_case import said
from hub_case import checkpoint, contents

from qat.errors import HubError
from qat.files import sha256_file
from qat.hub.files import RECEIPT, regular_files, sha256_tree


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def call(monkeypatch: pytest.MonkeyPatch, *tokens: object) -> int:
    """The exit code of `qat hub TOKENS`."""
    return cli_case.call(monkeypatch, "hub", *tokens)


def test_pull_the_embedded_checkpoint(tmp_path: Path, monkeypatch, capsys) -> None:
    assert call(monkeypatch, "pull", "tiny") == 0
    found = said(capsys)
    expected = {"path": "checkpoints/tiny", "name": "tiny", "kind": "checkpoint", "format": "qat"}
    assert expected.items() <= found.items() and found["is_verified"] and found["is_new"]
    assert (tmp_path / "checkpoints" / "tiny" / "model.safetensors").is_file()
    assert call(monkeypatch, "pull", "tiny", "--out", "elsewhere") == 0
    assert said(capsys)["path"] == "elsewhere"
    assert call(monkeypatch, "pull", "tiny") == 0
    assert not said(capsys)["is_new"]


def test_from_pack_to_pull(tmp_path: Path, monkeypatch, capsys) -> None:
    source = checkpoint(tmp_path / "q2")
    (tmp_path / "drive" / "runs").mkdir(parents=True)
    assert call(monkeypatch, "pack", "q2") == 0
    packed = said(capsys)
    assert packed["out"] == str(tmp_path / "q2.tar.lz4") and packed["files"] == 3
    assert call(monkeypatch, "unpack", "q2.tar.lz4", "--out", "copy") == 0
    assert contents(tmp_path / "copy") == contents(source)
    assert said(capsys)["files"] == 3
    assert call(monkeypatch, "push", "q2", "drive/runs", "--drive", "drive") == 0
    line = said(capsys)["add"]
    assert "--mirror drive:runs/q2.tar.lz4" in line
    assert call(monkeypatch, *line.split()[2:]) == 0
    assert said(capsys) == {
        "name": "q2",
        "registry": str(tmp_path / "home" / ".config" / "qat" / "hub.toml"),
    }
    assert call(monkeypatch, "list") == 0
    assert said(capsys)["names"][-1] == "q2"
    assert call(monkeypatch, "pull", "q2", "--drive", "drive") == 0
    assert said(capsys)["is_verified"]
    assert contents(tmp_path / "checkpoints" / "q2") == contents(source)
    assert call(monkeypatch, "verify", "checkpoints/q2") == 0
    assert said(capsys)["is_verified"]
    (tmp_path / "checkpoints" / "q2" / "config.json").write_text("[]")
    assert call(monkeypatch, "verify", "checkpoints/q2") == 1


def test_the_registry_learns_the_hash_of_the_files(tmp_path: Path, monkeypatch, capsys) -> None:
    checkpoint(tmp_path / "q2")
    assert call(monkeypatch, "pack", "q2") == 0
    packed = said(capsys)
    words = ("add", "mine", "--kind", "checkpoint", "--mirror", "q2.tar.lz4", "--sha256")
    assert call(monkeypatch, *words, packed["sha256"]) == 0
    own = tmp_path / "home" / ".config" / "qat" / "hub.toml"
    assert packed["tree_sha256"] not in own.read_text()
    assert call(monkeypatch, "pull", "mine") == 0
    assert packed["tree_sha256"] in own.read_text() and said(capsys)["is_verified"]
    noted = own.read_bytes()
    for verb in (("pull", "mine"), ("verify", "checkpoints/mine")):
        assert call(monkeypatch, *verb) == 0
        assert said(capsys)["is_verified"] and own.read_bytes() == noted
    weights = tmp_path / "checkpoints" / "mine" / "model.safetensors"
    weights.write_bytes(b"evil")
    receipt = weights.with_name(RECEIPT)
    receipt.write_text(receipt.read_text().replace(packed_hash(tmp_path), sha256_file(weights)))
    assert call(monkeypatch, "verify", "checkpoints/mine") == 1
    assert "SHA-256 of the files is" in capsys.readouterr().err
    assert call(monkeypatch, "pull", "mine") == 1


def test_a_registry_that_cannot_be_written_learns_nothing(
    tmp_path: Path, monkeypatch, capsys, caplog
) -> None:
    checkpoint(tmp_path / "q2")
    assert call(monkeypatch, "pack", "q2") == 0
    sha256 = said(capsys)["sha256"]
    own = tmp_path / "hub.toml"
    words = ("add", "mine", "--kind", "checkpoint", "--mirror", "q2.tar.lz4", "--registry", own)
    assert call(monkeypatch, *words, "--sha256", sha256) == 0

    def refused(_: Path) -> None:
        raise HubError("hub.toml: writing stopped")

    monkeypatch.setattr("qat.hub.registry.atomic_file", refused)
    assert call(monkeypatch, "pull", "mine", "--registry", own) == 0
    assert "the hash of the files of mine is not noted: hub.toml" in caplog.text
    assert call(monkeypatch, "verify", "checkpoints/mine", "--registry", own) == 0
    assert not said(capsys)["is_verified"]


def packed_hash(place: Path) -> str:
    return sha256_file(place / "q2" / "model.safetensors")


def test_the_list_shows_no_secret(tmp_path: Path, monkeypatch, capsys) -> None:
    own = tmp_path / "hub.toml"
    own.write_text('[mine]\nkind = "cache"\nmirrors = ["https://me:p@ssword@host/a.tgz"]\n')
    assert call(monkeypatch, "list", "--registry", own) == 0
    printed = capsys.readouterr().out
    assert "[hidden]@host" in printed and "ssword" not in printed


def test_mistakes_are_one_line(monkeypatch, capsys) -> None:
    for tokens, message in (
        (("pull", "q2-best"), "qat: no entry is called 'q2-best'; did you mean 'q2_best'"),
        (("pull", "L64"), "GDRIVE_PATH=DIR); or get the archive by other means"),
        (("pull", "L64", "--drive", "nowhere"), "Drive is not mounted at nowhere"),
        (("add", "tiny", "--kind", "cache", "--mirror", "x"), "in the registry already"),
        (("add", "x", "--kind", "cache", "--mirror", "ftp://x"), "starts with none of"),
        (("push", ".", "nowhere"), "expected a folder"),
    ):
        assert call(monkeypatch, *tokens) == 1
        printed = capsys.readouterr()
        assert message in printed.err.splitlines()[-1] and printed.out == ""


def test_of_a_run_the_student_is_pushed_and_the_rest_on_request(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    run = tmp_path / "runs" / "q2"
    best = checkpoint(run / "checkpoints" / "step-000010")
    (best / "trainer").mkdir()
    (best / "trainer" / "state.safetensors").write_bytes(bytes(10000))
    (run / "best").write_text("checkpoints/step-000010")
    (run / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "folder").mkdir()

    def pushed(*words: str) -> tuple[str, set[str]]:
        assert call(monkeypatch, "push", "runs/q2", "folder", "--force", *words) == 0
        found = said(capsys)
        assert found["add"].startswith("qat hub add q2 --kind checkpoint")
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        assert call(monkeypatch, "unpack", "folder/q2.tar.lz4", "--out", str(out), "--force") == 0
        assert sha256_tree(out) == found["tree_sha256"]
        capsys.readouterr()
        return found["packed"], {file.name for file in regular_files(out)}

    student = {"config.json", "model.safetensors", "notes.txt"}
    assert pushed() == ("runs/q2/checkpoints/step-000010", student)
    checkpoint(run / "q2a4_mlp_0.06_bf16")
    (run / "metrics.json").write_text('{\n "final": "q2a4_mlp_0.06_bf16"\n}\n')
    assert pushed() == ("runs/q2/q2a4_mlp_0.06_bf16", student)
    rest = {"best", "metrics.json", "metrics.jsonl", "state.safetensors"}
    assert pushed("--with-trainer") == ("runs/q2", student | rest)
