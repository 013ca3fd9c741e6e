"""Target executorch: which weights XNNPACK holds, and a program that computes our logits.

What runs a program needs ExecuTorch: `.ci/engine executorch` installs it and runs these.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quantized import frozen_linear, tiny_quantized, with_rounded_inputs
from tiny import tiny_model, tiny_tokenizer
from torch import nn

from qat.convert.quantize import quantize_model
from qat.convert.shipping import Shipping
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import check_equal, export_model
from qat.export.parts import DtypeError, logits_of, probe_ids
from qat.export.targets import check_model
from qat.extensions.targets import executorch, mlx
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import table_names, with_tables
from qat.quant.activation import HIGHEST, LOWEST, Levels, token_levels
from qat.quant.spec import PRESETS, LutSpec, PlanRule, QuantPlan

TO = Shipping({"executorch": executorch})
INT4 = LutSpec(bits=4, codebook="int", group_size=32, scale_bits=8)
SEQ2 = LutSpec(bits=2, codebook="seq", group_size=64, scale_bits=8)
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
needs_executorch = pytest.mark.skipif(
    find_spec("executorch") is None, reason="needs ExecuTorch: bash .ci/engine executorch"
)


def test_levels_are_integers_of_xnnpack() -> None:
    for codebook, bits, size, scale_bits, held in (
        ("int", 4, 32, 8, 4),
        ("int", 2, 64, 8, 4),
        ("ternary", 2, 32, 8, 4),
        ("seq", 3, 32, 8, 4),
        ("seq", 1, 96, 8, 4),
        ("seq", 4, 32, 8, None),
        ("seq", 4, 96, 8, 8),
        ("int", 4, 16, 8, None),
        ("int", 4, 32, 16, None),
        ("int", 8, 96, 16, 8),
        ("int", 5, 32, 8, None),
        ("seq", 7, 96, 16, 8),
        ("seq", 8, 96, 16, None),
    ):
        spec = LutSpec(bits=bits, codebook=codebook, group_size=size, scale_bits=scale_bits)
        shape = (8, 192 if size == 64 else 96)
        assert executorch.stored_bits(spec, shape[1]) == held
        lost = executorch.lost(spec, shape)
        assert (lost is None) == (held is not None)
        bent = executorch.scheme(spec, shape)
        assert executorch.lost(bent, shape) is None and bent.bits == bits
        if held is None:
            said = f"{codebook} of {bits} bits in groups of {size} with scales of {scale_bits} bits"
            assert lost.startswith(said)
        if held is None or find_spec("torchao") is None:
            continue
        linear = frozen_linear(8, shape[1], spec)
        tensor = executorch._tensor("it", linear)
        assert torch.equal(tensor.dequantize(), linear.quantized_weight())
        assert tensor.target_dtype == getattr(torch, f"int{held}") and not tensor.zero_point.any()


def test_for_executorch_rounds_inputs_as_xnnpack_does_or_not_at_all() -> None:
    model = tiny_model(**SHAPE)
    plan = TO.plan(PRESETS["q2a4"], model)
    assert plan.name == "q2a4_executorch"
    assert {rule.activation for rule in plan.rules} == {None}
    assert {(rule.spec.codebook, rule.spec.bits) for rule in plan.rules} == {("seq", 2), ("int", 4)}
    plan = TO.plan(PRESETS["q2a4"].with_activation("int8-asymmetric"), model)
    assert {rule.activation.kind for rule in plan.rules} == {"int8-asymmetric"}
    with pytest.raises(ExportError, match=r"\(int8\), .*int8-asymmetric"):
        TO.plan(PRESETS["q2a4"].with_activation("int8"), model)
    both = Shipping({**TO.targets, "mlx": mlx}).plan(PRESETS["q2a4"], model)
    assert {rule.activation for rule in both.rules} == {None}


def test_what_it_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = tiny_quantized("llama", INT4, **SHAPE)
    check_model("executorch", model)
    with_rounded_inputs(model, "int8-asymmetric")
    check_model("executorch", model)
    other = with_rounded_inputs(tiny_quantized("llama", INT4, **SHAPE), "int8")
    with pytest.raises(ExportError, match=r"quantized \(int8\), expected .*int8-asymmetric"):
        check_model("executorch", other)
    with pytest.raises(DtypeError, match="bf16, .*--dtype fp32"):
        executorch.write(model.__class__(model.config).bfloat16(), None, tmp_path)
    model.config.model_type = "other"
    with pytest.raises(ExportError, match="model_type=other"):
        check_model("executorch", model)


@pytest.mark.slow
@needs_executorch
@pytest.mark.filterwarnings("ignore")  # what its modules do as they are imported
@pytest.mark.parametrize(
    ("inputs", "tables", "is_tied", "most"),
    [("int8-asymmetric", None, False, 1e-2), (None, INT4, True, 1e-5), (None, SEQ2, False, 1e-5)],
)
def test_a_program_computes_our_logits(inputs, tables, is_tied, most, tmp_path: Path) -> None:
    """Groups and rows, a prompt and then a token at a time; another model's are noticed."""
    model = tiny_model("llama", initializer_range=0.2, tie_word_embeddings=is_tied, **SHAPE)
    rows = LutSpec(bits=8, codebook="int", group_size=96)
    plan = QuantPlan(
        name="mixed",
        rules=(
            PlanRule(pattern="*.down_proj", spec=rows),
            PlanRule(role="mlp", spec=LutSpec(bits=2, codebook="ternary")),
            *PRESETS["q2a4"].rules,
        ),
    )
    plan = plan.with_activation(inputs) if inputs else plan
    if tables is not None:
        plan = with_tables(plan, model, dict.fromkeys(table_names(model), tables))
    quantize_model(LanguageModel(model), TO.plan(plan, model))
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "student")
    out = tmp_path / "out"
    report = export_model(str(tmp_path / "student"), ExportConfig(to="executorch"), out)
    assert report.logits_max_diff < 1e-4 and report.dtype == "float32"
    assert report.bytes == (out / executorch.FILE_NAME).stat().st_size
    ids = torch.arange(100)[None] * 7 % 320
    student = load_checkpoint(tmp_path / "student", torch.float32)
    found, expected = executorch.read_logits(student, out, ids), logits_of(student, ids)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert ((found - expected).norm() / expected.norm()).item() < most
    again = executorch.read_logits(student, out, probe_ids(student))  # what it keeps is overwritten
    torch.testing.assert_close(again, logits_of(student, probe_ids(student)), rtol=0, atol=1e-4)
    with torch.no_grad():
        next(iter(quant_linears(student).values())).scales *= 1.25
    with pytest.raises(ExportError, match="gives other logits"):
        check_equal("executorch", student, out)


