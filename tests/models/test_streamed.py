"""Models that stay in their files: the same bits, a layer in memory, and files where others are."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from cache_case import build, contents
from covering import covering
from families import saved
from quantized import SPECS, frozen_linear
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_model, tiny_tokenizer
from torch import Tensor, nn

from qat.convert import checkpoint
from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import ConvertConfig
from qat.errors import CheckpointError
from qat.models import streamed
from qat.models.checkpoint import without_records
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_teacher
from qat.models.split_check import check_layers
from qat.models.streamed import (
    StreamedModel,
    as_checkpoint_error,
    hidden_layer_by_layer,
    to_file,
)
from qat.nn.swap import decoder_layers
from qat.process import data_limit, process_gib, uncounted
from qat.quant import fit

IDS = torch.arange(24).view(2, 12) % VOCAB
BATCHES = [(IDS, torch.arange(12).expand(2, 12)), (IDS + 7, torch.arange(12).expand(2, 12) % 5)]


@pytest.fixture(autouse=True)
def _small_ones_go_to_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "SMALL_BYTES", 0)
    # how well a weight is fitted tells nothing of where it lies
    monkeypatch.setattr(fit, "ROUNDS", 2)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n\n".join(["the cat sat on the mat and the dog saw"] * 40))
    return tmp_path / "text.txt"


def source(place: Path, family: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model in several files of that dtype."""
    if family in {"qwen3", "gemma3"}:
        model = tiny_model(family, tie_word_embeddings=family == "gemma3", initializer_range=0.2)
        model.to(dtype).save_pretrained(place, max_shard_size="20KB")
    else:
        saved(family, place)
        for file in place.glob("*.safetensors"):
            state = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
            save_file(state, file, metadata={"format": "pt"})
    tiny_tokenizer().save_pretrained(place)
    return place


