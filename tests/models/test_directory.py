"""The names that a user may give a model, and the hashes of what they stand for."""

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
from qat.models.directory import CHECKSUMS, check_checksums, is_path, resolve, write_checksums
from qat.models.load import load_model, load_tokenizer


@pytest.fixture
def students(tmp_path: Path) -> Path:
    """A directory as `qat run` leaves it: a conversion, a run, and which of them is the student."""
    run = tmp_path / "trained"
    for model in (tmp_path / "converted", run / "checkpoints" / "step-000002"):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    (run / "best").write_text("checkpoints/step-000002\n")
    (tmp_path / "student").write_text("trained\n")
    return tmp_path


def test_a_directory_of_a_whole_run_is_its_student(students: Path) -> None:
    assert resolve(str(students)) == str(students / "trained/checkpoints/step-000002")
    (students / "student").write_text("converted\n")
    assert resolve(str(students)) == str(students / "converted")


def test_a_directory_of_several_models_names_them(students: Path) -> None:
    (students / "student").unlink()
    with pytest.raises(CheckpointError, match=r"name one that lies in it: \S+/converted, \S+/trai"):
        resolve(str(students))


def test_a_run_without_a_model_yet_goes_on(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(CheckpointError, match="none yet: the command that began it goes on"):
        resolve(str(tmp_path))


def test_an_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve("")


@pytest.mark.parametrize("name", ["", "..", "../x", "/etc", "checkpoints", "link", "x" * 9999])
def test_a_student_that_lies_elsewhere_is_refused(students: Path, name: str) -> None:
    (students / "link").symlink_to(students)
    (students / "student").write_text(name)
    with pytest.raises(CheckpointError, match="which is no directory there"):
        resolve(str(students))


def test_what_is_no_owner_and_name_of_a_hub_is_a_path() -> None:
    for source in ["./x/y", "/x/y", "~/x", "model", "x/y/z", "https://x/y/z", ""]:
        assert is_path(source), source


def test_below_a_directory_that_is_there_all_is_a_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_path("owner/name")
    (tmp_path / "owner").mkdir()
    assert is_path("owner/name")


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
