"""Target litert: which weights its integers hold, and a program that computes our logits.

What runs a program needs litert-torch: `.ci/engine litert` installs it and runs these.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from coded import MIXED, SHAPE, even, mixed
from quantized import SPECS, with_rounded_inputs
from tiny import tiny_model

from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import check_equal, export_model
from qat.export.parts import DtypeError
from qat.extensions.targets import litert, litertlm
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.nn.quant_linear import quant_linears

needs_litert = pytest.mark.skipif(
    find_spec("litert_torch") is None, reason="needs litert-torch: bash .ci/engine litert"
)


def test_what_it_cannot_hold_is_bent_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (SPECS["lut2"], even("seq", 8), even("int", 4, 24)):
        bent = litert.scheme(spec, (8, 192))
        assert litert.lost(spec, (8, 192)) is not None and litert.lost(bent, (8, 192)) is None
        assert bent.bits == spec.bits
    for spec, bits in ((even("int", 2), 2), (even("seq", 2), 4), (even("int", 5), 8)):
        # a scale and its zero point for each of 32 weights, in each graph of a program
        assert litert.file_bits(spec, (8, 192)) == (bits + 3) * 8 * 192
        assert litertlm.file_bits(spec, (8, 192)) == (bits + 6) * 8 * 192
    model = tiny_model("llama", **SHAPE)
    monkeypatch.setattr(litert, "MOST_BYTES", 1000)
    with pytest.raises(ExportError, match="GB of float weights"):
        litert.write(model, None, Path("nowhere"))
    with pytest.raises(DtypeError, match="fp16"):
        litert.write(model.half(), None, Path("nowhere"))


@needs_litert
@pytest.mark.filterwarnings("ignore")  # what its modules do as they are imported
def test_a_program_computes_our_logits(tmp_path: Path) -> None:
    model = mixed(tmp_path / "floats", MIXED, None)
    save_checkpoint(with_rounded_inputs(model, "int8-static"), None, tmp_path / "rounded")
    for name in ("floats", "rounded"):
        report = export_model(
            str(tmp_path / name), ExportConfig(to="litert"), tmp_path / f"to_{name}"
        )
        assert report.logits_max_diff < 1e-4 and report.dtype == "float32"
        assert 0 < report.bytes < 4 * (report.quantized_weights + litert.LENGTH**2)  # the mask
        student = load_checkpoint(tmp_path / name, torch.float32)
        with torch.no_grad():
            read = next(iter(quant_linears(student).values()))
            changed = read.scales if name == "floats" else read.activation.scale
            changed *= 1.25
        with pytest.raises(ExportError, match="gives other logits"):
            check_equal("litert", student, tmp_path / f"to_{name}")
