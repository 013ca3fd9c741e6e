"""Checkpoints that others quantized are read as the floats that they stand for."""

import shutil
import struct
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import families
import pytest
import torch
from covering import covering
from safetensors.torch import load_file, save_file
from tiny import edited, save_tiny, tiny_model, tiny_tokenizer
from torch import Tensor

from qat.backend.base import DTYPES
from qat.convert.config import ConvertConfig
from qat.convert.convert import convert_model
from qat.convert.quantize import quantize_model
from qat.convert.shipping import Shipping
from qat.errors import CheckpointError
from qat.export.config import ExportConfig, TargetName
from qat.export.model import export_model
from qat.export.targets import load_target
from qat.models.checkpoint import save_checkpoint
from qat.models.dequantize import AWQ_ORDER, float_state
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer, model_identity
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import linear_names
from qat.quant.spec import PRESETS

GROUP = 16


def packed_rows(numbers: Tensor, bits: int) -> Tensor:
    """Numbers along the last dimension, N in an int32, lowest bits first."""
    N = 32 // bits
    shifts = torch.arange(0, 32, bits)
    words = (numbers.long().view(len(numbers), -1, N) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq(bits: int, offset: int, *, shuffles: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a GPTQ linear of 64 inputs and 32 outputs, and its weight `(O, I)`."""
    q, zeros = torch.randint(2**bits, (64, 32)), torch.randint(1, 2**bits, (4, 32))
    scales = (torch.rand(4, 32) * 0.02 + 0.01).half()
    groups = torch.arange(64) // GROUP
    groups = groups[torch.randperm(64)] if shuffles else groups
    weight = (q - zeros[groups]).half() * scales[groups]
    tensors = {
        "qweight": packed_rows(q.T, bits).T.contiguous(),
        "qzeros": packed_rows(zeros - offset, bits),
        "scales": scales,
        "g_idx": groups.int(),
    }
    return tensors, weight.T


def awq() -> tuple[dict[str, Tensor], Tensor]:
    """The same of AWQ, whose numbers lie in an order of its own."""
    q, zeros = torch.randint(16, (64, 32)), torch.randint(16, (4, 32))
    scales = (torch.rand(4, 32) * 0.02 + 0.01).half()
    groups = torch.arange(64) // GROUP
    nibbles = torch.tensor(AWQ_ORDER).argsort()

    def packed(numbers: Tensor) -> Tensor:
        return packed_rows(numbers.view(len(numbers), -1, 8)[:, :, nibbles].flatten(1), 4)

    tensors = {"qweight": packed(q), "qzeros": packed(zeros), "scales": scales}
    return tensors, ((q - zeros[groups]).half() * scales[groups]).T


def checkpoint(out: Path, settings: dict[str, object], linear: dict[str, Tensor]) -> str:
    """A tiny model whose up projections are that linear."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=32)
    model.half().save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)
    with edited(out, "model.safetensors") as state:
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.up_proj"
            del state[f"{name}.weight"]
            state |= {f"{name}.{key}": tensor.clone() for key, tensor in linear.items()}
    return quantized_as(settings, out)


@pytest.mark.parametrize(
    ("bits", "kind", "shuffles"), covering([2, 4, 8], ["gptq", "gptq_v2"], [False, True])
)
def test_gptq_is_read_as_floats(bits: int, kind: str, shuffles: bool, tmp_path: Path) -> None:
    linear, weight = gptq(bits, int(kind == "gptq"), shuffles=shuffles)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": kind}
    found = load_model(checkpoint(tmp_path / "in", settings, linear), device="cpu", dtype="fp32")
    assert torch.equal(found.model.model.layers[1].mlp.up_proj.weight, weight.float())


def test_awq_is_read_as_floats_and_can_be_converted(tmp_path: Path, caplog) -> None:
    linear, weight = awq()
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    source = checkpoint(tmp_path / "in", settings, linear)
    with caplog.at_level("INFO", "qat"):
        found = load_model(source, device="cpu", dtype="fp32")
    assert torch.equal(found.model.model.layers[0].mlp.up_proj.weight, weight.float())
    assert "its awq weights are read as floats" in caplog.text
    convert_model(found, ConvertConfig(to="q2a4", device="cpu"))
    save_checkpoint(found.model, tiny_tokenizer(), tmp_path / "out")
    again = load_model(str(tmp_path / "out"), device="cpu")
    assert len(linear_names(again.model)) == 14


def quantized_as(settings: dict[str, object], out: Path) -> str:
    """Say in its configuration how the checkpoint in `out` is quantized."""
    with edited(out) as config:
        config["quantization_config"] = settings
    return str(out)


def test_experts_in_mxfp4_are_read_as_floats(tmp_path: Path) -> None:
    wished = families.saved_in_mxfp4(tmp_path)
    found = load_model(str(tmp_path), device="cpu", dtype="fp32")
    assert len(wished) == 8
    for name, weight in wished.items():
        assert torch.equal(found.model.get_submodule(name).weight, weight.flatten(0, 1))
    convert_model(found, ConvertConfig(to="q2a4", device="cpu"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_blocks_of_fp8_are_read_as_floats(tmp_path: Path, dtype: str) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=96)
    model.bfloat16().save_pretrained(tmp_path)
    wished = {}
    with edited(tmp_path, "model.safetensors") as state:
        for name in [name for name in state if "proj.weight" in name]:
            O, I = state[name].shape
            blocks = state[name].float().view(O // 32, 32, I // 32, 32)
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            wished[name] = (codes.float() * scales[:, None, :, None]).view(O, I)
            state[name], state[f"{name}_scale_inv"] = codes.view(O, I), scales
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    source = quantized_as(settings | {"activation_scheme": "dynamic"}, tmp_path)
    found = load_model(source, device="cpu", dtype=dtype).model
    assert {p.dtype for p in found.parameters()} == {DTYPES[dtype]}
    assert len(wished) == 14
    for name, weight in wished.items():
        assert torch.equal(found.get_parameter(name), weight.to(DTYPES[dtype]))


def exported(student: LanguageModel, to: TargetName, preset: str, packed: Path, out: Path) -> None:
    """Convert a model for a target, and export it from its packed checkpoint."""
    plan = Shipping({to: load_target(to)}).plan(PRESETS[preset], student.model)
    quantize_model(student, plan)
    save_checkpoint(student.model, tiny_tokenizer(), packed)
    export_model(str(packed), ExportConfig(to=to), out)


@pytest.mark.parametrize("preset", ["q2a4", "q4a4"])  # packed in two ways, and in one
def test_our_own_compressed_tensors_are_read_as_floats(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    tiny_model("llama", hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "in")
    student = load_model(str(tmp_path / "in"), device="cpu", dtype="fp32")
    exported(student, "compressed-tensors", preset, tmp_path / "packed", tmp_path / "out")
    found = load_model(str(tmp_path / "out"), device="cpu", dtype="fp32").model
    packed = load_model(str(tmp_path / "packed"), device="cpu", dtype="fp32").model
    linears = quant_linears(packed)
    assert len(linears) == 14 and not quant_linears(found)
    for name, linear in linears.items():
        assert torch.equal(found.get_submodule(name).weight, linear.quantized_weight())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq", "bits": 5}, "gptq weights of 5 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq weights of 4 bits .version g"),
        ({"quant_method": "eetq"}, "weights quantized by eetq, expected floats or weights of"),
    ],
)
def test_other_formats_are_refused(settings: dict, said: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", settings, gptq(4, 1, shuffles=False)[0])
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(source, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_packed_weight_without_its_scales_is_damaged(tmp_path: Path) -> None:
    linear, _ = gptq(4, 1, shuffles=False)
    del linear["scales"]
    source = checkpoint(tmp_path / "in", {"quant_method": "gptq", "bits": 4}, linear)
    with pytest.raises(CheckpointError, match="up_proj lacks its qzeros or scales"):
        load_model(source, device="cpu")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer in `base`, and a LoRA adapter for it."""
    peft = pytest.importorskip("peft")
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks by a name that will go
        made = peft.get_peft_model(model, settings)
    made.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_merged_into_its_model(adapter: Path, tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    merged = load_model(str(adapter), device="cpu", dtype="fp32").model
    assert f"{adapter}: merged into the weights of {tmp_path / 'base'}" in caplog.text
    base, extra = tiny_model(), load_file(adapter / "adapter_model.safetensors")
    for name, parameter in base.named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        wished = parameter.detach()
        if f"{key}A.weight" in extra:
            wished = wished + 16 / 4 * extra[f"{key}B.weight"] @ extra[f"{key}A.weight"]
        torch.testing.assert_close(merged.get_parameter(name).detach(), wished)
    assert len(extra) == 2 * 2 * 2 and not hasattr(merged, "peft_config")
    assert load_tokenizer(str(adapter))("the cat").input_ids
    assert model_identity(str(adapter)) != model_identity(str(tmp_path / "base"))
    before = model_identity(str(adapter))
    extra = {name: 2 * tensor for name, tensor in extra.items()}
    save_file(extra, adapter / "adapter_model.safetensors")
    assert model_identity(str(adapter)) != before
    convert_model(
        load_model(str(adapter), device="cpu"), ConvertConfig(to="q2a4", device="cpu")
    )  # the merged model is an ordinary one


def changed(adapter: Path, **values: object) -> None:
    with edited(adapter, "adapter_config.json") as settings:
        settings |= values


def lose_a_layer(adapter: Path) -> None:
    with edited(adapter, "adapter_model.safetensors") as tensors:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]


def of_a_prompt(adapter: Path) -> None:
    changed(adapter, peft_type="PROMPT_TUNING", task_type="CAUSAL_LM", num_virtual_tokens=4)
    save_file({"prompt_embeddings": torch.zeros(4, 32)}, adapter / "adapter_model.safetensors")


def of(model: str | None) -> Callable[[Path], None]:
    """Say that an adapter is for that model; "" for itself."""
    return lambda adapter: changed(
        adapter, base_model_name_or_path=str(adapter) if model == "" else model
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: (a / "adapter_model.safetensors").unlink(), "holds no adapter_model"),
        (lambda a: changed(a, target_modules=["c_attn"]), "an adapter of peft .*c_attn"),
        (lose_a_layer, r"differ in \d+ tensors .*layers\.1"),
        (of_a_prompt, "is an adapter of PROMPT_TUNING, which is no change of weights"),
        (of(None), "names no model, expected base_model_name_or_path"),
        (of("./not/here"), "is for ./not/here, which is not found"),
        (of(""), "which has an adapter itself"),
        (lambda a: (a / "adapter_config.json").write_text("{"), "names no model"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(adapter: Path, damage, message: str) -> None:
    damage(adapter)
    with pytest.raises(CheckpointError, match=message):
        load_model(str(adapter), device="cpu", dtype="fp32")


def test_an_adapter_needs_peft(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(CheckpointError, match=r"peft, which is not installed; .*\[adapters\]"):
        load_model(str(adapter), device="cpu", dtype="fp32")


# Every way of opening a model proves that each tensor came from the file.


NORM = "model.layers.1.input_layernorm.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda state: state.pop(NORM), NORM),
    "short": (lambda state: state.update({NORM: state[NORM][:-1]}), NORM),
    "one layer more": (
        lambda state: state.update({NORM.replace(".1.", ".2."): state[NORM].clone()}),
        r"layers\.2\.input",
    ),
    "another dimension": (lambda state: state.update({NORM: state[NORM][None]}), NORM),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model in every form in which a model is opened."""
    place = tmp_path_factory.mktemp("opened")
    save_tiny(place / "plain", "llama", hidden_size=64, intermediate_size=96)
    methods = {"two schemes": "q2a4", "one scheme": "q4a4"}
    for name, preset in methods.items() if find_spec("compressed_tensors") else ():
        student = load_model(str(place / "plain"), device="cpu", dtype="fp32")
        exported(student, "compressed-tensors", preset, place / f"packed {preset}", place / name)
    checkpoint(place / "gptq", {"quant_method": "gptq", "bits": 4}, gptq(4, 1, shuffles=False)[0])
    checkpoint(place / "awq", {"quant_method": "awq", "bits": 4}, awq()[0])
    return place


FORMS = ("plain", "streamed", "packed q2a4", "one scheme", "two schemes", "gptq", "awq")


@pytest.mark.parametrize(("form", "harm"), covering(FORMS, DAMAGES))
def test_every_tensor_came_from_the_file(opened, tmp_path, form: str, harm: str, capfd) -> None:
    found = opened / form.replace("streamed", "plain")
    if not found.exists():
        pytest.skip("compressed-tensors is not installed")
    source, (change, said) = shutil.copytree(found, tmp_path / "in"), DAMAGES[harm]
    folder = tmp_path if form == "streamed" else None
    load_model(str(source), device="cpu", dtype="fp32", folder=folder)
    with edited(source, "model.safetensors") as state:
        change(state)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(str(source), device="cpu", dtype="fp32", folder=folder)
    assert "\n" not in str(caught.value) and "LOAD REPORT" not in capfd.readouterr().err


def test_every_tensor_of_a_gguf_file_is_there(opened: Path, tmp_path: Path, capfd) -> None:
    pytest.importorskip("gguf")
    student = load_model(str(opened / "plain"), device="cpu", dtype="fp32")
    exported(student, "gguf", "q4a4", tmp_path / "packed", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.gguf")
    data = path.read_bytes()
    load_model(str(path), device="cpu")
    for name in (b"blk.1.attn_norm.weight", b"blk.1.ffn_up.weight", b"token_embd.weight"):
        path.write_bytes(data.replace(name, name[:-6] + b"wrong!"))
        with pytest.raises(CheckpointError, match="misses 1 tensors") as caught:
            load_model(str(path), device="cpu")
        assert "\n" not in str(caught.value) and "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("part", "form"),
    covering(["weight_packed", "weight_scale", "weight_shape"], ["one scheme", "two schemes"]),
)
def test_every_part_of_compressed_tensors_is_there(opened, tmp_path, form, part, capfd) -> None:
    pytest.importorskip("compressed_tensors")
    source = shutil.copytree(opened / form, tmp_path / "in")
    with edited(source, "model.safetensors") as state:
        del state[f"model.layers.1.mlp.up_proj.{part}"]
    with pytest.raises(CheckpointError, match=r"up_proj|whose parts are missing"):
        load_model(str(source), device="cpu")
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_tied_weights_and_tensors_of_others_are_no_fault(tmp_path: Path, caplog) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    with edited(tmp_path, "model.safetensors") as state:
        state["score.weight"] = torch.ones(2)
    load_model(str(tmp_path), device="cpu")
    assert "holds 1 tensors that LlamaForCausalLM does not use (such as score.w" in caplog.text


def test_masks_that_older_releases_saved_are_no_fault(tmp_path: Path) -> None:
    families.saved("GPTNeoForCausalLM", tmp_path)
    attention = "transformer.h.0.attn.attention"
    masks = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
    named = {f"{attention}.{name}": mask for name, mask in masks.items()}
    with edited(tmp_path, "model.safetensors") as state:
        state |= named
    load_model(str(tmp_path), device="cpu")


def test_a_bias_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    tiny_model("llama", attention_bias=True).save_pretrained(tmp_path)
    with edited(tmp_path) as values:
        values["attention_bias"] = False
    with pytest.raises(CheckpointError, match=r"8 tensors of its layers .*k_proj\.bias"):
        load_model(str(tmp_path), device="cpu")


def test_images_and_text_are_whole_too(tmp_path: Path) -> None:
    families.saved("Gemma3ForConditionalGeneration", tmp_path)
    name = next(n for n in load_file(tmp_path / "model.safetensors") if "vision" in n)
    load_model(str(tmp_path), device="cpu")
    with edited(tmp_path, "model.safetensors") as state:
        del state[name]
    with pytest.raises(CheckpointError, match="misses 1 tensors"):
        load_model(str(tmp_path), device="cpu")


def test_an_adapter_gives_all_of_its_weights(adapter: Path) -> None:
    changed(adapter, target_modules=["q_proj"])  # and its weights of down_proj would be left out
    with pytest.raises(CheckpointError, match=r"differ in 4 tensors .*down_proj"):
        load_model(str(adapter), device="cpu", dtype="fp32")


@pytest.mark.parametrize("setting", [{"megatron_config": {"a": 1}}, {"megatron_core": "evil"}])
def test_an_adapter_has_nothing_imported(adapter, tmp_path, setting: dict, monkeypatch) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    changed(adapter, **setting)
    with pytest.raises(CheckpointError, match=f"sets {next(iter(setting))}="):
        load_model(str(adapter), device="cpu", dtype="fp32")


def test_a_pattern_of_an_adapter_ends(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(adapter, target_modules=r".*\.(q_proj|down_proj)")
    load_model(str(adapter), device="cpu", dtype="fp32")
    monkeypatch.setattr("qat.patterns.TRY_S", 0.5)
    changed(adapter, target_modules=r"(\w+\.?)+!")
    with pytest.raises(CheckpointError, match=r"take longer than 0.5 s to match"):
        load_model(str(adapter), device="cpu", dtype="fp32")


def harmed(part: str, tensor: Tensor) -> dict[str, Tensor]:
    """A part of a packed weight with every wrong shape and dtype."""
    last = tensor.ndim - 1
    found = {
        "cut": tensor[:-1],
        "narrow": tensor.narrow(last, 0, tensor.shape[last] - 1),
        "long": torch.cat([tensor, tensor]),
        "wide": torch.cat([tensor, tensor], last),
        "turned": tensor.T if last else tensor[None],
        "deep": tensor[None],
        "flat": tensor.flatten() if last else tensor.sum(),
        "number": tensor.flatten()[0],
        "empty": tensor[:0],
        "bytes": tensor.to(torch.uint8),
        "doubles": tensor.double(),
    }
    if found["turned"].shape == tensor.shape:
        del found["turned"]
    if part != "g_idx":
        found["int64"] = tensor.long()
    else:
        found |= {"negative": tensor - 1, "beyond": tensor + 1}
    return found


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_parts_that_do_not_fit_each_other_are_one_line(method: str, part: str, tmp_path) -> None:
    linear = awq()[0] if method == "awq" else gptq(4, 1, shuffles=True)[0]
    linear.setdefault("g_idx", torch.arange(64).int() // GROUP)
    settings = {"quant_method": method, "bits": 4, "group_size": GROUP}
    for harm, tensor in harmed(part, linear[part]).items():
        folder = tmp_path / harm
        folder.mkdir()
        save_file({f"up.{k}": t for k, t in linear.items() if k != part}, folder / "a.safetensors")
        save_file({f"up.{part}": tensor.contiguous()}, folder / "b.safetensors")
        with pytest.raises(CheckpointError, match="the parts of up do not fit each other") as said:
            float_state(folder, settings)
        assert "\n" not in str(said.value), harm


@pytest.mark.parametrize(
    ("setting", "said", "method"),
    [
        ({"group_size": 10**18}, "group_size=1000000000000000000 for 64 inputs", "gptq"),
        ({"group_size": "16"}, "group_size='16'", "awq"),
        ({"group_size": 32}, "group_size=32", "gptq"),
        ({"bits": 4.0}, r"weights of 4\.0 bits", "awq"),
        ({"bits": 10**18}, "weights of 1000000000000000000 bits", "gptq"),
        ({"bits": [4]}, r"weights of \[4\] bits", "awq"),
    ],
)
def test_settings_that_fit_no_parts_are_one_line(method, setting, said, tmp_path) -> None:
    linear = awq()[0] if method == "awq" else gptq(4, 1, shuffles=False)[0]
    save_file({f"up.{k}": t for k, t in linear.items()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=said):
        float_state(tmp_path, {"quant_method": method, "bits": 4, **setting})


# Numbers and patterns of others are bounded before they are used.


@pytest.mark.parametrize(
    "settings", ["gptq", ["awq"], 3, {"quant_method": "compressed-tensors", "config_groups": 7}]
)
def test_a_quantization_that_is_no_table_is_one_line(settings: object, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", settings, gptq(4, 1, shuffles=False)[0])
    with pytest.raises(CheckpointError) as said:
        load_model(source, device="cpu")
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(("form", "key"), [("one scheme", "ignore"), ("two schemes", "targets")])
def test_a_pattern_of_a_quantization_ends(opened, tmp_path, form, key, monkeypatch) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setattr("qat.patterns.TRY_S", 0.5)
    source = shutil.copytree(opened / form, tmp_path / "in")
    with edited(source) as config:
        settings = config["quantization_config"]
        place = settings if key == "ignore" else next(iter(settings["config_groups"].values()))
        place[key] = [r"re:(\w+\.?)+!"]
    with pytest.raises(CheckpointError, match=r"take longer than 0.5 s to match"):
        load_model(str(source), device="cpu")


@pytest.mark.parametrize(
    ("key", "said", "folder"),
    [
        ("num_hidden_layers", "num_hidden_layers=10+, expected at most 4,096", False),
        ("vocab_size", "vocab_size=10+, expected at most", True),
        ("hidden_size", "hidden_size=10+, expected at most", False),
    ],
)
def test_a_configuration_of_hostile_numbers_is_refused(key, said, folder, tmp_path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with edited(tmp_path) as values:
        values[key] = 10**18
    with pytest.raises(CheckpointError, match=said):
        load_model(str(tmp_path), device="cpu", folder=tmp_path if folder else None)


def test_a_configuration_of_more_weights_than_the_files_hold_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with edited(tmp_path) as values:
        values["vocab_size"] = 2**28
    with pytest.raises(CheckpointError, match="describes 17,1.* weights and holds .* bytes"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("size", [10**18, 2**62 + 1])
def test_a_hostile_group_size_of_a_packed_checkpoint_is_refused(opened, size, tmp_path) -> None:
    pytest.importorskip("compressed_tensors")
    source = shutil.copytree(opened / "packed q4a4", tmp_path / "in")
    with edited(source) as config:
        next(iter(config["quantization_config"]["modules"].values()))["group_size"] = size
    with pytest.raises(CheckpointError, match="group_size"):
        load_model(str(source), device="cpu")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (struct.pack("<QQ", 2**62, 0), "4611686018427387904 tensors where 0 bytes are left"),
        (struct.pack("<QQ", 0, 2**62), "4611686018427387904 pairs of key"),
        (struct.pack("<QQQ", 0, 1, 2**62) + bytes(99), "letters where"),
        (
            struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 0, 2**62) + bytes(99),
            "elements of an array where",
        ),
        (struct.pack("<QQQ1sII", 1, 0, 1, b"a", 99, 1) + bytes(99), "99 dimensions"),
    ],
)
def test_a_gguf_header_counts_what_lies_in_the_file(body: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body)
    with pytest.raises(CheckpointError, match=said):
        load_model(str(path), device="cpu")
