"""Packed checkpoints: train == save == reload, strict loading, and nothing half-written."""

import json
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from covering import covering
from quantized import (
    SPECS,
    e5m3_values,
    latent_linear,
    tiny_adapted,
    tiny_quantized,
    with_adapter,
)
from safetensors.torch import load_file
from tiny import ARCHITECTURES, IDS, edited, logits, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import qat  # noqa: F401 - registers the quantizer
from qat.errors import CheckpointError, ConfigError
from qat.models.checkpoint import check_written, load_checkpoint, save_checkpoint
from qat.models.directory import CHECKSUMS
from qat.models.hf_quantizer import FORMAT, QatConfig
from qat.models.stored_state import packed_state_dict
from qat.nn.quant_linear import FrozenLutLinear, QuantLinear, quant_linears
from qat.nn.swap import linear_names, replace_module
from qat.quant.spec import LutSpec

VARIANTS = [
    *[(architecture, {}) for architecture in ARCHITECTURES],
    *[(architecture, {"tie_word_embeddings": True}) for architecture in ARCHITECTURES],
    *[(architecture, {"tie_word_embeddings": False}) for architecture in ARCHITECTURES],
    ("qwen3", {"attention_bias": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("gemma3", {"final_logit_softcapping": 5.0}),
]


def edit_tensors(path: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a checkpoint by name, `__` for a dot; None removes one."""
    with edited(path, "model.safetensors") as tensors:
        for key, value in changes.items():
            name = key.replace("__", ".")
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), tmp_path / "saved")
    (tmp_path / "saved" / CHECKSUMS).unlink()  # what else is wrong is told without it, too
    return tmp_path / "saved"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_reloaded_logits_are_equal_for_every_spec(spec: LutSpec, tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", spec, num_hidden_layers=1)
    save_checkpoint(model, None, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert not loaded.training
    assert {type(m) for m in quant_linears(loaded).values()} == {FrozenLutLinear}
    assert all(m.reader is not None for m in quant_linears(loaded).values())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_reloaded_logits_are_equal_for_every_architecture(variant, tmp_path) -> None:
    architecture, overrides = variant
    model = tiny_quantized(architecture, SPECS["lut3"], **overrides)
    save_checkpoint(model, None, tmp_path / "out")
    by_hub_name = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(by_hub_name), logits(model))


@pytest.mark.parametrize(
    ("make", "name", "dtype"),
    [
        (tiny_quantized, "lut4", torch.bfloat16),
        (tiny_quantized, "lut2_s8", torch.float16),
        (tiny_quantized, "lut2_r4", torch.bfloat16),
        (tiny_adapted, "lut2", torch.float16),
    ],
)
def test_loading_in_half_precision_rounds_no_quantizer_tensor(make, name, dtype, tmp_path) -> None:
    model = make("llama", SPECS[name], mlp_bias=True)
    save_checkpoint(model, None, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out", dtype)
    assert loaded.get_input_embeddings().weight.dtype == dtype
    originals = quant_linears(load_checkpoint(tmp_path / "out"))
    for name, linear in quant_linears(loaded).items():
        assert linear.packed.dtype == torch.uint8
        assert linear.bias is None or linear.bias.dtype == dtype
        for key, parameter in linear.weight_parameters().items():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, originals[name].weight_parameters()[key])
    assert torch.equal(logits(loaded), logits(load_checkpoint(tmp_path / "out", dtype)))


def test_latent_weights_are_saved_as_what_they_compute(tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    for number, name in enumerate(linear_names(model)[::2]):
        old = model.get_submodule(name)
        latent = latent_linear(old.out_features, old.in_features, SPECS["lut4"])
        with torch.no_grad():
            latent.codebook.copy_(latent.codebook.flip(0))  # as training may leave it
        replace_module(model, name, with_adapter(latent, rank=5) if number % 2 else latent)
    save_checkpoint(model, None, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    for name, linear in quant_linears(loaded).items():
        assert torch.equal(linear.codebook, linear.codebook.sort().values)
        assert linear.lora_rank == model.get_submodule(name).lora_rank
    assert not any(
        key.endswith("proj.weight") for key in load_file(tmp_path / "out/model.safetensors")
    )


def test_stored_dtypes_and_names(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    prefix = "model.layers.0.mlp.down_proj."
    kinds = {k.removeprefix(prefix): t.dtype for k, t in tensors.items() if k.startswith(prefix)}
    assert kinds == {"packed": torch.uint8, "codebook": torch.float32, "scales": torch.float16}


def test_scales_of_8_bits_are_stored_as_bytes(tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2_s8"])
    save_checkpoint(model, None, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")[f"{NAME}.scales"]
    assert stored.dtype == torch.uint8
    values = e5m3_values()[stored.int()].float()
    assert torch.equal(values, model.get_submodule(NAME).scales)
    loaded = load_checkpoint(tmp_path / "out", torch.bfloat16).get_submodule(NAME).scales
    assert torch.equal(loaded, values) and loaded.requires_grad and loaded.dtype == torch.float32
    edit_tensors(tmp_path / "out", **{f"{KEY}__scales": values.half()})
    with pytest.raises(CheckpointError, match=rf"{NAME}.scales F16 instead of U8"):
        load_checkpoint(tmp_path / "out")


def test_a_module_without_scale_bits_has_16(saved: Path) -> None:
    before = logits(load_checkpoint(saved))
    with edited(saved) as config:
        modules = config["quantization_config"]["modules"]
        assert {values.pop("scale_bits") for values in modules.values()} == {16}
    loaded = load_checkpoint(saved)
    assert torch.equal(logits(loaded), before)
    assert {linear.spec for linear in quant_linears(loaded).values()} == {SPECS["lut2"]}


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=True)
    save_checkpoint(model, None, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_tokenizer_and_generation_config_travel(tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    model.generation_config.max_new_tokens = 17
    tokenizer = tiny_tokenizer()
    save_checkpoint(model, tokenizer, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").generation_config.max_new_tokens == 17
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    assert reloaded.chat_template == tokenizer.chat_template


def test_saving_again_gives_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    save_checkpoint(load_checkpoint(saved), None, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_transformers_alone_does_not_save(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save_pretrained cannot mark .* qat.save"):
        load_checkpoint(saved).save_pretrained(tmp_path / "by_transformers")


@pytest.mark.slow
def test_without_qat_it_does_not_open(saved: Path) -> None:
    code = (
        "from transformers import AutoModelForCausalLM as A; "
        f"A.from_pretrained({str(saved)!r}, local_files_only=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run 'import qat' before from_pretrained" in done.stderr.splitlines()[-1]


def test_a_checkpoint_of_before_the_mark_opens(saved: Path) -> None:
    with edited(saved) as config:
        assert "import qat" in config.pop("transformers_weights")
    assert not hasattr(load_checkpoint(saved).config, "transformers_weights")


def test_another_tensor_read_back_is_refused(saved: Path) -> None:
    check_written(saved, tiny_quantized("qwen3", SPECS["lut2"]))
    with pytest.raises(CheckpointError, match="what was written of Qwen3ForCausalLM gives another"):
        check_written(saved, tiny_quantized("qwen3", SPECS["lut2"], seed=1))
    (saved / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be opened again .* nothing is kept"):
        check_written(saved, tiny_quantized("qwen3", SPECS["lut2"]))


def test_a_sharded_checkpoint_loads_and_is_checked(saved: Path, tmp_path: Path) -> None:
    model = load_checkpoint(saved)
    model.hf_quantizer.packed = packed_state_dict(model)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 1
    assert torch.equal(logits(load_checkpoint(tmp_path / "sharded")), logits(model))
    shards[0].unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "sharded")


def test_a_replaced_checkpoint_is_the_new_one(saved: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut4"])
    save_checkpoint(model, None, saved, replace=True)
    assert torch.equal(logits(load_checkpoint(saved)), logits(model))
    assert [p.name for p in saved.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_foreign_directory_is_not_written_into(replace: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not replaced" if replace else "not empty"):
        save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), None, tmp_path, replace=replace)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("is_there_before", [False, True])
def test_a_full_disk_leaves_what_was_there(is_there_before: bool, tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    out = tmp_path / "out"
    if is_there_before:
        save_checkpoint(model, None, out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="nothing new was left there"):
            save_checkpoint(tiny_quantized("qwen3", SPECS["lut4"]), None, out, replace=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if is_there_before else [])
    if is_there_before:
        assert torch.equal(logits(load_checkpoint(out)), logits(model))


def test_a_model_without_quantized_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no quantized layers"):
        save_checkpoint(tiny_model(), None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "name"), covering([1e6, torch.inf, torch.nan], ["lut2", "lut2_s8"])
)
def test_overflowing_scales_are_refused(name: str, value: float, tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS[name])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.scales[0, 0] = value
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.scales .* not finite"):
        save_checkpoint(model, None, tmp_path / "out")


NAME = "model.layers.0.mlp.down_proj"
KEY = NAME.replace(".", "__")

DAMAGES = {
    "missing": ({f"{KEY}__scales": None}, rf"misses {NAME}.scales; expected"),
    "missing_norm": ({"model__norm__weight": None}, r"misses model.norm.weight"),
    "extra": ({"model__spare": torch.ones(1)}, r"no place for: model.spare"),
    "shape": (
        {f"{KEY}__scales": torch.ones(32, 2).half()},
        rf"wrong shapes: {NAME}.scales \(32, 2\) instead of \(32, 4\)",
    ),
    "packed_shape": (
        {f"{KEY}__packed": torch.zeros(32, 5, dtype=torch.uint8)},
        rf"wrong shapes: {NAME}.packed \(32, 5\) instead of \(32, 16\)",
    ),
    "dtype": (
        {f"{KEY}__scales": torch.ones(32, 4)},
        rf"wrong dtypes: {NAME}.scales F32 instead of F16",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_tensors_are_named(damage: str, saved: Path) -> None:
    changes, message = DAMAGES[damage]
    edit_tensors(saved, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_truncated_file_is_refused(kept: int, saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"cannot be read .* damaged: copy it anew"):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 14}, r"format=14, expected format=13"),
        ({"format": 1}, r"format=1, expected format=13 or one of 1 to 12 without features"),
        ({"features": None}, r"features=None, expected a list of names"),
        ({"features": [1]}, r"features=\[1\], expected a list of names"),
        ({"features": ["vectors", "ternions"]}, r"features='ternions', .* expected some of"),
        ({"features": ["activations"]}, r"features=\['activations'\], expected \[\]"),
        ({"features": ["vectors"]}, r"features=\['vectors'\], expected \[\]"),
        ({"features": ["nsa"]}, r"written with sparse attention"),
        ({"spare": 1}, r"keys \['spare'\]"),
        ({"modules": {}}, r"modules={}"),
        ({"modules": {NAME: {"bits": 9}}}, rf"{NAME}.*bits=9"),
        ({"modules": {NAME: {"bits": 2, "speed": 1}}}, rf"{NAME}.*speed"),
        ({"modules": {"model.layers.7.mlp": {"bits": 2}}}, r"no linear layer of that name"),
        ({"modules": {"model.norm": {"bits": 2}}}, r"no linear layer of that name"),
        ({"modules": {NAME: {"bits": 2, "group_size": 5}}}, r"group_size=5 does not divide"),
    ],
)
def test_a_foreign_quantization_config_is_refused(changes: dict, message: str, saved: Path) -> None:
    with edited(saved) as config:
        config["quantization_config"] |= changes
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved)


@pytest.mark.parametrize(("spec", "number"), [("lut2", 1), ("pairs6", 3)])
def test_formats_of_earlier_versions_are_read(spec: str, number: int, tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS[spec])
    save_checkpoint(model, None, tmp_path)
    with edited(tmp_path) as config:
        del config["quantization_config"]["features"]
        config["quantization_config"]["format"] = number
    again = load_checkpoint(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.config.quantization_config.format == FORMAT


def test_features_of_earlier_formats_were_counted_in_their_number() -> None:
    modules, numbers = {"a": {"lora_rank": 4}}, iter(range(1, FORMAT))
    for inputs, codebook, attention in product(
        ([], ["activations"]), ([], ["vectors"], ["trellis"]), ([], ["nsa"])
    ):
        number, features = next(numbers), sorted(["lora", *inputs, *codebook, *attention])
        if codebook == ["trellis"]:  # of version 0.1
            with pytest.raises(CheckpointError, match="features='trellis'"):
                QatConfig(number, modules=modules)
        else:
            assert QatConfig(number, modules=modules).features == features


def test_an_index_beyond_a_ternary_codebook_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tiny_quantized("qwen3", SPECS["ternary"]), None, tmp_path / "out")
    packed = torch.full((32, 16), 255, dtype=torch.uint8)
    edit_tensors(tmp_path / "out", **{f"{KEY}__packed": packed})
    with pytest.raises(CheckpointError, match="holds index 3, but the codebook has 3 levels"):
        load_checkpoint(tmp_path / "out")


def test_device_map_places_the_model(saved: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(saved, device_map="cpu", dtype=torch.bfloat16)
    assert torch.equal(logits(loaded), logits(load_checkpoint(saved, torch.bfloat16)))


def with_bf16_values(model: PreTrainedModel) -> PreTrainedModel:
    """Float32 parameters that bfloat16 holds exactly; buffers are left alone."""
    for module in model.modules():
        if not isinstance(module, QuantLinear):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16().float()
    return model


def test_float32_masters_of_a_bf16_model_are_stored_as_bf16(tmp_path: Path) -> None:
    model = with_bf16_values(tiny_quantized("qwen3", SPECS["lut2"]))
    save_checkpoint(model, None, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_checkpoint(tmp_path / "out", torch.float32)
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_one_learned_norm_keeps_the_checkpoint_in_float32(tmp_path: Path) -> None:
    model = with_bf16_values(tiny_quantized("qwen3", SPECS["lut2"]))
    with torch.no_grad():
        model.model.norm.weight.add_(1e-5)
    save_checkpoint(model, None, tmp_path / "out")
    again = load_checkpoint(tmp_path / "out")
    assert again.dtype == torch.float32
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)
