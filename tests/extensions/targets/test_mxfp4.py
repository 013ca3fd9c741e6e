"""E2M1 under powers of two: gpt-oss from its own files into a student and back, and linears."""

import json
from pathlib import Path

import families
import pytest
import torch
from quantized import tiny_quantized
from safetensors.torch import load_file
from torch import Tensor

from qat.cli import run_verb
from qat.errors import ExportError
from qat.extensions.targets import mxfp4
from qat.extensions.targets.snap import find_grid
from qat.models.checkpoint import load_checkpoint
from qat.models.directory import resolve
from qat.models.stored_state import quantized_modules
from qat.nn.quant_linear import quant_linears
from qat.quant.spec import LutSpec
from qat.quant.weight import dequantize

HELD = LutSpec(bits=4, codebook="e2m1", group_size=32, scale_bits=5)


def stored_weights(directory: Path) -> dict[str, Tensor]:
    """Return the experts in the blocks of a checkpoint, `(E, O, I)` each, by the spec's formula."""
    state, found = load_file(directory / "model.safetensors"), {}
    for name in (key.removesuffix("_blocks") for key in state if key.endswith("_blocks")):
        blocks = state[f"{name}_blocks"].long()
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
        scales = torch.exp2(state[f"{name}_scales"].float() - 127)
        found[name] = (torch.tensor(families.FP4)[codes] * scales[..., None]).flatten(2)
    return found


@pytest.mark.slow
def test_gpt_oss_learns_in_its_own_format_and_goes_out_in_it(tmp_path: Path) -> None:
    wished = families.saved_in_mxfp4(tmp_path / "source")
    text = families.texts(tmp_path / "texts.txt")
    student, cache = tmp_path / "student", tmp_path / "cache"
    run_verb(["convert", str(tmp_path / "source"), "--snap", "--out", str(student)])
    modules = quantized_modules(load_checkpoint(student))
    assert modules.keys() == wished.keys() and {m.spec for m in modules.values()} == {HELD}
    for name, module in modules.items():
        assert torch.equal(module.quantized_weight(), wished[name].flatten(0, 1))
    out = ("export", str(student), "--to", "mxfp4", "--dtype", "bf16")
    assert run_verb([*out, "--out", str(tmp_path / "same")])["logits_max_diff"] == 0
    found = stored_weights(tmp_path / "same")
    assert all(torch.equal(found[name], weight) for name, weight in wished.items())

    rows = ("--num-sequences", "24", "--sequence-length", "16", "--format", "plain")
    run_verb(
        ["cache", "--teacher", str(tmp_path / "source"), "--data", str(text), *rows]
        + ["--out", str(cache)]
    )
    steps = ("--batch-size", "2", "--max-steps", "3", "--eval-sequences", "2", "--lr", "0.3")
    learn = ("--learn", "weights,scales", "--lr-scales", "0.3", "--skip-first-eval")
    run = tmp_path / "run"
    run_verb(["train", str(student), "--cache-dir", str(cache), *steps, *learn, "--out", str(run)])
    out = ("export", str(run), "--to", "mxfp4", "--dtype", "bf16", "--out", str(tmp_path / "out"))
    assert run_verb([*out])["logits_max_diff"] == 0
    learned = stored_weights(tmp_path / "out")
    trained = quantized_modules(load_checkpoint(Path(resolve(str(run)))))
    for name, weight in learned.items():
        assert torch.equal(weight.flatten(0, 1), trained[name].quantized_weight())
        assert not torch.equal(weight, wished[name])
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "mxfp4"


@pytest.mark.slow
def test_what_gpt_oss_quantizes_elsewhere_is_a_float_and_all_experts_are_in_blocks(
    tmp_path: Path,
) -> None:
    families.saved("GptOssForCausalLM", tmp_path / "float")
    source, student, out = (str(tmp_path / name) for name in ("float", "student", "out"))
    run_verb(["convert", source, "--to", "q4a4", "--for", "mxfp4", "--out", student])
    said = run_verb(["export", student, "--to", "mxfp4", "--dtype", "fp32", "--out", out])
    assert said["logits_max_diff"] == 0
    state, modules = (
        load_file(tmp_path / "out" / "model.safetensors"),
        quantized_modules(load_checkpoint(tmp_path / "student")),
    )
    attention = {name for name in modules if "self_attn" in name}
    assert len(attention) == 16 and len(stored_weights(tmp_path / "out")) == 8
    for name in attention:
        assert torch.equal(state[f"{name}.weight"].float(), modules[name].quantized_weight())
    plan = tmp_path / "plan.toml"
    rule = '[[rules]]\npattern = "*down_proj"\nspec = { bits = 4 }\n'
    plan.write_text(f'name = "down"\n{rule}')
    half = str(tmp_path / "half")
    run_verb(["convert", source, "--to", str(plan), "--for", "mxfp4", "--out", half])
    with pytest.raises(ExportError, match="gate_up_proj in floating point"):
        run_verb(["export", half, "--to", "mxfp4", "--out", str(tmp_path / "none")])
    mixture = str(tmp_path / "mixture")
    families.saved("Qwen3MoeForCausalLM", tmp_path / "mixture")
    with pytest.raises(ExportError, match="experts of gpt-oss"):
        run_verb(["convert", mixture, "--to", "q4a4", "--for", "mxfp4", "--out", half + "2"])


@pytest.mark.parametrize(("codebook", "bits", "size"), [("e2m1", 4, 64), ("seq", 2, 32)])
def test_compressed_tensors_reads_linears_to_the_bit(codebook, bits, size, tmp_path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    spec = LutSpec(bits=bits, codebook=codebook, group_size=size, scale_bits=5)
    wide = {"hidden_size": 64, "intermediate_size": 128}
    model = tiny_quantized("qwen3", spec, **wide)
    first = quant_linears(model)["model.layers.0.self_attn.q_proj"]
    with torch.no_grad():
        first.scales[0], first.scales[1], first.scales[2] = 0, 2.0**-14, 2.0**9
    mxfp4.write(model, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    state = load_file(tmp_path / "model.safetensors")
    assert {*scheme.targets} == quant_linears(model).keys()
    for name, linear in quant_linears(model).items():
        parts = {part: state[f"{name}.{part}"] for part in ("weight_packed", "weight_scale")}
        found = compressor.decompress(parts, scheme)["weight"].float()
        assert torch.equal(found, linear.quantized_weight())


def test_a_group_of_few_values_gets_the_power_of_two_that_it_was_made_with() -> None:
    scales = torch.exp2(torch.randint(-9, -3, (8, 2, 1)).float())
    weight = (torch.tensor(families.FP4)[torch.randint(16, (8, 2, 32))] * scales).flatten(1)
    weight[0, :32] = torch.tensor([4.0, 2.0, -2.0, 0.0]).repeat(8) * 2.0**-7  # 6, 3 and 0 too
    spec, found = find_grid(weight)
    assert spec.scale_bits == 5 and torch.equal(dequantize(found), weight)
    assert found.scales.by_group()[0, 0] == 2.0**-7