def whole(*args: object, **named: object) -> LanguageModel:
    """`load_model`, all of it in memory."""
    return load_model(*args, **(named | {"folder": None}))


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("qwen3", torch.float16, {"embedding_bits": 8}),
        ("gemma3", torch.bfloat16, {"embedding_bits": 4}),
        ("GPT2LMHeadModel", torch.float32, {}),
        *(
            pytest.param(family, torch.bfloat16, {}, marks=pytest.mark.slow)
            for family in ("BertGenerationDecoder", "Mamba2ForCausalLM")
        ),
        ("MixtralForCausalLM", torch.bfloat16, {}),
    ],
)
@pytest.mark.parametrize("is_calibrated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_conversion_writes_what_one_in_memory_writes(
    family: str,
    dtype: torch.dtype,
    options: dict[str, object],
    is_calibrated: bool,
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = source(tmp_path / "float", family, dtype)
    calibration = str(text) if is_calibrated else None
    config = ConvertConfig(
        to="q2a4", device="cpu", calibration=calibration, calibration_length=16, **options
    )
    convert_checkpoint(str(place), config, tmp_path / "streamed")
    monkeypatch.setattr(checkpoint, "load_model", whole)
    convert_checkpoint(str(place), config, tmp_path / "whole")
    for name in ("model.safetensors", "config.json"):
        found, expected = (tmp_path / which / name for which in ("streamed", "whole"))
        assert found.read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_a_base_stays_in_its_files_too(tmp_path: Path, text: Path) -> None:
    base = source(tmp_path / "float")
    convert_checkpoint(str(base), ConvertConfig(to="q4a4", device="cpu"), tmp_path / "four")
    settings = {"to": "q2a4", "device": "cpu", "calibration": str(text), "calibration_length": 16}
    wished = ConvertConfig(base=str(base), **settings)
    convert_checkpoint(str(tmp_path / "four"), wished, tmp_path / "based")
    found = load_file(tmp_path / "based" / "model.safetensors")
    kept = load_file(tmp_path / "four" / "model.safetensors")
    attention = [name for name in kept if "self_attn" in name]
    assert attention and all(torch.equal(found[name], kept[name]) for name in attention)


def test_hidden_states_that_do_not_fit_go_to_files(tmp_path, text, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    place = source(tmp_path / "float")
    settings = {"to": "q2a4", "device": "cpu", "calibration": str(text), "calibration_length": 16}
    config = ConvertConfig(**settings, calibration_sequences=8)
    convert_checkpoint(str(place), config, tmp_path / "fits")
    assert "go to files" not in caplog.text
    monkeypatch.setattr(streamed, "SHARE", 0.0)
    convert_checkpoint(str(place), config, tmp_path / "out")
    assert "go to files in" in caplog.text
    files = [tmp_path / which / "model.safetensors" for which in ("fits", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


def opened(tmp_path: Path) -> LanguageModel:
    return load_model(str(source(tmp_path / "float")), device="cpu", dtype="fp32", folder=tmp_path)


def test_a_layer_is_in_memory_while_it_is_needed(tmp_path: Path) -> None:
    model = opened(tmp_path)
    first, second = decoder_layers(model.model)
    before = first.mlp.up_proj.weight
    assert before.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert model.model.model.norm.weight.dtype == torch.float32  # what is no layer stays
    with model.present(first), model.present(first):
        assert first.mlp.up_proj.weight.dtype == torch.float32
        assert torch.equal(first.mlp.up_proj.weight, before.float())
        assert second.mlp.up_proj.weight.dtype == torch.bfloat16
    assert first.mlp.up_proj.weight is before
    with model.present(model.model.model.norm):
        assert first.mlp.up_proj.weight is before


def test_a_quantized_linear_goes_into_files_behind_its_layer(tmp_path: Path) -> None:
    model = opened(tmp_path)
    layer = decoder_layers(model.model)[0]
    kept: list[Tensor] = []
    real = streamed.to_file

    def note(tensor: Tensor, folder: Path | None) -> Tensor:
        kept.append(tensor)
        return real(tensor, folder)

    with pytest.MonkeyPatch.context() as patch, model.present(layer):
        patch.setattr(streamed, "to_file", note)
        layer.mlp.up_proj = frozen_linear(64, 32, SPECS["lut2"])
        expected = layer.mlp.up_proj.quantized_weight()
        model.settle(layer.mlp.up_proj)
        assert len(kept) == 3  # packed indices, codebook and scales
    assert torch.equal(layer.mlp.up_proj.quantized_weight(), expected)
    model.settle(layer.mlp.down_proj)  # is no such linear
    assert layer.mlp.down_proj.weight.dtype == torch.bfloat16


def test_what_a_checkpoint_does_not_store_is_widened(tmp_path: Path) -> None:
    place = source(tmp_path / "float", dtype=torch.float16)
    model = load_model(str(place), device="cpu", dtype="fp32", folder=tmp_path)
    before = model.model.lm_head.weight
    assert before.dtype == torch.float16
    model.widen()
    assert model.model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.model.lm_head.weight, load_file_of(place, "lm_head.weight").float())


def load_file_of(place: Path, name: str) -> Tensor:
    states = map(load_file, place.glob("*.safetensors"))
    return next(state[name] for state in states if name in state)


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)])
def test_a_tensor_in_a_file_is_the_same(shape: tuple[int, ...], tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = (torch.rand(shape) * 100).to(dtype)
        there = to_file(tensor, tmp_path)
        assert torch.equal(there, tensor) and there.dtype == dtype
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    with pytest.raises(CheckpointError, match="what does not fit in memory cannot be written"):
        to_file(torch.ones(3), tmp_path)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    place = source(tmp_path / "float")
    for file in place.glob("*.safetensors"):
        state = load_file(file)
        for name in [name for name in state if name.endswith("0.mlp.up_proj.weight")]:
            state[name] = state[name][:8].clone()
        save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight of shape \(8, 32\), expected \(64"):
        load_model(str(place), device="cpu", folder=tmp_path)


@pytest.mark.parametrize(
    ("family", "share"),
    covering(["qwen3", "gemma3", "MixtralForCausalLM", "FalconForCausalLM"], [0.5, 0.0]),
)
def test_layer_by_layer_gives_the_same_hidden_states(family, share, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(streamed, "SHARE", share)
    place = str(source(tmp_path / "float", family))
    plain = load_teacher(place, device="cpu", dtype="fp32")
    model = load_teacher(place, device="cpu", dtype="fp32", device_map="disk")
    assert isinstance(model, StreamedModel)
    with torch.no_grad():
        pairs = zip(hidden_layer_by_layer(model, BATCHES), plain.hidden_of(BATCHES), strict=True)
        for found, expected in pairs:
            assert torch.equal(found, expected)
            assert torch.equal(model.logits(found), plain.logits(expected))


def test_a_cache_of_a_teacher_on_the_disk_is_the_same(tmp_path: Path, monkeypatch) -> None:
    place = str(source(tmp_path / "float"))
    brought: list[nn.Module] = []
    real = StreamedModel._load

    def note(self: StreamedModel, modules: set[nn.Module]) -> object:
        brought.extend(modules)
        return real(self, modules)

    plain = load_teacher(place, device="cpu", dtype="fp32")
    build(tmp_path / "plain", teacher=plain)
    model = load_teacher(place, device="cpu", dtype="fp32", device_map="disk")
    monkeypatch.setattr(StreamedModel, "_load", note)
    manifest = build(tmp_path / "streamed", teacher=model)
    assert contents(tmp_path / "plain") == contents(tmp_path / "streamed")
    assert max(shard.sequences for shard in manifest.shards) > 4  # several batches
    assert brought.count(decoder_layers(model.model)[1]) == len(manifest.shards)


def test_what_does_not_stay_in_files_is_told(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    convert_checkpoint(
        str(source(tmp_path / "float")), ConvertConfig(to="q4a4", device="cpu"), tmp_path / "four"
    )
    found = load_teacher(str(tmp_path / "four"), device="cpu", device_map="disk")
    assert not isinstance(found, StreamedModel) and "is in memory whole" in caplog.text


def test_layers_that_give_something_else_alone_are_refused(tmp_path: Path, monkeypatch) -> None:
    model = opened(tmp_path)
    check_layers(model)
    monkeypatch.setattr(model, "hidden_of", lambda batches: [model.hidden(*batches[0]) + 1])
    with pytest.raises(CheckpointError, match="other hidden states layer by layer"):
        check_layers(model)


def test_what_layers_cannot_do_alone_is_one_line() -> None:
    model = LanguageModel(tiny_model())
    with pytest.raises(CheckpointError, match=r"one by one \(no way\), for a test; go"):
        with as_checkpoint_error(model, "for a test; go"):
            raise ValueError("no way")
    with pytest.raises(torch.OutOfMemoryError), as_checkpoint_error(model, "for a test; go"):
        raise torch.OutOfMemoryError


def test_layers_that_are_called_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel(tiny_model())
    body = model.model.base_model
    once = body.forward
    monkeypatch.setattr(body, "forward", lambda **inputs: once(**inputs) and once(**inputs))
    with pytest.raises(CheckpointError, match=r"one by one \(2 layers are called 4 times\), which"):
        next(hidden_layer_by_layer(model, BATCHES))


def test_only_one_warning_is_left_out(caplog) -> None:
    theirs = logging.getLogger("accelerate.big_modeling")
    with without_records("accelerate.big_modeling", "offloaded to the disk"):
        theirs.warning("Some parameters were offloaded to the disk.")
        theirs.warning("another")
    theirs.warning("were offloaded to the disk.")
    assert [record.message for record in caplog.records] == [
        "another",
        "were offloaded to the disk.",
    ]


def test_maps_of_files_do_not_count_as_memory_that_runs_out(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    (tmp_path / "file").write_bytes(bytes(2**24))
    map_ = partial(torch.from_file, str(tmp_path / "file"), size=2**24, dtype=torch.uint8)
    with uncounted():  # no limit: nothing to do
        map_()
    with data_limit(process_gib("VmData") + 2**-9):
        with pytest.raises(RuntimeError, match="Cannot allocate memory"):
            map_()
        before, _ = resource.getrlimit(resource.RLIMIT_DATA)
        with uncounted():
            held = map_()
        after, _ = resource.getrlimit(resource.RLIMIT_DATA)
    assert before + held.nbytes <= after < before + 2 * held.nbytes
