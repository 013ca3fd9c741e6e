"""Export of students with adapters: merged into a dense model, kept in a packed one."""

import json
from pathlib import Path

import pytest
import torch
from quantized import SPECS, tiny_adapted
from safetensors.torch import load_file
from tiny import logits
from transformers import AutoModelForCausalLM

from qat.backend.base import DTYPES
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.models.checkpoint import load_checkpoint, save_checkpoint


@pytest.mark.parametrize(
    ("to", "dtype"), [("packed", "bf16"), ("packed", "fp32"), ("dense", "fp16"), ("dense", "bf16")]
)
def test_export_computes_what_the_student_computes(to: str, dtype: str, tmp_path: Path) -> None:
    save_checkpoint(tiny_adapted("qwen3", SPECS["lut2"]), None, tmp_path / "student")
    out = tmp_path / "out"
    report = export_model(str(tmp_path / "student"), ExportConfig(to=to, dtype=dtype), out)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    expected = logits(load_checkpoint(tmp_path / "student", DTYPES[dtype]))
    assert torch.equal(logits(exported), expected)
    has_adapters = any("lora" in name for name in load_file(out / "model.safetensors"))
    assert has_adapters == (to == "packed")
    config = json.loads((out / "config.json").read_text())
    assert ("quantization_config" in config) == (to == "packed")
    if to == "packed":
        assert report.linear_bits > 3 + 16 * 3 * 2 / 64
