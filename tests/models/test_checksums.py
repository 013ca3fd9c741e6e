"""A packed checkpoint that was damaged is never taken for sound."""

import json
import shutil
from pathlib import Path

import pytest
from quantized import SPECS, tiny_quantized
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM

from qat.errors import CheckpointError
from qat.files import sha256_file
from qat.models import directory as checksums
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.directory import CHECKSUMS, check_checksums, write_checksums
from qat.models.load import load_model, load_tokenizer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "saved"
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), out)
    return out


@pytest.fixture
def saved(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "saved"))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    at = max(raw.rfind(b"0"), 0) if path.suffix == ".json" else -2
    raw[at] ^= 1  # a 0 becomes a 1
    path.write_bytes(raw)


OPENERS = {
    "the command": lambda path: load_model(str(path), device="cpu"),
    "its tokenizer": lambda path: load_tokenizer(str(path)),
    "transformers": AutoModelForCausalLM.from_pretrained,
}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("opener", OPENERS)
def test_a_bit_of_any_file_is_missed(saved: Path, name: str, opener: str) -> None:
    flip(saved / name)
    if (opener, name) == ("its tokenizer", "model.safetensors"):
        OPENERS[opener](saved)  # which reads no weights
        return
    with pytest.raises(CheckpointError, match=f"{name} differs from its SHA-256"):
        OPENERS[opener](saved)


def test_a_file_is_hashed_once_until_it_changes(saved: Path, monkeypatch) -> None:
    monkeypatch.setattr(checksums, "SETTLED_S", 0.0)
    read = []
    monkeypatch.setattr(
        checksums, "sha256_file", lambda path: (read.append(path.name), sha256_file(path))[1]
    )
    load_checkpoint(saved)
    load_tokenizer(str(saved))
    assert sorted(read) == sorted(set(read)) and "model.safetensors" in read
    flip(saved / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors differs"):
        load_checkpoint(saved)


def test_a_missing_file_is_named(saved: Path) -> None:
    (saved / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json is missing, expected every"):
        check_checksums(saved, weights=True)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "files": {}}', '{"format": 2}'])
def test_a_damaged_list_is_one_line(saved: Path, text: str) -> None:
    (saved / CHECKSUMS).write_text(text)
    with pytest.raises(CheckpointError, match="checksums.json is damaged"):
        check_checksums(saved, weights=True)


def test_names_outside_the_directory_are_refused(saved: Path) -> None:
    values = json.loads((saved / CHECKSUMS).read_text())
    values["files"]["../../etc/passwd"] = "0"
    (saved / CHECKSUMS).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="checksums.json names .*, expected a name inside"):
        check_checksums(saved, weights=True)


def test_files_added_later_and_files_without_a_list_are_taken(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    load_checkpoint(saved)
    flip(saved / "tokenizer.json")
    write_checksums(saved)
    check_checksums(saved, weights=True)
    (saved / CHECKSUMS).unlink()
    load_checkpoint(saved)
