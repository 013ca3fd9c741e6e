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


def move_weights_behind(path: Path) -> None:
    """Write a program again as LiteRT does with large ones: buffers by their place in the file."""
    from ai_edge_litert.tools import flatbuffer_utils

    program = flatbuffer_utils.convert_bytearray_to_object(path.read_bytes())
    moved = [buffer for buffer in program.buffers if buffer.data is not None and len(buffer.data)]
    data = [bytes(buffer.data) for buffer in moved]
    for buffer, kept in zip(moved, data, strict=True):
        buffer.data, buffer.offset, buffer.size = None, 2, len(kept)
    place = len(flatbuffer_utils.convert_object_to_bytearray(program))
    for buffer in moved:
        buffer.offset, place = place, place + buffer.size
    path.write_bytes(flatbuffer_utils.convert_object_to_bytearray(program) + b"".join(data))


@needs_litert
@pytest.mark.filterwarnings("ignore")
def test_weights_behind_the_tables_of_a_large_program_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large:
        def __init__(self, program: object) -> None:
            self.program = convert(program)

        def export(self, path: str) -> None:
            self.program.export(path)
            move_weights_behind(Path(path))

    model, convert = mixed(tmp_path / "student", MIXED, None), litert._converted
    for place, how in (("small", convert), ("large", Large)):
        monkeypatch.setattr(litert, "_converted", how)
        (tmp_path / place).mkdir()
        litert.write(model, None, tmp_path / place)
    found = [(tmp_path / place / litert.FILE_NAME).read_bytes() for place in ("small", "large")]
    assert found[0] == found[1]
