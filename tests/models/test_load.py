"""Whatever a user may call a model: directories, runs, bad names."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import families
import pytest
import torch
from families import build, tiny_config
from quantized import SPECS, tiny_quantized
from tiny import tiny_model, tiny_tokenizer
from transformers import PreTrainedModel

from qat.data.reader import TeacherCache
from qat.errors import CacheError, CheckpointError
from qat.models.checkpoint import copy_processors, save_checkpoint
from qat.models.directory import resolve
from qat.models.language_model import LanguageModel, most_positions
from qat.models.load import load_model, load_teacher, load_tokenizer, model_identity
from qat.models.split_check import check_split
from qat.nn.quant_linear import QuantLinear, quant_linears

IDS = torch.arange(12).view(2, 6)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Attempts to reach a hub; a test that leaves any here fails."""
    attempts = []

    def refuse(*arguments: object, **_: object) -> None:
        attempts.append(arguments)
        raise OSError("this test has no network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    yield attempts
    assert not attempts


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def float_dir(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "float")
    return tmp_path / "float"


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits


def make_run(tmp_path: Path, **pointers: int) -> Path:
    """A run whose checkpoints hold step numbers as seeds."""
    run = tmp_path / "run"
    for pointer, step in pointers.items():
        name = f"checkpoints/step-{step:06d}"
        save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), run / name)
        (run / name / "trainer").mkdir()
        (run / pointer).write_text(f"{name}\n")
    return run


def test_a_teacher_has_no_gradients(float_dir: Path) -> None:
    teacher = load_teacher(str(float_dir), device="cpu", device_map="auto")
    assert not any(p.requires_grad for p in teacher.model.parameters())
    assert not teacher.model.training


def test_a_run_gives_its_best_then_its_latest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, latest=200)
    assert resolve(str(run)) == str(run / "checkpoints/step-000200")
    make_run(tmp_path, best=100)
    assert resolve(str(run)) == str(run / "checkpoints/step-000100")


def test_a_pointer_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("checkpoints/step-000001")
    with pytest.raises(CheckpointError, match="holds no config.json"):
        resolve(str(tmp_path))


def test_files_of_the_reference_name_the_command_that_imports_them(tmp_path: Path) -> None:
    checkpoint, cache = tmp_path / "my q2", tmp_path / "cache"
    for directory, beside, file in (
        (checkpoint, "config.json", "best_state_dict.pt"),
        (cache, "meta.json", "shard_00000.pt"),
    ):
        directory.mkdir()
        (directory / beside).write_text("{}")
        (directory / file).write_bytes(b"")
    command = "wrote it: qat convert '.*/my q2{}' --from anemll --base MODEL --out DIR$"
    with pytest.raises(CheckpointError, match=command.format("")):
        load_model(str(checkpoint), device="cpu")
    with pytest.raises(CheckpointError, match=command.format("/best_state_dict.pt")):
        load_tokenizer(str(checkpoint / "best_state_dict.pt"))
    command = f"wrote it: qat cache import {cache} --teacher MODEL --out DIR$"
    for place in (cache, cache / "shard_00000.pt"):
        with pytest.raises(CacheError, match=command):
            TeacherCache.open(place)
    with pytest.raises(CheckpointError, match=command):
        resolve(str(cache))


@pytest.mark.parametrize("name", ["{tmp}/none", "./none", "{tmp}", "tests/none", "a/b/c", "~/x"])
def test_missing_models_are_one_line(name: str, tmp_path: Path) -> None:
    source = name.format(tmp=tmp_path)
    with pytest.raises(
        CheckpointError, match="a GGUF file or a hub id[:;] check the path"
    ) as caught:
        load_model(source, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"GGUF", b"no such thing" * 9])
@pytest.mark.parametrize("name", ["model.gguf", "."])
def test_a_damaged_gguf_is_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no whole GGUF file") as caught:
        load_model(str(tmp_path / name), device="cpu")
    assert "\n" not in str(caught.value)


def test_one_of_several_gguf_files_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files, .*such as .*a.gguf"):
        load_model(str(tmp_path), device="cpu")
    with pytest.raises(CheckpointError, match="c.gguf does not exist"):
        load_model(str(tmp_path / "c.gguf"), device="cpu")


