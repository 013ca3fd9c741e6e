"""Target coreml: static inputs are `quantize` and `dequantize`, by definition our own rounding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from quantized import SAME_INPUT, random_weight, tiny_quantized, with_rounded_inputs
from tiny import tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.convert.shipping import Shipping
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.dense import dense_state_dict
from qat.export.model import check_equal, export_model
from qat.export.parts import float_model, logits_of, probe_ids, quantize_inputs
from qat.export.targets import check_model, ships_to
from qat.extensions.targets import coreml
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.stored_state import quantized_modules
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import put_table
from qat.quant.activation import quantize_static
from qat.quant.spec import PRESETS, ActivationKind, LutSpec

pytest.importorskip("coremltools")
from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.frontend.milproto.load import load  # noqa: E402
from coremltools.converters.mil.mil import Function, Operation  # noqa: E402
from coremltools.models import MLModel  # noqa: E402

from qat.extensions.targets.coreml_program import OPSET  # noqa: E402

# coremltools leaves temporary directories to their finalizers
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")

LUT4 = LutSpec(bits=4, group_size=16, scale_bits=8, level_bits=16)
INT4 = LutSpec(bits=4, codebook="int", group_size=32, scale_bits=8)
INT8 = LutSpec(bits=8, codebook="int", group_size=32, scale_bits=8)
TO = Shipping({"coreml": coreml})


def student(
    kind: ActivationKind = "int8-static", spec: LutSpec = LUT4, scale_bits: int = 16
) -> PreTrainedModel:
    """One layer whose linears and tied head round what they read."""
    model = tiny_quantized("qwen3", spec, num_hidden_layers=1, tie_word_embeddings=True)
    table = random_weight(*model.model.embed_tokens.weight.shape, INT4)
    put_table(model, "model.embed_tokens", table, INT4)
    return with_rounded_inputs(model, kind, scale_bits)


def operations(directory: Path) -> list[Operation]:
    package = MLModel(str(directory / coreml.FILE_NAME), skip_model_load=True)
    spec = package.get_spec()
    program = load(spec, spec.specificationVersion, file_weights_dir=package.weights_dir)
    (main,) = program.functions.values()
    return main.operations


def test_inputs_are_rounded_with_our_scales(tmp_path: Path) -> None:
    for dtype, scale_bits in (("fp32", 32), ("fp32", 16), ("fp16", 16)):
        check_inputs(dtype, scale_bits, tmp_path / f"{dtype}_{scale_bits}")


def check_inputs(dtype: str, scale_bits: int, tmp_path: Path) -> None:
    """The program quantizes and dequantizes what each linear reads, with its own scale."""
    save_checkpoint(student(scale_bits=scale_bits), None, tmp_path / "student")
    config = ExportConfig(to="coreml", dtype=dtype)
    report = export_model(str(tmp_path / "student"), config, tmp_path / "out")
    assert report.dtype == f"float{dtype[2:]}" and report.logits_max_diff < 0.2
    if dtype == "fp32":
        assert report.logits_max_diff < 1e-4
    modules = quantized_modules(load_checkpoint(tmp_path / "student"))
    found = operations(tmp_path / "out")
    linears = {op.weight.op.name: op.x.op for op in found if op.op_type == "linear"}
    for name, module in modules.items():
        back = linears.pop(f"{name}.weight".replace(".", "_"))
        to = back.input.op
        assert (to.op_type, back.op_type) == ("quantize", "dequantize")
        assert to.output_dtype.val == "int8" and to.axis is None and back.axis is None
        assert to.zero_point is None and back.zero_point is None
        for part in (to, back):
            assert part.scale.val == module.activation.scale.item()
            assert part.scale.val.dtype == f"float{dtype[2:]}"
    assert not linears
    # queries, keys and values read the same levels, and so do gates and ups
    assert len([op for op in found if op.op_type == "quantize"]) == len(modules) - len(SAME_INPUT)


def inferred(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return the value that coremltools infers for the two operations."""
    with Function({}, opset_version=OPSET):
        levels = mb.quantize(input=x, scale=scale, output_dtype="int8")
        return mb.dequantize(input=levels, scale=scale).op.materialized_val_inference()


