"""Target torchao: inputs of kind int8-asymmetric are those of its own configuration."""

from pathlib import Path

import pytest
import torch
from quantized import tiny_quantized, with_rounded_inputs

from qat.convert.shipping import Shipping
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.export.parts import reloaded
from qat.export.targets import check_model
from qat.extensions.targets import torchao
from qat.models.checkpoint import save_checkpoint
from qat.nn.quant_linear import quant_linears
from qat.quant.spec import PRESETS, LutSpec

pytest.importorskip("torchao")
SEQ2 = LutSpec(bits=2, codebook="seq", group_size=16, scale_bits=8)


@pytest.mark.parametrize(
    ("codebook", "bits", "dtype"),
    [("seq", 4, "bf16"), ("int", 4, "fp32"), ("ternary", 2, "bf16"), ("int", 8, "fp32")],
)
def test_torchao_computes_our_logits_of_rounded_inputs(codebook, bits, dtype, tmp_path) -> None:
    spec = LutSpec(bits=bits, codebook=codebook, group_size=16, scale_bits=8)
    model = with_rounded_inputs(tiny_quantized("qwen3", spec), "int8-asymmetric")
    save_checkpoint(model, None, tmp_path / "student")
    config = ExportConfig(to="torchao", dtype=dtype)
    report = export_model(str(tmp_path / "student"), config, tmp_path / "out")
    assert report.logits_max_diff == 0
    assert "Int8DynamicActivationIntxWeightConfig" in (tmp_path / "out/config.json").read_text()
    read = reloaded(model, tmp_path / "out", dtype="auto")
    for name, linear in quant_linears(model).items():
        weight = read.get_submodule(name).weight
        assert weight.activation_quantization == torchao.READS_INT8
        assert torch.equal(weight.dequantize(), linear.quantized_weight(weight.dtype))


@pytest.mark.parametrize("kind", ["int8", "int8-static", "fp8"])
def test_other_inputs_are_refused(kind: str) -> None:
    said = rf"its input is quantized \({kind}\), expected one in floating point or int8-asymmetric"
    model = with_rounded_inputs(tiny_quantized("qwen3", SEQ2), kind)
    with pytest.raises(ExportError, match=f"torchao cannot hold .*{said}; convert the model with"):
        check_model("torchao", model)
    plan = PRESETS["q2a4"].with_activation(kind)
    with pytest.raises(ExportError, match=f"torchao cannot hold plan q2a4_.*{said}"):
        Shipping({"torchao": torchao}).plan(plan, tiny_quantized("qwen3", SEQ2))


def test_a_zero_token_is_a_zero(tmp_path: Path) -> None:
    """The scale that torchao gives a token of zeros is the smallest number, not zero."""
    model = with_rounded_inputs(tiny_quantized("qwen3", SEQ2), "int8-asymmetric")
    torchao.write(model, None, tmp_path)
    read = reloaded(model, tmp_path, dtype="auto")
    name, linear = next(iter(quant_linears(model).items()))
    x = torch.zeros(2, linear.in_features)
    x[1] = torch.linspace(-1, 1, linear.in_features)
    with torch.no_grad():
        assert torch.equal(read.get_submodule(name)(x), linear(x))