def test_a_hub_id_is_asked_of_the_hub(network: list[object], monkeypatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("qat.models.directory.is_online", lambda _: True)
    with pytest.raises(CheckpointError, match="nobody/has-this does not give a tokenizer"):
        load_tokenizer("nobody/has-this")
    assert network
    network.clear()


def test_a_truncated_float_model_is_refused(float_dir: Path) -> None:
    file = float_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="does not give a causal language model"):
        load_model(str(float_dir), device="cpu")


def test_a_directory_without_tokenizer_is_refused(float_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tokenizer.json, expected one"):
        load_tokenizer(str(float_dir))


def test_identity_follows_the_content(packed: Path, float_dir: Path) -> None:
    identity = model_identity(str(packed))
    assert identity == model_identity(str(packed)) != model_identity(str(float_dir))
    (packed / "notes.txt").write_text("not a part of the model")
    assert model_identity(str(packed)) == identity
    file = packed / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert model_identity(str(packed)) != identity


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_head_of_hidden_is_the_model(architecture: str, softcap: float | None) -> None:
    overrides = {"final_logit_softcapping": softcap} if architecture == "gemma3" else {}
    split = LanguageModel(tiny_model(architecture, **overrides))
    check_split(split)
    positions = torch.arange(6).expand(2, 6)
    with torch.no_grad():
        assert torch.equal(split.logits(split.hidden(IDS, positions)), logits(split.model))


def test_a_head_of_16_bits_gives_float32_without_gradients() -> None:
    split = LanguageModel(tiny_model("qwen3").bfloat16())
    check_split(split)
    with torch.no_grad():
        hidden = split.hidden(IDS, torch.arange(6).expand(2, 6))
        found = split.logits(hidden)
        exact = hidden.double() @ split.head.weight.double().T
    assert found.dtype == torch.float32 and split.logits(hidden).dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    assert len(found[0, 0].unique()) > len(found[0, 0].bfloat16().unique())  # fewer ties


def deep_with_outliers() -> PreTrainedModel:
    """30 layers in bfloat16, two channels of whose residual stream are far above the others."""
    model = tiny_model("llama", num_hidden_layers=30, initializer_range=0.2)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :2] += 8
        model.model.norm.weight.mul_(4)
    return model.to(torch.bfloat16)