def defined(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """`clip(round(input / scale) + zero_point)`, as coremltools documents it, times the scale;
    numpy rounds halves to even."""
    return np.clip(np.round(x / scale), -128, 127) * scale


def test_the_operations_are_our_rounding_by_definition() -> None:
    for is_half in (False, True):
        for scale in (0.0123, 0.1, 0.25, 0.046875):
            torch.manual_seed(0)
            step = torch.tensor(scale)
            halves = torch.arange(-140, 140) + 0.5
            x = torch.cat([torch.randn(10_000) * step * 60, halves * step])
            if is_half:  # what a program in float16 reads
                x, step = x.half().float(), step.half().float()
            theirs = inferred(x.numpy(), np.float32(step))
            ours = quantize_static(x, step)
            assert np.array_equal(theirs, defined(x.numpy(), np.float32(step)))
            differs = theirs != ours.numpy()
            is_exact = is_half or step.log2().frac() == 0
            if is_exact:
                assert not differs.any()
            # it divides where training multiplies by the reciprocal: of what lies beside a half
            beside = ((x / step).abs() % 1 - 0.5).abs() < 1e-4
            assert not differs[~beside.numpy()].any()
            assert np.abs(theirs - ours.numpy()).max() <= 1.001 * scale


def test_ranges_of_each_token_are_refused(tmp_path: Path) -> None:
    kinds: tuple[ActivationKind, ...] = ("int8", "int8-asymmetric", "fp8")
    for kind in kinds:
        check_refused(kind, tmp_path / kind)


def check_refused(kind: ActivationKind, tmp_path: Path) -> None:
    """A student and a plan with such inputs are refused by reason."""
    said = rf"its input is quantized \({kind}\), expected one in floating point or int8-static, who"
    model = student(kind, scale_bits=32)
    with pytest.raises(ExportError, match=f"coreml cannot hold .*{said}se range is fixed; conv"):
        check_model("coreml", model)
    save_checkpoint(model, None, tmp_path / "student")
    assert ships_to(tmp_path / "student")["coreml"].reason == f"its input is quantized ({kind})"
    with pytest.raises(ExportError, match=f"coreml cannot hold plan q4a4_.*{said}"):
        TO.plan(PRESETS["q4a4"].with_activation(kind), tiny_model())


def test_a_conversion_for_core_ml_has_scales_that_float16_holds(tmp_path: Path) -> None:
    plan = TO.plan(PRESETS["q4a4"].with_activation("int8-static"), tiny_model())
    assert plan.name == "q4a4_a8s_coreml"
    assert {rule.activation.scale_bits for rule in plan.rules} == {16}
    plain = TO.plan(PRESETS["q4a4"], tiny_model())
    assert plain.activations == {None}
    save_checkpoint(student(scale_bits=32), None, tmp_path / "student")
    with pytest.raises(ExportError, match=r"activation.scale holds 0\.012.* fp16"):
        config = ExportConfig(to="coreml", dtype="fp16")
        export_model(str(tmp_path / "student"), config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_scales_are_noticed(tmp_path: Path) -> None:
    model = student()
    coreml.write(model, None, tmp_path)
    assert check_equal("coreml", model, tmp_path) < 1e-4
    with torch.no_grad():
        quant_linears(model)["model.layers.0.mlp.down_proj"].activation.scale *= 1.01
    with pytest.raises(ValueError, match="other scales"):
        coreml.read_logits(model, tmp_path, probe_ids(model))


def test_sums_in_another_order_are_believed_and_other_logits_are_not(
    tmp_path: Path, monkeypatch
) -> None:
    """Rounded inputs swallow the noise of the layers, but not that of the head."""
    for spec in (LUT4, INT8):
        with monkeypatch.context() as patch:
            check_order(spec, tmp_path, patch)


def check_order(spec: LutSpec, tmp_path: Path, monkeypatch) -> None:
    """Logits off by some last digits pass; scaled, moved and shifted ones do not."""
    model = student(spec=spec)
    with torch.no_grad():
        for linear in quant_linears(model).values():
            linear.scales /= 64
    right = float_model(model, dense_state_dict(model, torch.float32), torch.float32)
    quantize_inputs(right, model)
    logits = logits_of(right, probe_ids(model))
    ulps = torch.randint(-8, 9, logits.shape) * torch.finfo(torch.float32).eps
    monkeypatch.setattr(coreml, "read_logits", lambda *_: logits * (1 + ulps))
    assert 0 < check_equal("coreml", model, tmp_path) < 1e-4
    for wrong in (logits * 1.01, logits.roll(1, 1), logits + 0.1):
        monkeypatch.setattr(coreml, "read_logits", lambda *_, wrong=wrong: wrong)
        with pytest.raises(ExportError, match="other logits"):
            check_equal("coreml", model, tmp_path)


def test_what_is_not_rounded_is_read_as_it_is(tmp_path: Path) -> None:
    model = student()
    linears = quant_linears(model)
    linears["model.layers.0.self_attn.q_proj"].activation = None
    coreml.write(model, None, tmp_path)
    found = operations(tmp_path)
    kinds = {op.weight.op.name: op.x.op.op_type for op in found if "linear" in op.op_type}
    plain = {name for name, kind in kinds.items() if kind != "dequantize"}
    assert plain == {"model_layers_0_self_attn_q_proj_weight"}
    stored = [np.shape(op.val.val)[:3] for op in found if op.op_type == "const"]
    # cosines, sines and the mask, which all layers share
    assert stored.count((1, 1, coreml.length_of(model))) == 3
    check_equal("coreml", model, tmp_path)


def test_a_program_of_8_bits_on_both_sides(tmp_path: Path) -> None:
    model = student(spec=INT8)
    with torch.no_grad():
        for linear in quant_linears(model).values():
            linear.scales /= 64
    coreml.write(model, None, tmp_path)
    assert check_equal("coreml", model, tmp_path) < 1e-4
    found = operations(tmp_path)
    weights = [op.weight.op for op in found if op.op_type == "linear"]
    kinds = [w.data.val.dtype.name if "scale" in w.op_type else None for w in weights]
    assert kinds == ["int8"] * 7 + [None]  # the head has a table, and its scales lie behind it


class HalfAngles(nn.Module):
    """Rotary positions as a program in float16 holds them."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.half().float() for part in self.rotary(x, position_ids))


def test_a_program_in_float16_is_off_by_its_constants_alone(tmp_path: Path) -> None:
    made = student()
    made.model.embed_tokens.activation = None  # its rounding would hide what is smaller
    with torch.no_grad():
        for linear in quant_linears(made).values():
            linear.scales *= 4
    save_checkpoint(made, None, tmp_path / "student")
    model = load_checkpoint(tmp_path / "student", torch.float16)
    coreml.write(model, None, tmp_path)
    ids = probe_ids(model)
    plain = float_model(model, dense_state_dict(model, torch.float16), torch.float32)
    quantize_inputs(plain, model)
    found, before = coreml.read_logits(model, tmp_path, ids), logits_of(plain, ids)
    plain.model.rotary_emb = HalfAngles(plain.model.rotary_emb)
    for module in plain.modules():
        for name in ("variance_epsilon", "scaling"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, float(np.float16(getattr(module, name))))
    after = logits_of(plain, ids)
    torch.testing.assert_close(found, after, rtol=0, atol=1e-4)
    assert (found - before).abs().max() > 10 * (found - after).abs().max()
