"""Target onnx: which weights it holds, and that ONNX Runtime computes our logits and tokens.

What runs a program needs the extra `onnx`.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from coded import MIXED, SHAPE, even, mixed
from quantized import SPECS, frozen_linear, tiny_quantized
from tiny import IDS, VOCAB, logits, tiny_model, tiny_tokenizer

from qat.convert.quantize import quantize_model
from qat.convert.shipping import Shipping
from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import check_equal, export_model
from qat.export.parts import DtypeError
from qat.export.targets import check_model
from qat.extensions.targets import onnx
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import with_tables
from qat.quant.spec import PRESETS, LutSpec
from qat.quant.weight import unpack

TO = Shipping({"onnx": onnx})
needs_onnx = pytest.mark.skipif(
    find_spec("onnxruntime") is None or find_spec("onnx") is None, reason="needs the extra onnx"
)


HELD = (
    (even("seq", 2, 64), 2, 1.5),
    (even("seq", 1), 2, 2),
    (even("ternary", 2), 2, 2),
    (even("int", 2, 16), 2, 2),
    (even("int", 3), 4, 8),
    (even("seq", 3, 96), 4, 8),
    (even("int", 4, 192), 4, 8),
    (even("seq", 4), 8, 128),
    (even("int", 8), 8, 128),
    (even("seq", 7), 8, 128),
)
"""Formats with the bits and the zero point of their codes."""


@pytest.mark.parametrize(("spec", "bits", "zero"), HELD)
def test_levels_are_codes(spec: LutSpec, bits: int, zero: float) -> None:
    linear = frozen_linear(8, 192, spec)
    assert onnx.lost(spec, (8, 192)) is None
    found = onnx.codes_of("it", linear)
    assert (found.bits, found.zero) == (bits, zero) and 192 % found.block == 0
    codes = unpack(found.packed, bits, 192).double().unflatten(1, (-1, found.block))
    weight = (codes - found.zero) * found.scales.double()[..., None]
    assert torch.equal(weight.flatten(1), linear.quantized_weight(torch.float64))
    assert onnx.file_bits(spec, (8, 192)) == 8 * 192 * bits + 16 * found.scales.numel()


@pytest.mark.parametrize("spec", [SPECS["lut2"], SPECS["int3"], even("seq", 8), SPECS["lut2_r4"]])
def test_what_it_cannot_hold_is_bent_or_refused(spec: LutSpec) -> None:
    assert onnx.lost(spec, (8, 64)) is not None
    if spec.scale == "low_rank":
        with pytest.raises(ExportError, match="low rank"):
            onnx.scheme(spec, (8, 64))
        return
    bent = onnx.scheme(spec, (8, 64))
    assert bent.bits == spec.bits and onnx.lost(bent, (8, 64)) is None


def test_models_and_dtypes_that_it_does_not_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"codebook is lut, .*'qat convert --for onnx'"):
        check_model("onnx", tiny_quantized("qwen3", SPECS["lut2"]))
    model = tiny_quantized("qwen3", even("int", 4))
    check_model("onnx", model)
    with pytest.raises(DtypeError, match="bf16, .*--dtype fp32"):
        onnx.write(model.bfloat16(), None, tmp_path)
    model.config.model_type = "other"
    with pytest.raises(ExportError, match="model_type=other"):
        check_model("onnx", model)


@needs_onnx
@pytest.mark.parametrize(
    ("tables", "is_tied"),
    [(None, True), (None, False), (even("seq", 2), True), (even("int", 8), False)],
)
def test_a_program_computes_our_logits(tables, is_tied: bool, tmp_path: Path) -> None:
    """Formats of all kinds, a prompt and then a token at a time; another model is noticed."""
    student = mixed(tmp_path / "student", MIXED, tables, tie_word_embeddings=is_tied)
    out = tmp_path / "out"
    report = export_model(str(tmp_path / "student"), ExportConfig(to="onnx"), out)
    assert report.logits_max_diff < 1e-4 and report.dtype == "float32"
    assert report.bytes == (out / onnx.DATA_NAME).stat().st_size
    expected = logits(student)
    exact = onnx.logits(student, out / onnx.EXACT_NAME, IDS)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    for options in (None, onnx.FAST):  # inputs of 8 bits move logits, by little
        rounded = onnx.logits(student, out / onnx.FILE_NAME, IDS, options)
        assert 1e-4 < ((rounded - expected).norm() / expected.norm()).item() < 0.1
    with torch.no_grad():
        next(iter(quant_linears(student).values())).scales *= 1.25
    with pytest.raises(ExportError, match="gives other logits"):
        check_equal("onnx", student, out)


@needs_onnx
def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    tables, sizes = even("int", 4), {}
    for is_tied in (True, False):
        place = tmp_path / str(is_tied)
        student = mixed(place, MIXED, tables, tie_word_embeddings=is_tied)
        onnx.write(student, None, place)
        sizes[is_tied] = (place / onnx.DATA_NAME).stat().st_size
    table = onnx.file_bits(tables, (VOCAB, SHAPE["hidden_size"])) // 8
    assert 0 <= sizes[False] - sizes[True] - table < 128  # what aligns tensors


@needs_onnx
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_onnxruntime_genai_generates_our_tokens(architecture: str, tmp_path: Path) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    model = tiny_model(architecture, initializer_range=0.2, **SHAPE)
    quantize_model(LanguageModel(model), TO.plan(with_tables(PRESETS["q2a4"], model, 4), model))
    tokenizer = tiny_tokenizer()
    onnx.write(model, tokenizer, tmp_path)
    config = og.Config(str(tmp_path))
    config.overlay(json.dumps(onnx.EXACT))
    engine = og.Model(config)
    prompt = og.Tokenizer(engine).encode("the cat sat")
    assert [*prompt] == tokenizer("the cat sat").input_ids
    parameters = og.GeneratorParams(engine)
    parameters.set_search_options(max_length=24)
    generator = og.Generator(engine, parameters)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    found = np.array(generator.get_sequence(0))
    expected = model.generate(torch.tensor(prompt)[None], max_length=24, do_sample=False)
    assert found.tolist() == expected[0].tolist()
