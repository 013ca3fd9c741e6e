"""A file beside the model that it was made of: planted faults are named, whole files pass."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from cli_case import call, said
from tiny import save_tiny
from verify_case import (
    GATE_NAME,
    MORE,
    SHAPE,
    TWELVE,
    UP_NAME,
    copy_directory,
    copy_gguf,
    export,
    save_student,
    swap,
)

from qat.errors import CheckpointError, ConfigError, DataError
from qat.extensions.verify.config import VerifyConfig
from qat.extensions.verify.facts import Finding
from qat.extensions.verify.run import Verdict, verify
from qat.extensions.verify.verb import rows_of

pytest.importorskip("gguf")
LIBRARIES = {"mlx": "mlx_lm", "compressed-tensors": "compressed_tensors", "onnx": "onnxruntime"}
NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
"""The sizes of `save_tiny`."""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_student(tmp_path_factory.mktemp("student") / "packed")


@pytest.fixture(scope="module")
def file(student: Path) -> Path:
    return export(student, "gguf", student.parent / "gguf")


def judged(reference: Path, found: Path, **settings: object) -> Verdict:
    return verify(str(reference), str(found), VerifyConfig(**{"contexts": 2, **settings}))


@pytest.mark.parametrize("kind", [*TWELVE, *MORE])
def test_a_planted_fault_is_named(kind: str, student: Path, file: Path, tmp_path: Path) -> None:
    change, place = (TWELVE | MORE)[kind]
    verdict = judged(student, copy_gguf(file, tmp_path / "fault.gguf", change))
    assert not verdict.passes
    found = [each for each in verdict.findings if each.kind != "distance"]
    assert {each.kind for each in found} == {kind}
    assert found[0].place.startswith(place)


def test_a_copy_without_a_fault_passes(student: Path, file: Path, tmp_path: Path) -> None:
    verdict = judged(student, copy_gguf(file, tmp_path / "whole.gguf", lambda *_: None))
    assert verdict.findings == [] and verdict.form == "gguf"
    assert (verdict.distance.kl_nats, verdict.distance.top1_frac) == (0, 1)
    assert verdict.tensors[0].error == 0


GEMMA = {"query_pre_attn_scalar": 16}
"""What llama.cpp computes a Gemma-3 with heads of 16 with."""


@pytest.mark.parametrize(
    ("architecture", "to"),
    [
        *product(("llama", "qwen3"), ("dense", "gguf", "mlx", "compressed-tensors", "onnx")),
        ("gemma3", "gguf"),
        ("gemma3", "packed"),
    ],
)
def test_our_exports_pass(architecture: str, to: str, tmp_path: Path) -> None:
    if find_spec(LIBRARIES.get(to, "torch")) is None:
        pytest.skip(f"needs {LIBRARIES[to]}")
    settings = GEMMA if architecture == "gemma3" else {}
    is_tied = architecture != "llama"
    student = save_student(
        tmp_path / "packed", architecture, tie_word_embeddings=is_tied, **settings
    )
    verdict = judged(student, export(student, to, tmp_path / "out"))
    assert verdict.findings == [] and verdict.form == to
    assert verdict.distance.kl_nats < 1e-9 and verdict.distance.top1_frac == 1
    assert verdict.tensors[0].error < 1e-6


def overflow(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name][2, 0] = torch.inf


DIRECTORY_FAULTS: dict[str, tuple[str, str, Callable, str, str]] = {
    "scales of MLX": (
        "mlx",
        "model.safetensors",
        lambda tensors: overflow(tensors, UP_NAME.replace("weight", "scales")),
        "overflow",
        UP_NAME,
    ),
    "a weight of MLX": (
        "mlx",
        "model.safetensors",
        lambda tensors: tensors.pop("model.layers.0.input_layernorm.weight"),
        "missing",
        "model.layers.0.input_layernorm.weight",
    ),
    "angles of MLX": (
        "mlx",
        "config.json",
        lambda values: values.update(rope_theta=3e4, rope_parameters={"rope_theta": 3e4}),
        "rope",
        "model.rotary_emb.inv_freq",
    ),
    "scales of compressed-tensors": (
        "compressed-tensors",
        "model.safetensors",
        lambda tensors: tensors[UP_NAME + "_scale"][:9].zero_(),
        "underflow",
        UP_NAME,
    ),
    "end of compressed-tensors": (
        "compressed-tensors",
        "tokenizer_config.json",
        lambda values: values.update(eos_token="<|user|>"),
        "end-token",
        "end of an answer",
    ),
    "a norm of a dense model": (
        "dense",
        "model.safetensors",
        lambda tensors: tensors["model.norm.weight"].add_(torch.linspace(0, 0.1, 64)),
        "tensor",
        "model.norm.weight",
    ),
    "splitting of a dense model": (
        "dense",
        "tokenizer.json",
        lambda values: values["model"]["merges"].clear(),
        "splitting",
        "'The cat",
    ),
}


@pytest.mark.parametrize("name", DIRECTORY_FAULTS)
def test_a_fault_of_a_directory_is_named(name: str, student: Path, tmp_path: Path) -> None:
    to, changed, change, kind, place = DIRECTORY_FAULTS[name]
    if find_spec(LIBRARIES.get(to, "torch")) is None:
        pytest.skip(f"needs {LIBRARIES[to]}")
    whole = export(student, to, tmp_path / "whole")
    verdict = judged(student, copy_directory(whole, tmp_path / "fault", changed, change))
    found = [each for each in verdict.findings if each.kind != "distance"]
    assert {each.kind for each in found} == {kind}
    assert found[0].place.startswith(place)


def test_a_program_of_another_model_is_found(student: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    other = save_student(tmp_path / "other", seed=1, rope_parameters={"rope_theta": 5e5})
    verdict = judged(student, export(other, "onnx", tmp_path / "onnx"))
    found = {each.kind: each.place for each in verdict.findings}
    assert found["rope"] == "model.rotary_emb.inv_freq" and found["distance"]
    wrong = {each.place for each in verdict.findings if each.kind == "tensor"}
    assert {UP_NAME, GATE_NAME, "lm_head.weight", "model.embed_tokens.weight"} <= wrong


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_angles_of_a_gguf_file_are_read(kind: str, file: Path, tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        scaling["llama.rope.scaling.original_context_length"] = 32
    scaled = copy_gguf(file, tmp_path / "a.gguf", lambda fields, _: fields.update(scaling))
    assert judged(scaled, scaled).passes
    (found,) = (each for each in judged(file, scaled).findings if each.kind != "distance")
    assert found.kind == "rope" and kind in found.words


def test_rounding_is_no_fault_but_a_distance(tmp_path: Path) -> None:
    """A float model beside a file of it whose weights are rounded to 4 bits."""
    save_tiny(tmp_path / "float", "llama", initializer_range=0.2)
    student = save_student(tmp_path / "packed", **NARROW)
    found = judged(tmp_path / "float", export(student, "gguf", tmp_path / "gguf"))
    assert {each.kind for each in found.findings} == {"distance"}
    assert 0.01 < found.tensors[0].error < found.tensors[0].limit
    loose = {"max_kl": 1.01 * found.distance.kl_nats, "min_top1": found.distance.top1_frac}
    assert judged(tmp_path / "float", tmp_path / "gguf" / "model.gguf", **loose).passes


def test_few_tokens_of_the_usual_text_are_enough(student: Path, file: Path) -> None:
    assert judged(student, file, context=4).distance.num_tokens == 2
    single = judged(student, file, context=4, contexts=1).distance
    assert single.num_tokens == 1 and single.kl_stderr_nats is None


def test_other_inputs_take_one_line(file: Path, student: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "bad.gguf").write_text("hello")
    (tmp_path / "program" / "model.mlpackage").mkdir(parents=True)
    (tmp_path / "program" / "config.json").write_text("{}")
    save_tiny(tmp_path / "words", "llama", vocab_size=512, **SHAPE)
    save_tiny(tmp_path / "deep", "llama", num_hidden_layers=3, **SHAPE)
    save_tiny(tmp_path / "gemma", "gemma3", **SHAPE)
    for other, error, words in (
        (tmp_path / "nowhere", CheckpointError, "nowhere"),
        (tmp_path / "notes.txt", CheckpointError, "notes.txt"),
        (tmp_path / "bad.gguf", CheckpointError, "bad.gguf"),
        (tmp_path / "program", CheckpointError, "model.mlpackage, a program"),
        (tmp_path / "words", ConfigError, "vocabulary of 512 words"),
        (tmp_path / "deep", ConfigError, "3 layers"),
        (tmp_path / "gemma", ConfigError, "gemma3_text"),
    ):
        with pytest.raises(error) as found:
            judged(student, other)
        assert words in str(found.value) and "\n" not in str(found.value)
    with pytest.raises(DataError, match="notes.txt holds"):
        judged(student, file, text=tmp_path / "notes.txt")


def test_the_verb_ends_with_json_and_code_1_for_a_fault(
    student: Path, file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    fault = copy_gguf(file, tmp_path / "fault.gguf", swap)
    for each, code in ((file, 0), (fault, 1)):
        assert call(monkeypatch, "verify-export", student, each, "--contexts", 1) == code
        found = said(capsys)
        assert found["passes"] == (code == 0) and found["form"] == "gguf"
        assert {"kl_nats", "top1_frac", "flips_frac", "reference_ppl"} <= found.keys()
        assert len(found["worst"]) == 8
    many = [Finding("tensor", f"layers.{layer}.k", f"off by {layer}") for layer in range(3)]
    assert [*rows_of([*many, Finding("rope", "theta", "10")])] == [
        {"kind": "tensor", "place": "layers.0.k and 2 like it", "words": "off by 0"},
        {"kind": "rope", "place": "theta", "words": "10"},
    ]
    kinds = {each["kind"] for each in found["findings"]}
    assert kinds == {"swapped", "distance"}
    assert call(monkeypatch, "verify-export", student, tmp_path / "nowhere") == 1
    assert capsys.readouterr().err.count("\n") == 1
