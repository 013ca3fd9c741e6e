"""Target gptq: which weights the layout holds, its words by the published rule, and a reader.

What reads a directory needs auto-round: `.ci/engine gptq` installs it and runs these.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from coded import SHAPE, even
from quantized import SPECS, frozen_linear
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor

from qat.convert.quantize import quantize_model
from qat.convert.shipping import Shipping
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import check_equal, export_model
from qat.export.parts import DtypeError
from qat.extensions.targets import gptq
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.dequantize import float_state
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import quant_linears
from qat.quant.spec import PlanRule, QuantPlan

TO = Shipping({"gptq": gptq})
HELD = [
    (even("int", 2, 64), 2),
    (even("ternary", 2), 2),
    (even("int", 3), 3),
    (even("int", 4, 16), 4),
    (even("int", 6), 8),
    (even("int", 8, 64), 8),
]
"""Formats with the bits of their codes."""
PLAN = QuantPlan(
    name="mixed",
    rules=(
        PlanRule(pattern="*.down_proj", spec=even("int", 3, 64)),
        PlanRule(pattern="*.gate_proj", spec=even("int", 8)),
        PlanRule(pattern="*.up_proj", spec=even("ternary", 2)),
        PlanRule(pattern="*.q_proj", spec=even("int", 4)),
    ),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
needs_reader = pytest.mark.skipif(
    find_spec("auto_round") is None, reason="needs auto-round: bash .ci/engine gptq"
)


def codes(words: Tensor, bits: int) -> Tensor:
    """The codes in 32-bit words `(n, m)`, by the published rule: bit after bit down a column."""
    places = torch.arange(32)
    stream = (words[:, None].long() >> places[None, :, None] & 1).flatten(0, 1)
    return (stream.unflatten(0, (-1, bits)) << torch.arange(bits)[None, :, None]).sum(1)


def test_words_are_those_of_the_layout() -> None:
    for spec, bits in HELD:
        linear = frozen_linear(32, 192, spec)
        assert gptq.lost(spec, (32, 192)) is None and gptq.stored_bits(spec) == bits
        stored = gptq.packed("it", linear)
        found = codes(stored["qweight"], bits)
        zeros = codes(stored["qzeros"].T, bits).T + 1  # the first version of the layout
        groups = stored["g_idx"].long()
        assert found.shape == (192, 32) and (zeros == 2 ** (bits - 1)).all()
        weight = stored["scales"].double()[groups] * (found - zeros[groups])
        assert torch.equal(weight.T, linear.quantized_weight(torch.float64))


def test_what_it_cannot_hold_is_bent_or_refused() -> None:
    for spec, shape in (
        (SPECS["lut2"], (32, 192)),
        (even("seq", 2), (32, 192)),
        (even("int", 4, 96), (32, 192)),
        (even("int", 4), (40, 192)),
    ):
        assert gptq.lost(spec, shape) is not None
        bent = gptq.scheme(spec, shape)
        assert bent.bits == spec.bits and gptq.lost(bent, (32, 192)) is None
        with pytest.raises(ExportError, match="2 bits"):
            gptq.scheme(even("seq", 1), shape)


def test_the_configuration_names_what_differs(tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE)
    quantize_model(LanguageModel(model), TO.plan(PLAN, model))
    with pytest.raises(DtypeError, match="fp32, .*--dtype fp16"):
        gptq.write(model, None, tmp_path)
    gptq.write(model.half(), None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    usual, named = (config["bits"], config["group_size"]), config["dynamic"]
    forms = {
        n: (gptq.stored_bits(m.spec), m.spec.group_size) for n, m in quant_linears(model).items()
    }
    for name, form in forms.items():
        said = named.get("+:^" + name.replace(".", r"\.") + "$")
        assert form == (usual if said is None else (said["bits"], said["group_size"]))
    found = float_state(tmp_path, config)  # by the rule with which GPTQ checkpoints are opened
    for name, module in quant_linears(model).items():
        assert torch.equal(found[f"{name}.weight"], module.quantized_weight(torch.float16))
    left = {
        name for name, _ in model.named_modules() if name.endswith(("k_proj", "v_proj", "o_proj"))
    }
    assert {each for each in named if each.startswith("-:")} == {
        "-:^" + name.replace(".", r"\.") + "$" for name in left | {"lm_head"}
    }


@needs_reader
@pytest.mark.filterwarnings("ignore")  # what its modules do as they are imported
@pytest.mark.parametrize("dtype", DTYPES)
def test_transformers_reads_our_logits(dtype: str, tmp_path: Path) -> None:
    model = tiny_model("llama", initializer_range=0.2, **SHAPE)
    quantize_model(LanguageModel(model), TO.plan(PLAN, model))
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "student")
    out = tmp_path / "out"
    report = export_model(str(tmp_path / "student"), ExportConfig(to="gptq", dtype=dtype), out)
    assert report.logits_max_diff < 1e-4 and DTYPES[dtype] == getattr(torch, report.dtype)
    student = load_checkpoint(tmp_path / "student", DTYPES[dtype])
    with torch.no_grad():
        next(iter(quant_linears(student).values())).scales *= 1.25
    with pytest.raises(ExportError, match="gives other logits"):
        check_equal("gptq", student, out)