def other_kernel(monkeypatch: pytest.MonkeyPatch, *, causal: bool = True) -> None:
    """Packed documents attend by sums in another order, as on a GPU."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        S, repeats = query.shape[2], query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
        scores = (query * scale) @ key.transpose(2, 3)
        if causal:
            future = torch.ones(S, S, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    monkeypatch.setattr("qat.models.document_attention.fits_tile", lambda *_: True)
    monkeypatch.setattr("qat.models.document_attention.tile_attention", attention)
    monkeypatch.setattr(LanguageModel, "_tile_fits", lambda *_: True)


def test_a_deep_model_may_round_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    other_kernel(monkeypatch)
    split = LanguageModel(deep_with_outliers())
    with torch.no_grad():
        packed = split.logits(split.hidden(IDS, torch.arange(6).expand(2, 6)))
        whole = logits(split.model)
    # what 30 layers make of rounding is more than a few percent of the largest logit
    assert (packed - whole).abs().max() > 0.02 * whole.abs().max()
    check_split(split)


def test_a_changed_head_of_a_deep_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other_kernel(monkeypatch)
    model = deep_with_outliers()
    forward = model.forward

    def scaled(**inputs: object) -> object:
        output = forward(**inputs)
        output.logits = output.logits * 0.97
        return output

    model.forward = scaled
    with pytest.raises(CheckpointError, match="gives other logits than its head makes"):
        check_split(LanguageModel(model))


def test_another_attention_of_a_deep_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other_kernel(monkeypatch, causal=False)
    with pytest.raises(CheckpointError, match="computes other hidden states"):
        check_split(LanguageModel(deep_with_outliers()))


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(CheckpointError, match="gives logits that are not finite in torch.float32"):
        check_split(LanguageModel(model))


def test_a_model_without_head_is_refused() -> None:
    model = tiny_model()
    model.get_output_embeddings = lambda: None
    with pytest.raises(CheckpointError, match="no output embedding"):
        check_split(LanguageModel(model))


@pytest.mark.slow
def test_the_quantizer_registers_whatever_is_imported_first(packed: Path) -> None:
    code = (
        "import qat.nn.swap; from transformers import AutoModelForCausalLM; "
        f"model = AutoModelForCausalLM.from_pretrained({str(packed)!r}); "
        "print(type(model.model.layers[0].mlp.up_proj).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "FrozenLutLinear", done.stderr


@pytest.mark.parametrize(
    "text", ["/etc", "../elsewhere", "checkpoints/../..", "a\0b", "\udcff", ""]
)
def test_a_pointer_that_leads_elsewhere_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match="is no checkpoint of this run"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b", 3, ""])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model.safetensors"}}))
    assert resolve(str(tmp_path)) == str(tmp_path)
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="index.json names .*, expected a name inside"):
        resolve(str(tmp_path))
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="index.json is damaged"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("family", ["XLNetLMHeadModel", "CpmAntForCausalLM"])
def test_a_model_that_reads_what_comes_later_is_refused(family: str) -> None:
    with pytest.raises(CheckpointError, match="reads tokens that come later"):
        check_split(LanguageModel(build(family)))


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_may_round_otherwise_beside_another_token(family: str, dtype: torch.dtype) -> None:
    check_split(LanguageModel(build(family).to(dtype)))


@pytest.mark.parametrize("family", ["RecurrentGemmaForCausalLM", "xLSTMForCausalLM"])
def test_logits_are_soft_capped_by_any_name_of_the_bound(family: str) -> None:
    model = build(family)
    model.get_output_embeddings().weight.data.mul_(1000)
    split = LanguageModel(model)
    check_split(split)
    assert split.softcap == 30
    with torch.no_grad():
        found = split.logits(split.hidden(IDS, torch.arange(6).expand(2, 6)))
    assert 29 < found.abs().max() <= 30


def test_a_limit_of_positions_may_be_none() -> None:
    assert LanguageModel(tiny_model()).longest == 128
    for family in ("XLNetLMHeadModel", "CpmAntForCausalLM"):  # -1, and no such key
        assert most_positions(tiny_config(families.FAMILIES[family])) is None


def test_rwkv_infers_with_the_weights_that_it_has() -> None:
    model = build("RwkvForCausalLM")
    model.get_input_embeddings().weight.data.mul_(1000)  # far above the epsilon of norms
    weight = model.rwkv.blocks[3].attention.output.weight
    before = weight.detach().clone()
    split = LanguageModel(copy.deepcopy(model))
    model.config.rescale_every = 2
    with torch.no_grad():
        expected = model(IDS).logits
        found = split.logits(split.hidden(IDS, torch.arange(6).expand(2, 6)))
    assert not torch.equal(weight, before)
    assert torch.equal(split.model.rwkv.blocks[3].attention.output.weight, before)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_snapshot_of_the_hub_is_made_of_links(float_dir: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (float_dir / "processor_config.json").write_text("{}")
    for number, path in enumerate(sorted(float_dir.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    found = load_model(str(snapshot), device="cpu").model
    assert torch.equal(logits(found), logits(tiny_model("llama")))
    (tmp_path / "copies").mkdir()
    copy_processors(found, tmp_path / "copies")
    assert not (tmp_path / "copies/processor_config.json").is_symlink()
    (snapshot / "preprocessor_config.json").symlink_to(tmp_path / "key")
    (tmp_path / "key").write_text("secret")
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is a link"):
        copy_processors(found, tmp_path / "copies")
    assert not (tmp_path / "copies/preprocessor_config.json").exists()


@pytest.mark.parametrize(("room_gib", "times"), [(1.0, 1), (0.0, 3)])
def test_the_check_forms_a_packed_weight_once_where_there_is_room(
    room_gib: float, times: int, monkeypatch
) -> None:
    monkeypatch.setattr("qat.models.split_check.available_gib", lambda: room_gib)
    model = LanguageModel(tiny_quantized("qwen3", SPECS["lut2"]))
    formed, form = [], QuantLinear.quantized_weight
    monkeypatch.setattr(
        QuantLinear,
        "quantized_weight",
        lambda self, *given, **how: (formed.append(self), form(self, *given, **how))[1],
    )
    check_split(model)
    linears = [*quant_linears(model.model).values()]
    assert len(formed) == times * len(linears) and {*formed} == {*linears}
    assert all(linear.formed is None for linear in linears)
