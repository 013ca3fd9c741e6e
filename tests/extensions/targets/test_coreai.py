"""Target coreai: Apple's own runtime computes our logits from the written program."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from qat.convert.quantize import quantize_model
from qat.convert.shipping import Shipping
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.extensions.targets import coreai
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.nn.swap import with_tables
from qat.quant.spec import PRESETS


def test_core_ai_computes_our_logits_from_tables(tmp_path: Path) -> None:
    pytest.importorskip("coreai_torch")
    for plan, is_tied in (("q2a4", True), ("v2a4", False)):
        model = tiny_model("qwen3", tie_word_embeddings=is_tied, attention_bias=True)
        given = Shipping({"coreai": coreai}).plan(with_tables(PRESETS[plan], model, 4), model)
        quantize_model(LanguageModel(model), given)
        torch.nn.init.normal_(model.model.layers[0].self_attn.o_proj.bias)
        save_checkpoint(model, None, tmp_path / plan)
        config = ExportConfig(to="coreai", dtype="fp32")
        report = export_model(str(tmp_path / plan), config, tmp_path / f"{plan}_out")
        assert report.logits_max_diff < 1e-5 and report.bytes > 0
        half = ExportConfig(to="coreai", dtype="fp16")
        short = export_model(str(tmp_path / plan), half, tmp_path / f"{plan}_half")
        assert 0 < short.logits_max_diff and short.bytes < report.bytes
        with pytest.raises(ExportError, match="bf16"):
            bf16 = ExportConfig(to="coreai", dtype="bf16")
            export_model(str(tmp_path / plan), bf16, tmp_path / "bf16")
