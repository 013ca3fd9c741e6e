"""Target awq: which weights the layout holds, and transformers' own reader of it.

What reads a directory needs gptqmodel: `.ci/engine awq` installs it and runs these.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from coded import SHAPE, even
from quantized import SPECS, frozen_linear
from tiny import tiny_model, tiny_tokenizer

from qat.convert.quantize import quantize_model
from qat.convert.shipping import Shipping
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import check_equal, export_model
from qat.export.parts import logits_of, probe_ids, reloaded
from qat.extensions.targets import awq
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.dequantize import float_state
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import quant_linears
from qat.quant.spec import PlanRule, QuantPlan

PLAN = QuantPlan(
    name="mixed",
    rules=(
        PlanRule(pattern="*.down_proj", spec=even("seq", 3, 96)),
        PlanRule(pattern="*.gate_proj", spec=even("int", 4)),
        PlanRule(pattern="*.up_proj", spec=even("ternary", 2)),
        PlanRule(pattern="*.q_proj", spec=even("int", 2, 64)),
        PlanRule(pattern="*.o_proj", spec=even("seq", 1, 64)),
    ),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
needs_reader = pytest.mark.skipif(
    find_spec("gptqmodel") is None, reason="needs gptqmodel: bash .ci/engine awq"
)


def test_what_it_cannot_hold_is_bent_or_refused() -> None:
    for spec, shape in (
        (SPECS["lut2"], (32, 192)),
        (even("seq", 4), (32, 192)),
        (even("int", 4, 48), (32, 192)),
        (even("int", 3), (40, 192)),
    ):
        bent = awq.scheme(spec, shape)
        assert awq.lost(spec, shape) is not None and awq.lost(bent, (32, 192)) is None
        assert bent.bits == spec.bits and awq.file_bits(bent, (32, 192)) <= 32 * 192 * 4.625
    with pytest.raises(ExportError, match="4 bits"):
        awq.scheme(even("int", 5), (32, 192))


def test_all_weights_have_one_size_of_groups_and_the_words_of_the_layout(tmp_path: Path) -> None:
    model = tiny_model("llama", **SHAPE)
    quantize_model(LanguageModel(model), PLAN)
    with pytest.raises(ExportError, match="fp32, .*--dtype fp16"):
        awq.write(model, None, tmp_path)
    awq.write(model.half(), None, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["group_size"] == 32
    assert {name.rpartition(".")[2] for name in settings["modules_to_not_convert"]} == {
        "k_proj",
        "v_proj",
        "lm_head",
    }
    found = float_state(tmp_path, settings)  # by the rule with which AWQ checkpoints are opened
    for name, module in quant_linears(model).items():
        assert torch.equal(found[f"{name}.weight"], module.quantized_weight(torch.float16))
    linear = frozen_linear(8, 32, even("int", 4))
    codes = linear.quantized().indices.int()  # from -8 on, so from code 0
    word = int(awq.packed("it", linear, 32)["qweight"][0, 0]) % 2**32
    assert [word >> 4 * nibble & 15 for nibble in range(8)] == codes[
        [0, 2, 4, 6, 1, 3, 5, 7], 0
    ].tolist()


@needs_reader
@pytest.mark.filterwarnings("ignore")  # what its modules do as they are imported
@pytest.mark.parametrize("dtype", DTYPES)
def test_transformers_reads_our_logits(dtype: str, tmp_path: Path) -> None:
    model = tiny_model("llama", initializer_range=0.2, **SHAPE)
    quantize_model(LanguageModel(model), Shipping({"awq": awq}).plan(PLAN, model))
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "student")
    out = tmp_path / "out"
    report = export_model(str(tmp_path / "student"), ExportConfig(to="awq", dtype=dtype), out)
    assert report.logits_max_diff == 0 and DTYPES[dtype] == getattr(torch, report.dtype)
    students = [
        load_checkpoint(tmp_path / "student", each) for each in (DTYPES[dtype], torch.float32)
    ]
    # the engine's own products, as it chooses them on this processor
    ids = probe_ids(students[0])
    found = logits_of(reloaded(students[0], out, dtype="auto"), ids).float()
    ours = logits_of(students[1], ids)
    assert (found - ours).abs().max() < 16 * torch.finfo(DTYPES[dtype]).eps * ours.abs().max()
    with torch.no_grad():
        next(iter(quant_linears(students[0]).values())).scales *= 1.25
    with pytest.raises(ExportError, match="gives other logits"):
        check_equal("awq", students[0], out)
