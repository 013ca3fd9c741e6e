"""Target openvino: which weights it holds, and that OpenVINO computes our logits and tokens.

What runs a program needs OpenVINO: `.ci/engine openvino` installs it and runs these.
"""

from importlib.util import find_spec
from pathlib import Path

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
from qat.extensions.targets import openvino
from qat.extensions.targets.codes import is_coded, to_codes
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import with_tables
from qat.quant.spec import PRESETS, LutSpec
from qat.quant.weight import unpack

TO = Shipping({"openvino": openvino})
needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason="needs OpenVINO: bash .ci/engine openvino"
)


HELD = (
    (even("seq", 2, 64), 2, 1.5),
    (even("seq", 1), 2, 1.5),
    (even("ternary", 2), 2, 2),
    (even("int", 2, 16), 2, 2),
    (even("int", 3), 4, 8),
    (even("seq", 3, 96), 4, 7.5),
    (even("int", 4, 48), 4, 8),
    (even("seq", 4, 192), 4, 7.5),
    (even("int", 8), 8, 128),
    (even("seq", 8), 8, 127.5),
)
"""Formats with the bits and the zero point of their codes."""
LOOKED_UP = {
    "q_proj": LutSpec(bits=3, group_size=16),
    "up_proj": LutSpec(bits=4, codebook="e2m1", group_size=64, scale_bits=8),
    "down_proj": even("int", 2, 24),
}


@pytest.mark.parametrize(("spec", "bits", "zero"), HELD)
def test_levels_are_codes(spec: LutSpec, bits: int, zero: float) -> None:
    linear = frozen_linear(8, 192, spec)
    assert openvino.lost(spec, (8, 192)) is None and is_coded(spec)
    found = to_codes("it", linear, is_half=spec.codebook == "seq")
    assert (found.bits, found.zero) == (bits, zero)
    codes = unpack(found.packed, bits, 192).double().unflatten(1, (-1, found.block))
    weight = (codes - found.zero) * found.scales.double()[..., None]
    assert torch.equal(weight.flatten(1), linear.quantized_weight(torch.float64))
    assert openvino.file_bits(spec, (8, 192)) == 8 * 192 * bits + 16 * found.scales.numel()


@pytest.mark.parametrize("name", ["lut2", "int3", "seq2", "lut2_r4", "pairs6"])
def test_what_is_no_code_is_looked_up_bent_or_refused(name: str) -> None:
    spec, shape = SPECS[name], (8, 192)
    if name in ("lut2_r4", "pairs6"):
        assert openvino.lost(spec, shape) is not None
        with pytest.raises(ExportError, match="name a plan"):
            openvino.scheme(spec, shape)
        return
    assert openvino.lost(spec, shape) is None and is_coded(spec) == (name == "seq2")
    bent = openvino.scheme(spec, shape)
    assert bent.bits == spec.bits and openvino.lost(bent, shape) is None and is_coded(bent)


def test_models_and_dtypes_that_it_does_not_run_are_refused(tmp_path: Path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    check_model("openvino", model)
    with pytest.raises(DtypeError, match="bf16, .*--dtype fp32"):
        openvino.write(model.bfloat16(), None, tmp_path)
    model.config.model_type = "other"
    with pytest.raises(ExportError, match="model_type=other"):
        check_model("openvino", model)


@needs_openvino
@pytest.mark.parametrize(
    ("formats", "tables", "is_tied"),
    [
        (MIXED, None, True),
        (MIXED, even("seq", 2), True),
        (MIXED, even("int", 8), False),
        (LOOKED_UP, None, False),
        (LOOKED_UP, LutSpec(bits=4, group_size=16), True),
    ],
)
def test_a_program_computes_our_logits(formats, tables, is_tied: bool, tmp_path: Path) -> None:
    """Formats of all kinds, a prompt and then a token at a time; another model is noticed."""
    student = mixed(tmp_path / "student", formats, tables, tie_word_embeddings=is_tied)
    out = tmp_path / "out"
    report = export_model(str(tmp_path / "student"), ExportConfig(to="openvino"), out)
    assert report.logits_max_diff < 1e-4 and report.dtype == "float32"
    assert report.bytes == (out / "openvino_model.bin").stat().st_size
    expected = logits(student)
    exact = openvino.logits(out, IDS, openvino.EXACT)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    rounded = openvino.logits(out, IDS, {"KV_CACHE_PRECISION": "u8"})
    assert ((rounded - expected).norm() / expected.norm()).item() < 0.1
    with torch.no_grad():
        next(iter(quant_linears(student).values())).scales *= 1.25
    with pytest.raises(ExportError, match="gives other logits"):
        check_equal("openvino", student, out)


@needs_openvino
def test_codes_stay_codes_in_memory(tmp_path: Path) -> None:
    """OpenVINO multiplies codes as they are; other levels become floats as it loads them."""
    import openvino as ov

    def held(name: str, formats: dict[str, LutSpec], tables: LutSpec) -> set[str]:
        place = tmp_path / name
        openvino.write(mixed(place, formats, tables, tie_word_embeddings=True), None, place)
        compiled = ov.compile_model(place / openvino.FILE_NAME, "CPU", openvino.EXACT)
        infos = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
        products = [info for info in infos if info["layerType"].value == "FullyConnected"]
        return {info["runtimePrecision"].value for info in products}

    assert held("codes", MIXED, even("int", 4)) == {"u2", "u4", "u8", "f32"}
    assert held("levels", LOOKED_UP, LutSpec(bits=4, group_size=16)) == {"f32"}


@needs_openvino
def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    tables, sizes = even("int", 4), {}
    for is_tied in (True, False):
        place = tmp_path / str(is_tied)
        student = mixed(place, MIXED, tables, tie_word_embeddings=is_tied)
        openvino.write(student, None, place)
        sizes[is_tied] = (place / "openvino_model.bin").stat().st_size
    table = openvino.file_bits(tables, (VOCAB, SHAPE["hidden_size"])) // 8
    assert 0 <= sizes[False] - sizes[True] - table < 128  # what aligns tensors


@needs_openvino
@pytest.mark.parametrize("backend", ["PA", "SDPA"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_openvino_genai_generates_our_tokens(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    genai = pytest.importorskip("openvino_genai")
    model = tiny_model(architecture, initializer_range=0.2, **SHAPE)
    quantize_model(LanguageModel(model), TO.plan(with_tables(PRESETS["q2a4"], model, 4), model))
    tokenizer = tiny_tokenizer()
    openvino.write(model, tokenizer, tmp_path)
    how = {**openvino.EXACT, "ATTENTION_BACKEND": backend}
    engine = genai.LLMPipeline(str(tmp_path), "CPU", **how)
    prompt = engine.get_tokenizer().encode("the cat sat")
    ids = torch.from_numpy(prompt.input_ids.data)
    assert ids.tolist() == [tokenizer("the cat sat").input_ids]
    wished = genai.GenerationConfig(max_new_tokens=20, do_sample=False)
    found = engine.generate(prompt, wished).tokens[0]
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert found == expected[0, ids.shape[1] :].tolist()