class _Read(nn.Module):
    """A model that returns a linear's input as XNNPACK rounds it: table rows times an identity."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        from torchao.quantization import IntxUnpackedToInt8Tensor

        self.length, width = rows.shape
        self.table = nn.Embedding.from_pretrained(rows)
        self.linear = nn.Linear(width, width, bias=False)
        one = torch.eye(width, dtype=torch.int8), torch.ones(width, 1)
        zeros = torch.zeros(width, 1, dtype=torch.int8)
        form = torch.int8, (1, width), torch.float32, "int8_asym_per_token"
        weight = IntxUnpackedToInt8Tensor(*one, zeros, *form)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(tokens))


def xnnpack_levels(x: torch.Tensor) -> Levels:
    """Each token of `x` `(..., I)` float32 as XNNPACK rounds it: it divides once, by the range."""
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    span = torch.tensor(float(HIGHEST - LOWEST))  # a number over a tensor is no one division
    inverse = torch.where(low == high, 1.0, span / (high - low))
    below, above = LOWEST + low * inverse, HIGHEST + high * inverse
    zero = torch.where(below + above > 0, LOWEST - low * inverse, HIGHEST - high * inverse)
    zero = zero.clamp(LOWEST, HIGHEST).round()
    levels = ((x * inverse).round() + zero).clamp(LOWEST, HIGHEST)
    return Levels(levels, inverse.reciprocal(), zero)


@pytest.mark.slow
@needs_executorch
@pytest.mark.filterwarnings("ignore")
def test_xnnpack_divides_once_and_we_twice() -> None:
    """XNNPACK's formula holds to the bit; our level differs only next to a half."""
    from executorch.runtime import Runtime

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 96, generator=generator) * torch.rand(2000, 1, generator=generator)
    rows[0], rows[1], rows[2] = 0, rows[1].abs(), -rows[2].abs()
    rows[3, :4] = torch.tensor([255.0, 0.5, 1.5, 2.5])  # halves
    loaded = Runtime.get().load_program(executorch._lowered(_Read(rows)))
    places = torch.arange(len(rows))
    (found,) = loaded.load_method("forward").execute([places[None], places])
    theirs, ours = xnnpack_levels(rows), token_levels(rows, "int8-asymmetric")
    assert torch.equal(found[0], theirs.values())
    torch.testing.assert_close(ours.scale[1:], theirs.scale[1:], rtol=2**-22, atol=0)
    moved = (ours.levels - ours.zero) - (theirs.levels - theirs.zero)
    assert moved.abs().max() <= 1 and moved.abs().mean() < 1e-4
    scaled = (rows.double() / ours.scale)[moved != 0]
    assert ((scaled - scaled.floor() - 0.5).abs() < 1e-4).all()
