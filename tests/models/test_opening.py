"""Damaged or untrusted files of a model are refused in one line, or open as sound ones do."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from covering import covering
from gguf import GGUFWriter
from quantized import SPECS, tiny_quantized
from tiny import save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qat.errors import CheckpointError, how_to_install
from qat.models import load
from qat.models.checkpoint import load_checkpoint, load_skeleton, save_checkpoint
from qat.models.directory import CHECKSUMS
from qat.models.load import load_model, load_tokenizer
from qat.models.opening import Opening, auto_class


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float teacher, and a student whose hashes nobody kept."""
    place = tmp_path_factory.mktemp("models")
    save_tiny(place / "teacher")
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), place / "student")
    (place / "student" / CHECKSUMS).unlink()
    return place


@pytest.fixture
def teacher(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / "teacher", tmp_path / "teacher"))


@pytest.fixture
def student(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / "student", tmp_path / "student"))


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(opener: object, source: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opener(str(source))
    assert "\n" not in str(caught.value) and "expected" in str(caught.value)
    return str(caught.value)


CONFIGURATIONS = {
    "of another type": {"hidden_size": "wide"},
    "zero heads": {"num_attention_heads": 0},
    "a list for a table": {"rope_parameters": [1]},
    "layers that are none": {"layer_types": ["none"]},
    "no such activation": {"hidden_act": "no"},
    "negative sizes": {"intermediate_size": -5},
    "a quantization of numbers": {"quantization_config": 7},
    "another architecture": {"model_type": "mamba"},
    "too few keys": {"num_key_value_heads": 3},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_damaged_configuration_is_one_line(name: str, teacher: Path) -> None:
    change(teacher / "config.json", **CONFIGURATIONS[name])
    assert str(teacher) in refused(lambda path: load_model(path, device="cpu"), teacher)


@pytest.mark.parametrize(
    ("text", "name"),
    covering(
        ["[]", "7", "{", "null", "[" * 3000, "\0"],
        ["config.json", "generation_config.json", "tokenizer_config.json"],
    ),
)
def test_a_file_that_is_no_table_is_named(name: str, text: str, teacher: Path) -> None:
    (teacher / name).write_text(text)
    opener = load_tokenizer if "token" in name else lambda path: load_model(path, device="cpu")
    assert f"{name} " in refused(opener, teacher)


@pytest.mark.parametrize("text", ["[]", "{}", '{"model": {"type": "BPE"}}', '{"added_tokens": 1}'])
def test_a_damaged_tokenizer_is_one_line(text: str, teacher: Path) -> None:
    (teacher / "tokenizer.json").write_text(text)
    refused(load_tokenizer, teacher)


def test_an_absurd_id_of_a_token_is_one_line(teacher: Path) -> None:
    values = json.loads((teacher / "tokenizer.json").read_text())
    values["model"]["vocab"]["absurd"] = 2**31
    (teacher / "tokenizer.json").write_text(json.dumps(values))
    assert "has a token of id 2147483648" in refused(load_tokenizer, teacher)


@pytest.mark.parametrize(
    ("value", "key"),
    covering(
        ["org/kernel", "flash_attention_2", {"": "org/kernel"}],
        ["attn_implementation", "_attn_implementation"],
    ),
)
def test_no_configuration_has_a_kernel_fetched(
    key: str, value: object, teacher: Path, student: Path
) -> None:
    for model in (teacher, student):
        change(model / "config.json", **{key: value})
        said = refused(lambda path: load_model(path, device="cpu"), model)
        assert "attn_implementation=" in said and "may fetch as a program" in said
    with pytest.raises(CheckpointError, match="may fetch as a program"):
        AutoModelForCausalLM.from_pretrained(student)


def test_an_adapter_leads_to_no_other_model(teacher: Path) -> None:
    (teacher / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    assert "adapter" in refused(lambda path: load_model(path, device="cpu"), teacher)


@pytest.mark.parametrize("values", [{"modules": 1}, {"modules": {"x": 1}}, {"format": [1]}])
def test_a_damaged_table_of_formats_is_one_line(values: dict, student: Path) -> None:
    config = json.loads((student / "config.json").read_text())
    config["quantization_config"] |= values
    (student / "config.json").write_text(json.dumps(config))
    for opener in (load_checkpoint, load_skeleton):
        refused(lambda path, opener=opener: opener(Path(path)), student)


def test_our_own_mistakes_keep_their_traceback(teacher: Path, monkeypatch) -> None:
    with pytest.raises(KeyError), Opening(teacher, "a model"):
        {}["ours"]
    monkeypatch.setattr(load, "check_split", lambda model: [][1])
    with pytest.raises(IndexError):
        load_model(str(teacher), device="cpu")
    with pytest.raises(KeyboardInterrupt), Opening(teacher, "a model"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "kind, name", [("qwen3", "CausalLM"), ("gemma3", "CausalLM"), ("qwen3_vl", "ImageTextToText")]
)
def test_models_of_images_open_by_the_name_that_transformers_has_for_them(
    kind: str, name: str
) -> None:
    assert auto_class(CONFIG_MAPPING[kind]()).__name__ == f"AutoModelFor{name}"


KINDS = {
    "bert_of_tomorrow": "holds a model of type bert_of_tomorrow, expected one that transformers",
    "t5": "has a configuration of the class T5Config, for which transformers has no causal lang",
}


@pytest.mark.parametrize("kind", ["bert_of_tomorrow", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_model_that_is_none_for_us_is_called_by_its_name(kind: str, teacher: Path) -> None:
    (teacher / "config.json").write_text(json.dumps({"model_type": kind}))
    said = refused(lambda path: load_model(path, device="cpu"), teacher)
    assert said.startswith(f"{teacher} {KINDS[kind]}") and len(said) < 300


@pytest.mark.parametrize("opener", [lambda path: load_model(path, device="cpu"), load_tokenizer])
def test_a_gguf_without_its_package_is_named_with_the_extra(
    opener: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "model.gguf").touch()
    said = refused(opener, tmp_path / "model.gguf")
    assert "is a GGUF file, expected the package" in said and said.endswith("[ship]'")


# what transformers raises where a package is missing, as far as it is matched
UNREAD = {
    "Couldn't instantiate ... You need to have sentencepiece or tiktoken installed to convert": (
        "holds no tokenizer.json, expected one; copy it there, or"
    ),
    "`tiktoken` is required to read a `tiktoken` file. Install it with `pip install tiktoken`.": (
        f"install what reads that: {sys.executable} -m pip install sentencepiece tiktoken"
    ),
    "compressed-tensors>=0.15.0 is required for compressed-tensors quantization. Please": (
        f"run: {how_to_install('ship')}"
    ),
}


@pytest.mark.parametrize("theirs", UNREAD)
def test_a_missing_package_is_named_with_its_command(
    theirs: str, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qat.models.opening.is_of_files", lambda *_: True)
    with pytest.raises(CheckpointError) as caught, Opening(teacher, "a tokenizer"):
        raise ImportError(theirs)
    assert UNREAD[theirs] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("opener", [lambda path: load_model(path, device="cpu"), load_tokenizer])
def test_a_gguf_of_an_unknown_architecture_is_called_by_its_name(
    opener: object, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "rwkv6")
    writer.add_name("a model")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    said = refused(opener, tmp_path / "model.gguf")
    assert "holds a model of the GGUF architecture rwkv6, expected one that transformers" in said
    assert "llama" in said and "tokenizer" not in said and "hub id of the model that" in said
