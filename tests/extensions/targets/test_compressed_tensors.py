"""Target compressed-tensors: how inputs are rounded stands in the file, and is read again."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from quantized import tiny_quantized, with_rounded_inputs
from safetensors.torch import load_file
from transformers import PreTrainedModel

from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import check_equal, export_model
from qat.export.parts import logits_of, probe_ids, reloaded
from qat.extensions.targets.compressed_tensors import read_logits, write
from qat.models.checkpoint import save_checkpoint
from qat.nn.quant_linear import quant_linears
from qat.quant.spec import ACTIVATION_KINDS, LutSpec

pytest.importorskip("compressed_tensors", exc_type=ImportError)
INT4 = LutSpec(bits=4, codebook="int", group_size=32, scale_bits=8)


def student(kind: str, **shape: object) -> PreTrainedModel:
    return with_rounded_inputs(tiny_quantized("qwen3", INT4, **shape), kind)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*zip(ACTIVATION_KINDS, itertools.cycle(["fp32", "bf16"]))]
)
def test_inputs_are_rounded_as_the_configuration_says(kind: str, dtype: str, tmp_path) -> None:
    model = student(kind)
    save_checkpoint(model, None, tmp_path / "student")
    config = ExportConfig(to="compressed-tensors", dtype=dtype)
    report = export_model(str(tmp_path / "student"), config, tmp_path / "out")
    assert report.logits_max_diff == 0
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = said["config_groups"].values()
    inputs = group["input_activations"]
    assert inputs["symmetric"] == (kind != "int8-asymmetric")
    assert inputs["dynamic"] == (inputs["strategy"] == "token") == (kind != "int8-static")
    assert inputs["type"] == ("float" if kind == "fp8" else "int") and inputs["num_bits"] == 8
    scales = load_file(tmp_path / "out" / "model.safetensors")
    for name, linear in quant_linears(model).items():
        scale = scales.get(f"{name}.input_scale")
        assert (scale is None) == (kind != "int8-static")
        assert scale is None or torch.equal(scale[0], linear.activation.scale)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_the_librarys_own_rounding_is_ours_but_for_its_symmetric_scale(kind: str, tmp_path) -> None:
    model = student(kind, num_hidden_layers=1)
    write(model, None, tmp_path)
    ids = probe_ids(model)
    theirs = logits_of(reloaded(model, tmp_path, dtype=torch.float32), ids)
    ours = read_logits(model, tmp_path, ids)
    assert torch.equal(ours, logits_of(model, ids))
    distance = ((theirs - ours).norm() / ours.norm()).item()
    # of a token it takes amax / 127.5, where vLLM's kernels take amax / 127
    assert distance < (0.1 if kind == "int8" else 1e-5)
    assert (distance > 1e-3) == (kind == "int8")


def test_another_rounding_is_noticed(tmp_path: Path) -> None:
    model = student("int8")
    write(model, None, tmp_path)
    assert check_equal("compressed-tensors", model, tmp_path) == 0
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"type": "int"', '"type": "float"', 1))
    with pytest.raises(ExportError, match="other logits"):
        check_equal("compressed-tensors", model, tmp_path)
